"""Every field of every configuration class that transformers has for our families: obeyed as
transformers obeys it, or refused by name. No field changes a result silently."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import OctavoError, Unsupported
from octavo.models.defaults import DEFAULTS
from tests.configs import (
    BESIDE,
    ENCODERS,
    LENGTH,
    MODELS,
    ROPES,
    VOCABULARY,
    build,
    fields,
    flips,
    loaded,
)
from tests.conftest import Runner
from tests.small_models import write_config

LIMIT = 2e-3  # largest difference of any logit, as for whole families
IDS = np.random.default_rng(3).integers(6, VOCABULARY - 16, LENGTH).tolist()
# What transformers itself cannot make or run: fields, and one of their values.
_TUPLES = {("return_dict", "False")}  # heads need what is below them by name
_BALANCE = {("output_router_logits", "True")}  # a loss of more than one sequence
_WINDOWS = {("sliding_window", "None")}  # its layer types want some all the same
_DECODER = {("add_cross_attention", "True")}
_PADDED = {("pad_token_id", "None")}  # positions are counted from it
IMPOSSIBLE = dict.fromkeys(MODELS, _TUPLES) | {
    "mixtral": _TUPLES | _BALANCE,
    "qwen3_moe": _TUPLES | _BALANCE,
    "olmoe": _TUPLES | _BALANCE,
    "gpt_oss": _TUPLES | _BALANCE | _WINDOWS,
    "olmo3": _TUPLES | _WINDOWS,
    "gemma2": _TUPLES | _WINDOWS,
    "gemma3_text": _TUPLES | _WINDOWS,
    "bert": _DECODER,
    "roberta": _DECODER | _PADDED,
    "xlm-roberta": _DECODER | _PADDED,
}
ROPES_IMPOSSIBLE = {
    "phi": {"longrope", "proportional"},  # for whole heads, of which it turns halves
    "phi3": {"linear", "dynamic", "proportional", "yarn", "llama3"},  # its class wants longrope
}
NO_ROPE = ("gpt2", "opt", *ENCODERS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def impossible(model_type: str, field: str, value: Any) -> bool:
    if field == "rope_parameters":
        return value["rope_type"] in ROPES_IMPOSSIBLE.get(model_type, ())
    return (field, str(value)) in IMPOSSIBLE[model_type]


def expected(model: torch.nn.Module, states: bool) -> np.ndarray:
    """Logits, or the states of a model that has none for us."""
    with torch.inference_mode():
        inner = model.model if states and hasattr(model, "lm_head") else model
        return inner(torch.tensor([IDS]))[0][0].numpy()


def difference(model: torch.nn.Module, folder: Path) -> float:
    """The largest between transformers and the CPU backend. Raises what the backend refuses."""
    runner = Runner(folder, 64, 8, 1, "f32")
    want = expected(model, runner.program.task != "generate")
    got = runner.logits(IDS)
    assert got.shape == want.shape
    return float(np.abs(got - want).max())


@pytest.mark.parametrize("model_type", MODELS)
def test_every_field(model_type: str, tmp_path: Path) -> None:
    wrong, fails, equal, refused = [], set(), 0, 0
    for name, field, value in flips(model_type):
        case = f"{field}={value}"
        try:
            model = build(name, BESIDE.get((name, field), {}) | {field: value})
            model.save_pretrained(tmp_path)
            expected(model, False)
        except Exception:
            fails.add((field, str(value)))
            continue
        try:
            gap = difference(model, tmp_path)
        except OctavoError as e:
            refused += 1
            if field.removesuffix("_parameters") not in str(e):
                wrong.append(f"{case}: refused without its name: {e}")
            continue
        equal += 1
        if not gap <= LIMIT:
            wrong.append(f"{case}: {gap:.1e}")
    print(f"{model_type}: {equal} equal, {refused} refused, {len(fails)} impossible")
    assert not wrong, "\n".join(wrong)
    known = {(f, str(v)) for _, f, v in flips(model_type) if impossible(model_type, f, v)}
    assert fails == known
    assert equal > 30


@pytest.mark.parametrize("model_type", MODELS)
def test_every_field_left_out(model_type: str, tmp_path: Path) -> None:
    """What config.json does not say is what transformers' class says, or an error."""
    model = build(model_type, {})
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    wrong, compared = [], 0
    for field in sorted(set(config) - {"model_type"}):
        path.write_text(json.dumps({k: v for k, v in config.items() if k != field}))
        try:
            oracle = loaded(tmp_path)
            expected(oracle, False)
        except Exception:
            continue  # other sizes than the tensors have
        try:
            gap = difference(oracle, tmp_path)
        except OctavoError as e:
            if field.removesuffix("_parameters") not in str(e) and "tensor" not in str(e):
                wrong.append(f"{field}: refused without its name: {e}")
            continue
        compared += 1
        if not gap <= LIMIT:
            wrong.append(f"{field}: {gap:.1e}")
    assert not wrong, "\n".join(wrong)
    assert compared > 8


