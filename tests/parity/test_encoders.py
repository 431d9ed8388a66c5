"""Encoders, pooling and cross-encoders against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import octavo
from octavo.backends.base import BLOCK, Limits
from octavo.backends.cpu import load, lower
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.pooling import Pooling, read_pooling
from octavo.engine import Engine, Request, SamplingParams
from octavo.errors import RequestError, Unsupported
from octavo.models import build_program
from tests.small_models import Small, save_hf

TEXTS = [
    "This is an example sentence",
    "Each sentence is converted, 日本語 too: naïve café",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 40,
]


def reference_vectors(folder: Path) -> list[np.ndarray]:
    """sentence-transformers' arithmetic for this model: the mean of the states, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )
    out = []
    for text in TEXTS:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        out.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return out


def test_the_embedding_model(minilm: Path) -> None:
    llm = octavo.LLM(str(minilm))
    expected = reference_vectors(minilm)
    for got, reference in zip(llm.embed(TEXTS), expected, strict=True):
        assert np.abs(got - reference).max() < 1e-5  # the issue asks for 1e-4
    alone = [llm.embed(t)[0] for t in TEXTS]
    assert all((a == b).all() for a, b in zip(alone, llm.embed(TEXTS), strict=True))
    close, far = llm.rank(
        "What is the capital of France?", ["Paris is its capital.", "I like cheese."]
    )
    assert close > 0.4 > far
    with pytest.raises(RequestError, match="512"):
        llm.embed("word " * 600)
    with pytest.raises(RequestError, match="no text"):
        llm.generate("x")


