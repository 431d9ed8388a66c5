"""Encoders, pooling and cross-encoders against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import octavo
from octavo.backends.base import BLOCK, ProgramOptions, StepLimits
from octavo.backends.cpu import load, lower
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.pooling import Pooling, read_pooling
from octavo.engine.engine import Engine
from octavo.engine.events import Pooled
from octavo.engine.request import Request, SamplingParams
from octavo.errors import OctavoError, RequestError, Unsupported
from octavo.models import build_program
from tests.parity.test_vocabularies import wordpiece
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


def test_bert_from_gguf(minilm: Path, tmp_path: Path) -> None:
    """The embedding model as llama.cpp's converter writes it: the same bits as from its folder."""
    path = tmp_path / "minilm.gguf"
    config = json.loads((minilm / "config.json").read_text())
    w = gguf.GGUFWriter(path, "bert")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_layer_norm_eps(config["layer_norm_eps"])
    w.add_causal_attention(False)
    w.add_pooling_type(gguf.PoolingType.MEAN)
    metadata, _ = wordpiece(minilm)
    w.add_tokenizer_model(metadata["model"])
    w.add_token_list(metadata["tokens"])
    w.add_token_types(metadata["token_type"])
    w.add_token_type_count(config["type_vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(minilm / "model.safetensors").items():
        if "position_ids" in name or "pooler" in name:  # which the converter leaves out
            continue
        target = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        w.add_tensor(target, tensor.float().numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    from_file, from_folder = octavo.LLM(str(path)), octavo.LLM(str(minilm))
    pairs = zip(from_file.embed(TEXTS), from_folder.embed(TEXTS), strict=True)
    assert all((a == b).all() for a, b in pairs)
    assert from_file.rank(TEXTS[0], TEXTS[1:3]) == from_folder.rank(TEXTS[0], TEXTS[1:3])


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


def small_encoder(folder: Path, family: str, head: bool, labels: int = 1, **changes: Any) -> Any:
    import transformers as t

    torch.manual_seed(4)
    options: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 3, "num_labels": labels,
        "intermediate_size": 100, "max_position_embeddings": 80, "pad_token_id": 1, "hidden_act": "gelu",
        **changes,
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


CHUNKS, WHOLE = StepLimits(64, 8, 64), StepLimits(1024, 1024, 128)


def pooled(
    folder: Path, texts: list[tuple[list[int], Any]], budget: int | None = None,
    limits: StepLimits = CHUNKS,
) -> list[np.ndarray]:  # fmt: skip
    program = build_program(open_checkpoint(folder))
    executable = load(lower(program), ProgramOptions(limits, 2, "f32"))
    context = limits.blocks * BLOCK
    engine = Engine(executable, program.vocabulary, context, frozenset({2}), budget=budget)
    for i, (ids, mode) in enumerate(texts):
        engine.add(Request(id=str(i), prompt=ids, params=SamplingParams(), pool=mode))
    out = {}
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, Pooled)
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
    modules(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    assert read_pooling(open_checkpoint(tmp_path), True) == Pooling("cls", False)
    modules(tmp_path, {"pooling_mode": "lasttoken"}, "Normalize")
    assert read_pooling(open_checkpoint(tmp_path), True) == Pooling("last", True)


# -- modules of sentence-transformers ---------------------------------------------------------


def modules(folder: Path, pooling: dict[str, Any], *others: str | dict[str, Any]) -> None:
    """modules.json and the folders it names, as sentence-transformers saves them. A Dense module is
    given by its settings; its weights are random."""
    kinds = ["Transformer", "Pooling", *("Dense" if isinstance(o, dict) else o for o in others)]
    for i, (kind, options) in enumerate(zip(kinds, [{}, pooling, *others], strict=True)):
        path = folder / f"{i}_{kind}"
        path.mkdir(exist_ok=True)
        if isinstance(options, dict) and i:
            (path / "config.json").write_text(json.dumps(options))
        if kind == "Dense":
            assert isinstance(options, dict)
            generator = torch.Generator().manual_seed(i)
            shape = options["out_features"], options["in_features"]
            weights = {"linear.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5}
            if options["bias"]:
                weights["linear.bias"] = torch.randn(shape[0], generator=generator)
            if options.get("use_residual") and shape[0] != shape[1]:
                weights["residual.weight"] = torch.randn(shape, generator=generator)
            save_file(weights, path / "model.safetensors")
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
         "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(entries))


def dense(inputs: int, outputs: int, activation: str, bias: bool, **more: Any) -> dict[str, Any]:
    where = "torch.nn.modules." + ("linear." if activation == "Identity" else "activation.")
    return {
        "in_features": inputs, "out_features": outputs, "bias": bias,
        "activation_function": where + activation,
    } | more  # fmt: skip


def apply_modules(folder: Path, vector: torch.Tensor) -> torch.Tensor:
    """sentence-transformers' arithmetic for what follows the pooling, with torch's own classes."""
    for entry in json.loads((folder / "modules.json").read_text())[2:]:
        kind, path = entry["type"].split(".")[-1], folder / entry["path"]
        if kind == "Normalize":
            vector = torch.nn.functional.normalize(vector, dim=-1)
        if kind != "Dense":
            continue
        config = json.loads((path / "config.json").read_text())
        weights = load_file(path / "model.safetensors")
        out = vector @ weights["linear.weight"].T + weights.get("linear.bias", torch.zeros(()))
        out = getattr(torch.nn, config["activation_function"].split(".")[-1])()(out)
        if config.get("use_residual"):
            r = weights.get("residual.weight")
            out = out + (vector if r is None else vector @ r.T)
        vector = out
    return vector


CHAINS: dict[str, list[str | dict[str, Any]]] = {
    "embeddinggemma": [dense(60, 240, "Identity", False), dense(240, 60, "Identity", False), "Normalize"],
    "distiluse": [dense(60, 16, "Tanh", True)],
    "normalized before": ["Normalize", dense(60, 24, "GELU", True)],
    "residual": [dense(60, 60, "SiLU", True, use_residual=True), dense(60, 20, "ReLU", True, use_residual=True)],
    "sigmoid": [dense(60, 8, "Sigmoid", False), "Dropout", "Normalize"],
}  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
def test_dense_modules(chain: str, tmp_path: Path) -> None:
    """Each module is applied, in order: the vector has their width and transformers' values."""
    model = small_encoder(tmp_path, "bert", head=False)
    modules(tmp_path, {"pooling_mode_mean_tokens": True}, *CHAINS[chain])
    llm = octavo.LLM(str(tmp_path))
    texts = ["w1 w2 w3", "w9", " ".join(f"w{i}" for i in range(40))]
    for text, got in zip(texts, llm.embed(texts), strict=True):
        ids, types = llm.tokenizer.encode_segments(text)
        with torch.no_grad():
            states = model(torch.tensor([ids]), token_type_ids=torch.tensor([types]))
            expected = apply_modules(tmp_path, states.last_hidden_state[0].mean(0)).numpy()
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() < 1e-5
        assert (got == llm.embed(text)[0]).all()
    first, second = (v / np.linalg.norm(v) for v in llm.embed(texts[:2]))
    assert abs(llm.rank(texts[0], [texts[1]])[0] - float(first @ second)) < 1e-6


def test_dimensions_are_cut_before_the_length_is_made_one(tmp_path: Path) -> None:
    small_encoder(tmp_path, "bert", head=False)
    modules(tmp_path, {"pooling_mode": "mean"}, dense(60, 90, "Identity", False), "Normalize")
    pooling = read_pooling(open_checkpoint(tmp_path), True)
    state = np.random.default_rng(2).standard_normal(60).astype(np.float32)
    whole, cut = pooling.finish(state), pooling.finish(state, 70)
    assert (whole.shape, cut.shape) == ((90,), (70,))
    assert abs(np.linalg.norm(cut) - 1) < 1e-6
    assert np.abs(cut - whole[:70] / np.linalg.norm(whole[:70])).max() < 1e-6
    with pytest.raises(RequestError, match="dimensions is 91; 1 to 90"):
        pooling.finish(state, 91)


def test_default_prompts_and_lower_case(tmp_path: Path) -> None:
    """What sentence-transformers does to every text before it is tokenized."""
    small_encoder(tmp_path, "bert", head=False)
    plain = octavo.LLM(str(tmp_path)).embed(["w1 w2 w3", "w3"])
    config = {"prompts": {"query": "W1 w2 "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    prompted = octavo.LLM(str(tmp_path)).embed(["W3"])
    assert (prompted[0] == plain[0]).all() and (prompted[0] != plain[1]).any()


REFUSED_MODULES: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "max": ({"pooling_mode_max_tokens": True}, [], "pooling by max"),
    "two modes": ({"pooling_mode": ["mean", "cls"]}, [], "pooling by mean, cls"),
    "no mode": ({}, [], "pooling by nothing"),
    "unhashable": ({"pooling_mode": {"a": 1}}, [], "pooling by"),
    "unknown module": ({"pooling_mode": "cls"}, ["WeightedLayerPooling"], "'WeightedLayerPooling'"),
    "pooling twice": ({"pooling_mode": "cls"}, ["Pooling"], "Transformer, Pooling, Pooling"),
    "activation": ({"pooling_mode": "cls"}, [dense(60, 4, "PReLU", True)], "'PReLU'"),
    "width": ({"pooling_mode": "cls"}, [dense(61, 4, "Tanh", True)], "61 features after 60"),
    "chain": ({"pooling_mode": "cls"}, [dense(60, 8, "Tanh", True), dense(9, 8, "Tanh", True)], "9 features after 8"),
    "tokens": ({"pooling_mode": "cls"}, [dense(60, 8, "Tanh", True, module_input_name="token_embeddings")], "module_input_name"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_MODULES)
def test_modules_that_are_not_built_are_refused(case: str, tmp_path: Path) -> None:
    pooling, others, reason = REFUSED_MODULES[case]
    small_encoder(tmp_path, "bert", head=False)
    modules(tmp_path, pooling, *others)
    with pytest.raises(OctavoError, match=reason):
        read_pooling(open_checkpoint(tmp_path), True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"out_features": 1 << 40}, "out_features is 1099511627776"), ({"out_features": "9"}, "out_features"),
        ({"out_features": 9}, r"linear.weight is F32 \[8, 60\]"), ({"bias": False}, "linear.bias"),
    ],
)  # fmt: skip
def test_damaged_dense_modules(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    small_encoder(tmp_path, "bert", head=False)
    modules(tmp_path, {"pooling_mode": "cls"}, dense(60, 8, "Tanh", True))
    path = tmp_path / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OctavoError, match=reason):
        read_pooling(open_checkpoint(tmp_path), True)
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    path.write_text(json.dumps(dense(60, 8, "Tanh", True)))
    with pytest.raises(OctavoError, match="no model.safetensors"):
        read_pooling(open_checkpoint(tmp_path), True)


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_classifiers_of_several_labels_do_not_rank(
    family: str, labels: int, tmp_path: Path
) -> None:
    small_encoder(tmp_path, family, head=True, labels=labels)
    with pytest.raises(Unsupported, match=f"a classifier of {labels} labels"):
        octavo.LLM(str(tmp_path))


@pytest.mark.parametrize("key", ["sentence_transformers", "sbert_ce_default_activation_function"])
def test_scores_go_through_the_models_own_activation(key: str, tmp_path: Path) -> None:
    model = small_encoder(tmp_path, "bert", head=True)
    config = tmp_path / "config.json"
    stored = json.loads(config.read_text())

    def save(name: str) -> None:
        path = f"torch.nn.modules.{name}"
        value = {"activation_fn": path} if key == "sentence_transformers" else path
        config.write_text(json.dumps(stored | {key: value}))

    save("linear.Identity")
    llm = octavo.LLM(str(tmp_path))
    ids, types = llm.tokenizer.encode_segments("w5 w6", "w7")
    with torch.no_grad():
        logit = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 0]
    assert abs(llm.rank("w5 w6", ["w7"])[0] - float(logit)) < 1e-5
    save("activation.Sigmoid")
    got = octavo.LLM(str(tmp_path)).rank("w5 w6", ["w7"])[0]
    assert abs(got - float(torch.sigmoid(logit))) < 1e-6
    save("activation.Softplus")
    with pytest.raises(Unsupported, match="'Softplus'"):
        octavo.LLM(str(tmp_path))


def test_scores_of_large_logits() -> None:
    pooling = Pooling("cls", True)
    assert [pooling.score(x) for x in (-1e4, -0.0, 1e4)] == [0.0, 0.5, 1.0]


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
