"""LoRA adapters: exact against merged weights, in any company, loaded and unloaded at run time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file

import octavo
from octavo.checkpoint.adapter import read_adapter
from octavo.engine.constraint import TokenTable
from octavo.engine.engine import Engine
from octavo.engine.events import Token
from octavo.engine.loader import load_engine
from octavo.engine.open import open_model
from octavo.engine.plan import Plan, make_plan
from octavo.engine.request import Request, SamplingParams
from octavo.errors import OctavoError, RequestError
from tests.small_models import Small, llama_writer, save_hf

SMALL = Small(heads=6, kv_heads=2, head_dim=10, hidden=60, ffn=92, bias=True, tied=False)
MODULES = {
    "self_attn.q_proj": (60, 60), "self_attn.k_proj": (60, 20), "self_attn.v_proj": (60, 20), "self_attn.o_proj": (60, 60),
    "mlp.gate_proj": (60, 92), "mlp.up_proj": (60, 92), "mlp.down_proj": (92, 60),
}  # fmt: skip


def make_adapter(
    folder: Path, seed: int, rank: int = 8, dtype: torch.dtype = torch.float32, prefix: str = "",
    modules: dict[str, tuple[int, int]] = MODULES, layers: int = 3, **config: Any,
) -> Path:  # fmt: skip
    """A PEFT folder with random factors of a noticeable size."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (inputs, outputs) in modules.items():
            base = f"base_model.model.model.layers.{layer}.{name}.lora_"
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * (0.5 * rank**-0.5)
            tensors[base + "A.weight"], tensors[base + "B.weight"] = a.to(dtype), b.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge(model: Path, adapter: Path, target: Path) -> Path:
    """The model with the adapter's product added to its weights, in fp32."""
    shutil.copytree(model, target)
    weights = load_file(target / "model.safetensors")
    for module, factors in read_adapter(adapter).items():
        a, b = (torch.from_numpy(t.vector().astype(np.float32)) for t in (factors.a, factors.b))
        weights[module + ".weight"] = weights[module + ".weight"] + factors.scale * (b @ a)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def engine(model: Path, adapters: bool = True, room: int = 64 << 20) -> Engine:
    opened = open_model(model, adapters)
    plan: Plan = make_plan(
        opened.compiled, name="x", memory="1GiB", kv_dtype="f32", adapters=room if adapters else 0
    )
    return load_engine(opened, plan, TokenTable([], [], [2]))


def run(e: Engine, requests: list[Request]) -> dict[str, list[tuple[int, float, Any]]]:
    out: dict[str, list[tuple[int, float, Any]]] = {r.id: [] for r in requests}
    for r in requests:
        e.add(r)
    while e.has_work:
        for event in e.step():
            assert isinstance(event, Token)
            out[event.id].append((event.token, event.logprob, event.top))
    return out


def request(name: str, prompt: list[int], adapter: str = "", **params: Any) -> Request:
    fields = {"max_tokens": 12, "temperature": 0, "logprobs": 5, "ignore_eos": True} | params
    return Request(id=name, prompt=prompt, adapter=adapter, params=SamplingParams(**fields))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "model"
    save_hf(SMALL, folder)
    return folder


