"""The table that benchmarks/compare.py makes, and where it puts it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"


def script(path: Path):  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compare():  # type: ignore[no-untyped-def]
    return script(SCRIPT)


def test_ratios_are_those_of_the_medians_and_of_the_best_peer(compare) -> None:  # type: ignore[no-untyped-def]
    def result(speed: float) -> dict[str, dict[str, float]]:
        return {case: {"prefill_tps": speed, "decode_tps": 2 * speed} for case in compare.CASES}

    speeds = [
        {"octavo": 50, "octavo int8": 99, "a": 5, "b": 10},
        {"octavo": 40, "octavo int8": 99, "a": 20, "b": 10},
        {"octavo": 10, "octavo int8": 99, "a": 5, "b": 30},
    ]
    rounds = [{who: result(speed) for who, speed in each.items()} for each in speeds]
    quality = {"octavo": {"kl": 2.52e-4, "top1": 0.9924}, "b": {"kl": 3.2e-3, "top1": 0.964}}
    lines = compare.table(compare.summarize(rounds), quality).splitlines()
    assert lines[0] == "| tokens/s | octavo | octavo int8 | a | b | octavo / best peer |"
    assert lines[2] == "| 1 stream, prefill | 40 | 99 | 5 | 10 | 4.00 |"
    assert lines[3] == "| 1 stream, decode | 80 | 198 | 10 | 20 | 4.00 |"
    assert lines[-2] == "| mean KL from fp32 | 2.5e-04 | – | – | 3.2e-03 |  |"
    assert lines[-1] == "| same most likely token | 99.2% | – | – | 96.4% |  |"


def test_all_are_restricted_to_an_instruction_set(compare, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name in ("llama.cpp-avx2", "llama.cpp", "openvino"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "installed").touch()
    peers = ["llama.cpp", "openvino"]
    found, left_out = compare.programs(peers, tmp_path, "avx2", ["auto", "int8"])
    assert not left_out and list(found) == ["octavo", "octavo int8", "llama.cpp", "openvino"]
    assert found["llama.cpp"].python == tmp_path / "llama.cpp-avx2" / "bin" / "python"
    assert found["openvino"].env["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert found["octavo"].env["OCTAVO_ISA"] == "avx2"
    assert [found[f"octavo{x}"].env["OCTAVO_ACTIVATIONS"] for x in ("", " int8")] == [
        "auto",
        "int8",
    ]
    found, _ = compare.programs(peers, tmp_path, None, ["auto"])
    assert found["llama.cpp"].python == tmp_path / "llama.cpp" / "bin" / "python"
    assert not found["llama.cpp"].env and found["octavo"].env == {"OCTAVO_ACTIVATIONS": "auto"}


@pytest.mark.parametrize(
    ("most", "best_first", "taken"),
    [("avx512bf16", "amx avx512vnni avx512bf16 avxvnni avx2 scalar", "avx512vnni"),
     ("avx512bf16", "avx512bf16 avx512vnni avx2 scalar", "avx512bf16"),
     ("avx512vnni", "amx avx512vnni avx512bf16 avxvnni avx2 scalar", "avx512vnni"),
     ("avx2", "amx avx512vnni avx512bf16 avxvnni avx2 scalar", "avx2"),
     ("amx", "amx avx512vnni avx512bf16 avxvnni avx2 scalar", "amx")],
)  # fmt: skip
def test_octavo_prefers_what_it_would_without_more(  # type: ignore[no-untyped-def]
    compare, monkeypatch: pytest.MonkeyPatch, most: str, best_first: str, taken: str
) -> None:
    monkeypatch.setattr(compare._native, "isas", best_first.split)
    assert compare.octavo_isa(most) == taken


def test_precision_is_that_of_the_distributions(tmp_path: Path) -> None:
    quality = script(SCRIPT.parent / "peers" / "quality.py")
    rng = np.random.default_rng(1)
    expected, got = rng.normal(size=(2, 3, 70, 11)).astype(np.float32)
    ids = rng.integers(0, 11, (3, 70))
    for i in range(3):
        quality.save(tmp_path, i, ids[i].tolist(), expected[i])
    left = iter(got)
    found = quality.measure(lambda _: next(left), tmp_path)
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, got))
    losses = -q[:, :-1].gather(2, torch.from_numpy(ids[:, 1:, None]))
    assert found["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-9)
    assert found["top1"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found["perplexity"] == pytest.approx(float(losses.mean().exp()), rel=1e-9)


def test_a_page_gets_the_table_of_its_model_only(compare, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- compare m.gguf -->\nold\n<!-- end -->\nb\n<!-- compare n.gguf -->\nkept\n<!-- end -->\n"
    )
    for _ in range(2):
        compare.update(page, "m.gguf", "| new |")
    assert page.read_text() == (
        "a\n<!-- compare m.gguf -->\n\n| new |\n\n<!-- end -->\nb\n<!-- compare n.gguf -->\nkept\n<!-- end -->\n"
    )
    with pytest.raises(ValueError, match=r"no <!-- compare o\.gguf -->"):
        compare.update(page, "o.gguf", "| new |")


def test_the_pages_of_the_project_have_their_places(compare, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name in ("README.md", "docs/benchmarks.md"):
        copy = tmp_path / Path(name).name
        copy.write_text((SCRIPT.parents[1] / name).read_text())
        compare.update(copy, "SmolLM2-135M-Instruct.Q4_1.gguf amx", "| new |")
        assert "| new |" in copy.read_text()