@pytest.mark.parametrize("isa", ["avx2", "scalar"])
def test_every_instruction_set(minilm: Path, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = octavo.LLM(str(minilm)).embed(TEXTS[:3])
    monkeypatch.setenv("OCTAVO_ISA", isa)
    other = octavo.LLM(str(minilm), threads=1).embed(TEXTS[:3])
    assert all(np.abs(a - b).max() < 1e-6 for a, b in zip(usual, other, strict=True))


def test_user_text_holds_no_control_tokens(minilm: Path) -> None:
    ids, _ = octavo.LLM(str(minilm)).tokenizer.encode_segments("a [SEP] b")
    assert ids.count(ids[-1]) == 1


def _tokenizer(folder: Path, roberta: bool) -> None:
    """A word-level tokenizer that frames texts and pairs as the family does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    cls, sep = ("<s>", "</s>") if roberta else ("[CLS]", "[SEP]")
    words = [cls, "<pad>", sep, "[UNK]", *(f"w{i}" for i in range(96))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pair = f"{cls} $A {sep} {sep} $B {sep}" if roberta else f"{cls} $A {sep} $B:1 {sep}:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=pair, special_tokens=[(cls, 0), (sep, 2)]
    )
    tokenizer.add_special_tokens([cls, sep])
    tokenizer.save(str(folder / "tokenizer.json"))


def small_encoder(folder: Path, family: str, head: bool, labels: int = 1) -> Any:
    import transformers as t

    torch.manual_seed(4)
    options: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 3, "num_labels": labels,
        "intermediate_size": 100, "max_position_embeddings": 80, "pad_token_id": 1, "hidden_act": "gelu",
    }  # fmt: skip
    name = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}[family]
    config = getattr(t, name + "Config")(**options)
    kind = "ForSequenceClassification" if head else "Model"
    model = getattr(t, name + kind)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else p.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    _tokenizer(folder, family != "bert")
    return model


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_small_encoders(family: str, tmp_path: Path) -> None:
    model = small_encoder(tmp_path, family, head=False)
    ids = [0, *np.random.default_rng(1).integers(4, 100, 60).tolist(), 2]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).last_hidden_state[0]
    reference = Reference(build_program(open_checkpoint(tmp_path))).logits(ids)
    assert (reference - expected).abs().max() < 1e-4
    text = " ".join(f"w{i - 4}" for i in ids[1:-1])
    (got,) = octavo.LLM(str(tmp_path)).embed(text)
    vector = torch.nn.functional.normalize(expected.mean(0), dim=0).numpy()
    assert np.abs(got - vector).max() < 1e-5


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_cross_encoders(family: str, tmp_path: Path) -> None:
    model = small_encoder(tmp_path, family, head=True)
    llm = octavo.LLM(str(tmp_path))
    documents = ["w1 w2 w3", "w9", " ".join(f"w{i}" for i in range(40))]
    got = llm.rank("w5 w6", documents)
    for score, document in zip(got, documents, strict=True):
        ids, types = llm.tokenizer.encode_segments("w5 w6", document)
        with torch.no_grad():
            types_given = {"token_type_ids": torch.tensor([types])} if family == "bert" else {}
            logit = model(torch.tensor([ids]), **types_given).logits[0, 0]
        assert abs(score - float(torch.sigmoid(logit))) < 1e-5
    with pytest.raises(RequestError, match="ranks"):
        llm.embed("w1")


CHUNKS, WHOLE = Limits(64, 8, 64), Limits(1024, 1024, 128)


def pooled(
    folder: Path, texts: list[tuple[list[int], Any]], budget: int | None = None,
    limits: Limits = CHUNKS,
) -> list[np.ndarray]:  # fmt: skip
    program = build_program(open_checkpoint(folder))
    executable = load(lower(program), limits, 2, "f32")
    context = limits.blocks * BLOCK
    engine = Engine(executable, program.vocabulary, context, frozenset({2}), budget=budget)
    for i, (ids, mode) in enumerate(texts):
        engine.add(Request(id=str(i), prompt=ids, params=SamplingParams(), pool=mode))
    out = {}
    while engine.has_work:
        for event in engine.step():
            out[int(event.id)] = np.frombuffer(event.vector, np.float32)
    assert engine.stats().blocks_held == 0
    return [out[i] for i in range(len(texts))]


def test_decoders_are_pooled_too(tmp_path: Path) -> None:
    """The last state of a decoder, whatever is computed beside it or found in the cache."""
    model = save_hf(Small(), tmp_path)
    ids = np.random.default_rng(3).integers(3, 320, 150).tolist()
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]  # type: ignore[union-attr, operator]
    for mode, expected in (("last", states[-1]), ("mean", states.mean(0)), ("cls", states[0])):
        alone = pooled(tmp_path, [(ids, mode)])[0]
        assert np.abs(alone - expected.numpy()).max() < 2e-3
        crowd = pooled(
            tmp_path, [(ids[:70], "mean"), (ids, "last"), (ids, mode), (ids, mode)], budget=48
        )
        assert (crowd[2] == alone).all() and (crowd[3] == alone).all()


def test_pooling_is_read_from_the_folder(minilm: Path, tmp_path: Path) -> None:
    assert read_pooling(open_checkpoint(minilm), True) == Pooling("mean", True)
    small_encoder(tmp_path, "bert", head=False)
    assert read_pooling(open_checkpoint(tmp_path), True) == Pooling("mean", True)
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    (tmp_path / "modules.json").write_text("[]")
    assert read_pooling(open_checkpoint(tmp_path), True) == Pooling("cls", False)
    config.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(Unsupported, match="max_tokens"):
        read_pooling(open_checkpoint(tmp_path), True)


def embedding_gemma(folder: Path) -> Any:
    """As EmbeddingGemma: tokens see to both sides, in windows in five of six layers."""
    import transformers as t

    torch.manual_seed(6)
    config = t.Gemma3TextConfig(
        vocab_size=100, hidden_size=48, intermediate_size=64, num_hidden_layers=6, head_dim=16,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=1024,
        sliding_window=300, query_pre_attn_scalar=16, use_bidirectional_attention=True,
        bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    model = t.Gemma3TextModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else p.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    _tokenizer(folder, True)
    return model


@pytest.mark.parametrize("isa", [None, "avx2", "scalar"])
def test_windows_to_both_sides(
    isa: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the windows and the chunks of keys, alone and beside others, on every instruction set."""
    if isa:
        monkeypatch.setenv("OCTAVO_ISA", isa)
    model = embedding_gemma(tmp_path)
    program = build_program(open_checkpoint(tmp_path))
    assert program.task == "embed" and not program.causal
    ids = np.random.default_rng(2).integers(4, 100, 700).tolist()
    for length in (700, 301, 150, 3, 1):
        with torch.no_grad():
            states = model(torch.tensor([ids[:length]])).last_hidden_state[0]
        for mode, expected in (("mean", states.mean(0)), ("last", states[-1])):
            alone = pooled(tmp_path, [(ids[:length], mode)], limits=WHOLE)[0]
            assert np.abs(alone - expected.numpy()).max() < 1e-3
            crowd = pooled(tmp_path, [(ids[:90], "mean"), (ids[:length], mode)], limits=WHOLE)
            assert (crowd[1] == alone).all()
    one, two = octavo.LLM(str(tmp_path), threads=1).embed(["w1 w2 w3", "w9"])
    with torch.no_grad():
        states = model(torch.tensor([[0, 5, 6, 7, 2]])).last_hidden_state[0].mean(0)
    assert np.abs(one - torch.nn.functional.normalize(states, dim=0).numpy()).max() < 1e-4
    assert not np.allclose(one, two)


def test_base_class_decoders_embed(tmp_path: Path) -> None:
    """An untied decoder saved without its head makes embeddings, of its last states, in chunks."""
    from tests.configs import build

    base = build("qwen3", {"max_position_embeddings": 512}).model
    base.save_pretrained(tmp_path)
    _tokenizer(tmp_path, True)
    assert read_pooling(open_checkpoint(tmp_path), False) == Pooling("last", True)
    ids = np.random.default_rng(3).integers(3, 96, 300).tolist()
    with torch.no_grad():
        states = base(torch.tensor([ids])).last_hidden_state[0]
    for mode, expected in (("last", states[-1]), ("mean", states.mean(0))):
        whole = pooled(tmp_path, [(ids, mode)])[0]
        chunks = pooled(tmp_path, [(ids, mode), (ids[:200], mode)], budget=32)[0]
        assert np.abs(whole - expected.numpy()).max() < 1e-3
        assert (whole == chunks).all()
    llm = octavo.LLM(str(tmp_path))
    assert llm.embed("w1 w2")[0].shape == (32,)
    with pytest.raises(RequestError, match="no text"):
        llm.generate("w1")
