"""octavo quantize --budget: the best mix within a budget, and that what it promises holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.checkpoint import TensorType, open_checkpoint
from octavo.checkpoint.places import locked
from octavo.checkpoint.writer import replacing
from octavo.compress.data import split, token_blocks
from octavo.compress.search import Budget, best, search
from octavo.compress.sensitivity import (
    Encoded,
    Option,
    ReferenceLogits,
    _file,
    made_of,
    matrices,
    types_of,
)
from octavo.errors import OctavoError, UsageError, WriteError
from octavo.models import build_program
from octavo.text import load_tokenizer
from tests.small_models import Small, save_gguf
from tests.ux.test_command_line import fails
from tests.ux.test_command_line import octavo as command

KINDS = (TensorType.IQ4_NL, TensorType.Q5_0, TensorType.Q8_0, TensorType.F32)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    save_gguf(Small(layers=2), tmp_path / "m.gguf", Q.F32)
    return tmp_path / "m.gguf"


def drawn(rng: np.random.Generator) -> dict[str, list[Option]]:
    """Matrices whose smaller types lose more."""
    out = {}
    for i in range(int(rng.integers(1, 6))):
        sizes = np.sort(rng.choice(60, 4, replace=False) + 1)
        losses = np.sort(rng.random(4))[::-1]
        out[str(i)] = [Option(k, int(n), float(x)) for k, n, x in zip(KINDS, sizes, losses, strict=True)]  # fmt: skip
    return out


def test_the_best_of_all_mixes() -> None:
    """Of budgets small enough that no byte is rounded, the least loss of all combinations."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        choices = drawn(rng)
        smallest = sum(found[0].nbytes for found in choices.values())
        room = smallest + int(rng.integers(0, 120))
        mix = best(choices, room)
        assert sum(o.nbytes for o in mix.values()) <= room
        every = (
            sum(o.kl for o in each)
            for each in product(*choices.values())
            if sum(o.nbytes for o in each) <= room
        )
        assert sum(o.kl for o in mix.values()) == pytest.approx(min(every), abs=1e-12)
        with pytest.raises(ValueError, match="1 bytes more"):
            best(choices, smallest - 1)


def test_large_budgets_are_kept_to_the_byte() -> None:
    """Bytes are counted in slots, upwards: never more than there are, and nearly as good."""
    rng = np.random.default_rng(1)
    sizes = np.sort(rng.integers(1, 10**8, (40, 4)), axis=1).tolist()
    losses = -np.sort(-rng.random((40, 4)), axis=1)
    choices = {
        str(i): [Option(k, n, float(x)) for k, n, x in zip(KINDS, sizes[i], losses[i], strict=True)]
        for i in range(40)
    }
    smallest = sum(each[0] for each in sizes)
    before = np.inf
    for spare in range(10**6, 4 * 10**9, 10**8):
        mix = best(choices, smallest + spare)
        assert sum(o.nbytes for o in mix.values()) <= smallest + spare
        loss = sum(o.kl for o in mix.values())
        assert loss <= before
        before = loss
    assert before == pytest.approx(losses[:, -1].sum())


def kl(source: Path, made: Path, folder: Path) -> float:
    """Of a file from its source, measured as the search measures."""
    checkpoint = open_checkpoint(source)
    blocks = token_blocks(split("evaluation"), load_tokenizer(checkpoint), 128, 16)
    return ReferenceLogits.of(checkpoint, blocks, 128, 1).kl(open_checkpoint(made))


def test_what_it_promises(model: Path, tmp_path: Path) -> None:
    """The file is within the budget, has the types and the KL that were said; no point of the
    frontier is both larger and worse; nothing is left beside it."""
    out = tmp_path / "out.gguf"
    source = open_checkpoint(model)
    budget = model.stat().st_size // 3
    found = search(source, Budget(budget), out, threads=1)
    assert out.stat().st_size <= budget
    made = open_checkpoint(out)
    kinds = [made.tensors[n].type.name for n in matrices(source)]
    assert {k: kinds.count(k) for k in kinds} == dict(found.chosen.kinds)
    assert found.chosen.kl == kl(model, out, tmp_path) > 0
    assert found.chosen in found.frontier
    sizes, losses = ([getattr(p, n) for p in found.frontier] for n in ("nbytes", "kl"))
    assert sizes == sorted(sizes) and losses == sorted(losses, reverse=True)
    for point in found.frontier:
        assert point.kl == pytest.approx(point.predicted, rel=0.5)
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "out.gguf", "cache"}


def test_better_than_one_type_at_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """The room that all matrices take in Q5_0."""
    source = open_checkpoint(model)
    encoded = Encoded(tmp_path / "encoded")
    uniform = encoded.mixed(source, dict.fromkeys(matrices(source), TensorType.Q5_0))
    blocks = token_blocks(split("evaluation"), load_tokenizer(source), 128, 16)
    plain = ReferenceLogits.of(source, blocks, 128, 1).kl(uniform)
    room = sum(uniform.tensors[n].nbytes for n in matrices(source))
    rest = model.stat().st_size - sum(t.nbytes for t in matrices(source).values())
    budget = Budget(room + rest + 64 * len(source.tensors) + 4096)
    found = search(source, budget, tmp_path / "o.gguf", threads=1)
    assert found.chosen.kl < plain


