"""One model under the names that different classes and versions save it under."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models import build_program
from tests.configs import ENCODERS, LENGTH, MODELS, SIZES, VOCABULARY, build
from tests.conftest import Runner
from tests.parity.test_reference import LIMIT
from tests.small_models import write_config

DECODERS = [name for name in MODELS if name not in ENCODERS]
UNTIED = [
    m for m in DECODERS if m not in ("smollm3", "gemma", "gemma2", "gemma3_text", "gpt2", "opt",
                                     "starcoder2")
]  # fmt: skip
IDS = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(3))


def run(model: torch.nn.Module) -> torch.Tensor:
    """Logits, or a base class's states."""
    with torch.inference_mode():
        return model(IDS[None])[0][0]


def check(folder: Path, want: torch.Tensor, task: str) -> None:
    program = build_program(open_checkpoint(folder))
    assert program.task == task
    got = Reference(program).logits(IDS.tolist())
    assert (got - want).abs().max() <= LIMIT
    cpu = torch.from_numpy(Runner(folder, 64, 8, 1, "f32").logits(IDS.tolist()))
    assert (cpu - want).abs().max() <= LIMIT


def renamed(folder: Path, rename: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {rename(k): v.clone() for k, v in load_file(path).items() if rename(k)}
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("model_type", DECODERS)
def test_base_classes(model_type: str, tmp_path: Path) -> None:
    """A base class saves no head: its states are embeddings, or the head is the embeddings."""
    model = build(model_type, {})
    base = model.base_model
    base.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith(("model.", "transformer.")) for name in names)
    if model_type in UNTIED:
        check(tmp_path, run(base), "embed")
    else:
        check(tmp_path, run(model), "generate")


@pytest.mark.parametrize("model_type", UNTIED)
def test_untied_without_a_head(model_type: str, tmp_path: Path) -> None:
    build(model_type, {}).save_pretrained(tmp_path)
    renamed(tmp_path, lambda name: None if name.startswith("lm_head") else name)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing.*tie_word_embeddings"):
        build_program(open_checkpoint(tmp_path))
    write_config(tmp_path, tie_word_embeddings=True)
    program = build_program(open_checkpoint(tmp_path))
    assert program.task == "generate"


def multimodal(folder: Path) -> torch.nn.Module:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(5)
    text = SIZES | {"head_dim": 8, "sliding_window": 24, "query_pre_attn_scalar": 8}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=5,
        boi_token_index=4, eoi_token_index=3,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.model.language_model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else min(p.shape[-2:]) ** -0.5))
    model.save_pretrained(folder)
    return model


TEXT = "model.language_model."


@pytest.mark.parametrize("prefix", [TEXT, "language_model.model.", "language_model."])
def test_multimodal_gemma3(prefix: str, tmp_path: Path) -> None:
    """Its text is served, whichever version of transformers named the tensors."""
    model = multimodal(tmp_path)

    def rename(name: str) -> str:
        name = name.replace("language_model.model.", TEXT)
        name = name if not name.startswith("vision_tower.") else "model." + name
        return name.replace(TEXT, prefix)

    renamed(tmp_path, rename)
    assert any(name.startswith(prefix) for name in load_file(tmp_path / "model.safetensors"))
    ids = IDS.clamp(min=6)
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    program = build_program(open_checkpoint(tmp_path))
    assert program.task == "generate"
    assert (Reference(program).logits(ids.tolist()) - want).abs().max() <= LIMIT


def test_options_of_the_text_model_count(tmp_path: Path) -> None:
    multimodal(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["depth_multiplier"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="depth_multiplier"):
        build_program(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("llama", "LlamaForSequenceClassification"), ("qwen2", "Qwen2ForRewardModel"),
     ("bert", "BertForTokenClassification"), ("roberta", "RobertaForQuestionAnswering")],
)  # fmt: skip
def test_other_heads(model_type: str, name: str, tmp_path: Path) -> None:
    """A head that is not computed is not passed over."""
    build(model_type, {}).save_pretrained(tmp_path)
    write_config(tmp_path, architectures=[name])
    with pytest.raises(Unsupported, match=f"architectures is '{name}'"):
        build_program(open_checkpoint(tmp_path))