@pytest.mark.parametrize("model_type", [m for m in MODELS if m not in NO_ROPE])
def test_rope_scaling(model_type: str, tmp_path: Path) -> None:
    """As transformers 4 wrote it: flat, for the layers that it was meant for."""
    build(model_type, {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    wrong, equal = [], 0
    for rope in ROPES:
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        path.write_text(json.dumps(config | {"rope_scaling": scaling}))
        try:
            oracle = loaded(tmp_path)
            expected(oracle, False)
        except Exception:
            assert scaling["rope_type"] in ROPES_IMPOSSIBLE[model_type]
            continue
        try:
            gap = difference(oracle, tmp_path)
        except OctavoError as e:
            if "rope" not in str(e):
                wrong.append(f"{scaling}: {e}")
            continue
        equal += 1
        if not gap <= LIMIT:
            wrong.append(f"{scaling}: {gap:.1e}")
    assert not wrong, "\n".join(wrong)
    assert equal >= 2


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults(model_type: str) -> None:
    """The table of what a silent config.json means is that of transformers' classes."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    own = fields(model_type)
    aliases = config.attribute_map
    ropes = getattr(config, "rope_parameters", None) or {}
    full, local = ropes.get("full_attention", ropes), ropes.get("sliding_attention", {})
    elsewhere = {
        "rope_theta": full.get("rope_theta"),
        "rope_local_base_freq": local.get("rope_theta"),
        "partial_rotary_factor": full.get("partial_rotary_factor"),
        "sliding_window_pattern": getattr(config, "_sliding_window_pattern", None),
        "rope_parameters": {k: v for k, v in full.items() if k != "rope_theta"},
    }
    for key, value in DEFAULTS[model_type].items():
        name = key if key in own else aliases.get(key, key)
        assert value == (elsewhere[key] if key in elsewhere else own[name]), key


# Keys of published config.json files that the families' classes do not have, or no longer.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {"dtype": "q4"},
        "unsloth_fixed": True, "unsloth_version": "2025.1.1", "pretraining_tp": 1, "mlp_bias": False,
        "_attn_implementation_autoset": True, "torch_dtype": "bfloat16", "max_length": 20,
    },
    "mistral": {"auto_map": {"AutoModel": "x.Y"}, "attention_bias": False},
    "qwen2": {"use_mrope": False, "use_sliding_window": False, "sliding_window": 131072},
    "qwen3_moe": {"max_window_layers": 48, "router_aux_loss_coef": 0.001, "rope_scaling": None},
    "smollm3": {"max_window_layers": 28, "pretraining_tp": 2, "layer_types": ["full_attention"] * 4},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm", "embedding_dropout": 0.1},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "embd_pdrop": 0.0},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "gemma3_text": {"cache_implementation": "hybrid", "_sliding_window_pattern": 6,
                    "use_bidirectional_attention": False},
    "gpt_oss": {"experts_per_token": 4, "initial_context_length": 4096},
    "gpt2": {"n_ctx": 64, "task_specific_params": {"text-generation": {"do_sample": True}}},
    "opt": {"prefix": "</s>", "activation_dropout": 0.0},
    "bert": {"gradient_checkpointing": False, "position_embedding_type": "absolute",
             "directionality": "bidi", "pooler_type": "first_token_transform"},
    "xlm-roberta": {"output_past": True, "position_embedding_type": "absolute"},
    "roberta": {"sentence_transformers": {"version": "5.0"}, "use_cache": True},
}  # fmt: skip


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_keys(model_type: str, tmp_path: Path) -> None:
    """Nothing that people publish is refused needlessly."""
    model = build(model_type, {})
    model.save_pretrained(tmp_path)
    write_config(tmp_path, **PUBLISHED[model_type])
    assert difference(model, tmp_path) <= LIMIT


@pytest.mark.parametrize(
    ("key", "value"),
    [("depth_scale", 0.5), ("is_causal", False), ("use_new_attention", True), ("logit_scale", 2.0),
     ("embedding_multiplier", 12.0), ("attention_chunk_size", 8192), ("norm_kind", "pre")],
)  # fmt: skip
def test_unknown_keys(key: str, value: Any, tmp_path: Path) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    write_config(tmp_path, **{key: value})
    with pytest.raises(Unsupported, match=f"'{key}' is {value!r}") as e:
        Runner(tmp_path, 64, 8, 1, "f32")
    assert key in str(e.value.suggestions)