def test_measured_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second search with another budget measures no matrix again."""
    source, size = open_checkpoint(model), model.stat().st_size
    search(source, Budget(size // 3), tmp_path / "a.gguf", threads=1)
    measured: list[int] = []
    kl_of = ReferenceLogits.kl

    def counted(self: ReferenceLogits, checkpoint: object) -> float:
        measured.append(len(self.blocks))
        return kl_of(self, checkpoint)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceLogits, "kl", counted)
    search(source, Budget(size // 4), tmp_path / "b.gguf", threads=1)
    assert measured == [16] * 6  # mixes only


def test_smallest_types_first(model: Path) -> None:
    for tensor in matrices(open_checkpoint(model)).values():
        kinds = types_of(tensor)
        assert kinds[0] is TensorType.IQ4_NL and kinds[-1] is TensorType.Q8_0


def test_the_command(model: Path, tmp_path: Path) -> None:
    out, svg, size = tmp_path / "o.gguf", tmp_path / "o.svg", model.stat().st_size
    given = ("quantize", str(model), "--output", str(out), "--budget")
    result = command(*given, f"{size // 3}B", "--max-kl", "1", "--chart", str(svg))
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^ *0\.\d +\S+ +\S+ +\d+ \S+", result.stdout, re.MULTILINE)) == 6
    assert len(result.stdout.splitlines()) < 24
    assert f"--against {model}\n" in result.stdout
    ElementTree.fromstring(svg.read_text())
    assert svg.read_text().count("<circle") == 6
    again = command(*given, f"{size // 3}B", "--force", "--json")
    chosen = json.loads(again.stdout)["chosen"]
    assert f"KL of {chosen['kl']:.4g}" in result.stdout
    assert out.stat().st_size <= chosen["nbytes"] <= size // 3


def test_what_cannot_be_had(model: Path, tmp_path: Path) -> None:
    out, size = tmp_path / "o.gguf", model.stat().st_size
    given = ("quantize", str(model), "--output", str(out))
    assert "either --recipe or --budget" in fails(2, *given)
    assert "either --recipe or --budget" in fails(2, *given, "--recipe", "q8_0", "--budget", "1MB")
    assert "go with --budget" in fails(2, *given, "--recipe", "q8_0", "--max-kl", "1")
    assert "--concurrency needs --context" in fails(2, *given, "--budget", "1MB", "--concurrency", "2")  # fmt: skip
    assert "is not an amount" in fails(2, *given, "--budget", "much")
    with pytest.raises(UsageError, match=r"smallest mix takes 0\.1 MB, 0\.0 of them"):
        search(open_checkpoint(model), Budget(30_000), out, threads=1)
    with pytest.raises(UsageError, match=r"smallest mix takes \S+ MB, 2\.1 of them for the KV"):
        search(open_checkpoint(model), Budget(size, 2048, 4), out, threads=1)
    with pytest.raises(OctavoError, match=r"has a KL of \S+, above 1e-09") as e:
        search(open_checkpoint(model), Budget(size // 3, max_kl=1e-9), out, threads=1)
    assert any(hint.startswith("--budget") for hint in e.value.suggestions)
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "cache"}
    with pytest.raises(UsageError, match=r"o\.bin does not end with \.gguf"):
        search(open_checkpoint(model), Budget(size), tmp_path / "o.bin", threads=1)


def test_beside_another_run(model: Path, tmp_path: Path) -> None:
    """One of another output keeps its figures in the same file; one of the same is refused."""
    source, out = open_checkpoint(model), tmp_path / "o.gguf"
    blocks = token_blocks(split("calibration"), load_tokenizer(source), 128, 1)
    (kept := _file(source, blocks)).parent.mkdir(parents=True)
    with replacing(kept) as file:
        first = search(source, Budget(10**6), out, threads=1)
        file.write(b"{}")
    folder = tmp_path / f"o.gguf.search-{made_of(source)[:8]}"
    with locked(folder, out), pytest.raises(WriteError, match=r"another run writes \S+o\.gguf"):
        search(source, Budget(10**6), out, threads=1)
    assert search(source, Budget(10**6), out, threads=1).chosen == first.chosen
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "o.gguf", "cache"}


def test_a_model_writes_its_texts_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def written(author: Path) -> list[str]:
        asked.append(author)
        return split("calibration")

    monkeypatch.setattr("octavo.compress.written.written", written)
    source = open_checkpoint(model)
    search(source, Budget(10**6), tmp_path / "o.gguf", data=Path("self"), threads=1)
    assert asked == [model]


def test_only_of_models_that_generate(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is computed or written."""
    source = open_checkpoint(model)
    encoder = replace(build_program(source), task="embed")
    monkeypatch.setattr("octavo.compress.search.build_program", lambda _: encoder)
    with pytest.raises(UsageError, match="generates no text"):
        search(source, Budget(10**9), tmp_path / "o.gguf", threads=1)
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf"}
