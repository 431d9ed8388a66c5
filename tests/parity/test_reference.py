"""The torch reference against Hugging Face transformers on the same dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.models import build_program
from octavo.text import load_tokenizer
from tests.conftest import real_text
from tests.small_models import Small, save_hf

LIMIT = 2e-3  # largest difference of any logit


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_real_models(model: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    path: Path = request.getfixturevalue(model)
    oracle = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    checkpoint = open_checkpoint(path)
    reference = Reference(build_program(checkpoint))
    ids = load_tokenizer(checkpoint).encode(real_text(12_000), add_bos=False)
    assert len(ids) >= 8 * 110
    for i in range(8):
        prompt = ids[i * 110 : (i + 1) * 110]
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt])).logits[0]
        difference = (expected - reference.logits(prompt)).abs().max().item()
        print(f"{model} prompt {i}: largest difference {difference:.1e}")
        assert difference <= LIMIT


SMALL = [
    Small(heads=3, kv_heads=1, hidden=96),
    Small(heads=9, kv_heads=3, head_dim=8, hidden=72, tied=False),
    Small(heads=8, kv_heads=2, bias=True),
    Small(heads=8, kv_heads=1, head_dim=32, dtype="bfloat16"),
    Small(family="gemma3", heads=4, kv_heads=1, layers=7),
    Small(family="gemma3", heads=3, kv_heads=3, hidden=96, tied=False, layers=6, head_dim=32),
]


@pytest.mark.parametrize("small", SMALL, ids=lambda s: s.name)
def test_small_models(small: Small, tmp_path: Path) -> None:
    oracle = save_hf(small, tmp_path)
    reference = Reference(build_program(open_checkpoint(tmp_path)))
    ids = torch.randint(3, small.vocabulary, (120,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = oracle(ids[None]).logits[0]
    assert (expected - reference.logits(ids.tolist())).abs().max().item() <= LIMIT


def test_llama3_rope_scaling(tmp_path: Path) -> None:
    from tests.small_models import write_config

    small = Small()
    save_hf(small, tmp_path)
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    write_config(tmp_path, rope_parameters=scaling)
    from transformers import LlamaForCausalLM

    oracle = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = list(range(5, 205))
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    got = Reference(build_program(open_checkpoint(tmp_path))).logits(ids)
    assert (expected - got).abs().max().item() <= LIMIT