def test_eight_adapters_equal_merged_models(model: Path, tmp_path: Path) -> None:
    """In one batch, with one more sequence that has none; fp32, so to rounding."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 320, 5 + 9 * i).tolist() for i in range(9)]
    e = engine(model)
    assert e.adapters is not None
    folders = [make_adapter(tmp_path / f"a{i}", i, rank=2 + 5 * i) for i in range(8)]
    for i, folder in enumerate(folders):
        e.adapters.load(f"a{i}", folder)
    names = [*(f"a{i}" for i in range(8)), ""]
    together = run(e, [request(str(i), p, a) for i, (p, a) in enumerate(zip(prompts, names))])  # noqa: B905
    plain = run(engine(model, False), [request("8", prompts[8])])
    assert together["8"] == plain["8"]  # bit for bit: what has no adapter is not touched
    for i in range(8):
        merged = engine(merge(model, folders[i], tmp_path / f"m{i}"), False)
        expected = run(merged, [request(str(i), prompts[i])])[str(i)]
        got = together[str(i)]
        assert [t for t, _, _ in got] == [t for t, _, _ in expected]
        for (_, p, top), (_, q, other) in zip(got, expected, strict=True):
            assert abs(p - q) < 2e-4
            assert max(abs(a - b) for (_, a), (_, b) in zip(top, other, strict=True)) < 2e-4
        changed = run(e, [request("base", prompts[i])])["base"]
        assert changed != got
    # The same bits alone as in company, cached or not.
    for i in (0, 7):
        assert run(e, [request("x", prompts[i], f"a{i}")])["x"] == together[str(i)]
    assert e.stats().blocks_held == 0


def test_prefixes_are_not_shared_between_adapters(model: Path, tmp_path: Path) -> None:
    e = engine(model)
    assert e.adapters is not None
    prompt = np.random.default_rng(1).integers(3, 320, 100).tolist()
    e.adapters.load("a", make_adapter(tmp_path / "a", 1))
    with_a = run(e, [request("1", prompt, "a")])["1"]
    assert run(e, [request("2", prompt)])["2"] != with_a
    e.adapters.unload("a")
    with pytest.raises(RequestError):
        e.add(request("3", prompt, "a"))
    e.adapters.load("a", make_adapter(tmp_path / "b", 2))  # another adapter of the same name
    assert run(e, [request("4", prompt, "a")])["4"] != with_a


def test_an_adapter_in_use_leaves_when_its_requests_have_ended(model: Path, tmp_path: Path) -> None:
    e = engine(model)
    assert e.adapters is not None
    e.adapters.load("a", make_adapter(tmp_path / "a", 1))
    alone = run(e, [request("0", [5, 6, 7], "a", max_tokens=20)])["0"]
    e.add(request("1", [5, 6, 7], "a", max_tokens=20))
    events = e.step()
    e.adapters.unload("a")
    while e.has_work:
        events += e.step()
    assert [(v.token, v.logprob, v.top) for v in events if isinstance(v, Token)] == alone
    assert all(isinstance(v, Token) for v in events)
    with pytest.raises(RequestError):
        e.adapters.unload("a")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adapters(model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    e = engine(model)
    assert e.adapters is not None
    folder = make_adapter(tmp_path / "a", 3, rank=16, dtype=dtype, use_rslora=True)
    e.adapters.load("a", folder)
    got = run(e, [request("1", list(range(3, 40)), "a")])["1"]
    merged = engine(merge(model, folder, tmp_path / "m"), False)
    expected = run(merged, [request("1", list(range(3, 40)))])["1"]
    assert [t for t, _, _ in got] == [t for t, _, _ in expected]
    # bf16 products take an input as two bf16 numbers, 16 bits together.
    assert max(abs(p - q) for (_, p, _), (_, q, _) in zip(got, expected, strict=True)) < 2e-3


def test_gguf_takes_adapters_of_the_original(tmp_path: Path) -> None:
    """GGUF stores llama's q and k rows in another order; an adapter's rows follow."""
    small = Small(heads=4, kv_heads=2, head_dim=16, tied=False)
    save_hf(small, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    path = tmp_path / "model.gguf"
    write_gguf(small, weights, path)
    modules = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (64, 32),
        "mlp.down_proj": (96, 64),
    }
    folder = make_adapter(tmp_path / "a", 9, modules=modules)
    outcomes = []
    for source in (tmp_path / "hf", path):
        e = engine(source)
        assert e.adapters is not None
        e.adapters.load("a", folder)
        outcomes.append(run(e, [request("1", list(range(3, 60)), "a")])["1"])
    first, second = outcomes
    assert [t for t, _, _ in first] == [t for t, _, _ in second]
    assert max(abs(p - q) for (_, p, _), (_, q, _) in zip(first, second, strict=True)) < 1e-4


def write_gguf(s: Small, weights: dict[str, torch.Tensor], path: Path) -> None:
    """What the published converter makes of a llama checkpoint, in fp32."""
    w = llama_writer(s, path, 1e-6)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        x = tensor.float().numpy()
        heads = {"self_attn.q_proj": s.heads, "self_attn.k_proj": s.kv_heads}
        if module in top:
            target = top[module]
        else:
            _, _, layer, part = module.split(".", 3)
            target = f"blk.{layer}.{names[part]}"
            if part in heads:
                x = x.reshape(heads[part], 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        w.add_tensor(target + ".weight", np.ascontiguousarray(x), raw_dtype=Q.F32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"peft_type": "IA3"}, "peft_type"), ({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"lora_alpha": "x"}, "lora_alpha"),
    ],
)  # fmt: skip
def test_more_than_a_plain_lora_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], needle: str
) -> None:
    with pytest.raises(OctavoError, match=needle):
        read_adapter(make_adapter(tmp_path / "a", 1, **changes))


def test_what_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    e = engine(model, room=100_000)
    assert e.adapters is not None
    for name, modules, needle in (
        ("wide", {"self_attn.q_proj": (60, 61)}, "61 x 60"),
        ("unknown", {"self_attn.x_proj": (60, 60)}, "x_proj"),
        ("large", MODULES, "lora-memory"),
    ):
        folder = make_adapter(tmp_path / name, 1, rank=64, modules=modules)
        with pytest.raises(RequestError, match=needle):
            e.adapters.load(name, folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="adapter_config"):
        e.adapters.load("empty", tmp_path / "empty")
    broken = make_adapter(tmp_path / "broken", 1)
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(RequestError):
        e.adapters.load("broken", broken)
    assert run(e, [request("1", [5, 6])])["1"]


def test_python_api(model: Path, tmp_path: Path, smollm2: Path) -> None:
    folder = make_adapter(
        tmp_path / "a",
        4,
        layers=30,
        modules={"self_attn.q_proj": (576, 576), "mlp.up_proj": (576, 1536)},
    )
    llm = octavo.LLM("smollm2", offline=True, adapters={"a": str(folder)})
    base, adapted = llm.generate(
        ["Once upon a time"] * 2, SamplingParams(max_tokens=8, temperature=0), adapter=["", "a"]
    )
    assert base.text != adapted.text
    plain = octavo.LLM("smollm2", offline=True)
    assert (
        plain.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0))[0] == base
    )
    with pytest.raises(RequestError):
        plain.generate("x", adapter="a")
