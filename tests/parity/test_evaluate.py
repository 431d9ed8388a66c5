"""octavo evaluate against plain numpy, a model against itself, and what the command promises."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType as Q

import octavo
from octavo.checkpoint import TensorType, open_checkpoint
from octavo.checkpoint.writer import NewTensor, write_gguf
from octavo.compress.distributions import CHOICES, Precision, Scorer, _items, compare
from octavo.compress.evaluate import _prompts
from octavo.compress.evaluation import (
    KL_EDGES,
    Bounds,
    Choices,
    Evaluation,
    Pair,
    Paired,
    choices,
    distances,
    fingerprint,
    paired,
    save,
    to_json,
)
from octavo.compress.report import page
from octavo.compress.similarity import bleu4, bleu4_error, rouge_l
from octavo.engine.open import open_model
from octavo.errors import OctavoError, UsageError
from tests.conftest import Runner
from tests.small_models import Small, save_gguf
from tests.ux.test_command_line import OCTAVO, fails
from tests.ux.test_command_line import octavo as command

SMALL = Small(heads=4, kv_heads=2, head_dim=16, hidden=64, vocabulary=320)
SPEEDS = {"load_seconds", "prefill_tps", "decode_tps", "peak_rss"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same random weights in 4 bits and as they are."""
    folder = tmp_path_factory.mktemp("pair")
    save_gguf(SMALL, folder / "a.gguf", Q.Q4_0)
    save_gguf(SMALL, folder / "b.gguf", Q.F32)
    return folder / "a.gguf", folder / "b.gguf"


def figures(**changes: Any) -> Evaluation:
    """An evaluation of round numbers."""
    pairs, pair = Paired(2.0, 1.0, 1.0, 0.1), Pair(1.0, 2.0)
    e = Evaluation(
        model="m", weights="", against="b", data="text", tokens=10, blocks=2, length=6,
        perplexity=pairs, nll=pairs, kl_mean=0.1, kl_p99=0.2, kl_max=0.3, top1=0.9, outputs=4,
        bleu4=50.0, bleu4_error=2.5, rouge_l=0.5, identical=0.5,
        choices=Choices(4, 1.0, 1.0, 1.0), bytes=pair, load_seconds=pair, prefill_tps=pair, decode_tps=pair, peak_rss=pair,
        block_nll=(pair, pair), kl_histogram=(10, *[0] * len(KL_EDGES)), worst=(),
    )  # fmt: skip
    return replace(e, **changes)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1)[:, None]


# -- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [16, 40, 95, 200])
def test_distances_are_those_of_whole_distributions(pair: tuple[Path, Path], rows: int) -> None:
    """However many rows are computed at a time, which are fewer than a block, as many, or more."""
    blocks = np.random.default_rng(3).integers(0, 256, (5, 96)).astype(np.int32)
    a, b = (Scorer(open_model(path), rows, 96, 1) for path in pair)
    found = compare(a, b, blocks, rows)
    runners = [Runner(path, threads=1) for path in pair]
    for i, block in enumerate(blocks):
        p, q = (log_softmax(r.logits(block.tolist())[:-1].copy()) for r in runners)
        following = block[1:, None]
        np.testing.assert_allclose(
            found.nll_a[i], -np.take_along_axis(p, following, 1)[:, 0], atol=1e-12
        )
        np.testing.assert_allclose(
            found.nll_b[i], -np.take_along_axis(q, following, 1)[:, 0], atol=1e-12
        )
        np.testing.assert_allclose(found.kl[i], (np.exp(q) * (q - p)).sum(1), atol=1e-12)
        assert np.array_equal(found.same[i], p.argmax(1) == q.argmax(1))
    assert found.kl.mean() > 1e-4  # they differ


def test_choices_are_continuations_of_the_same_text(pair: tuple[Path, Path]) -> None:
    """Each as if it stood in the text: whatever was computed before leaves no trace."""
    blocks = np.random.default_rng(5).integers(0, 256, (3, 128)).astype(np.int32)
    a, b = (Scorer(open_model(path), 64, 128, 1) for path in pair)
    found = compare(a, b, blocks, 64).choices
    items = _items(3, 128)
    assert found.shape == (len(items), CHOICES, 2)
    runners = [Runner(path, threads=1) for path in pair]
    for k, item in enumerate(items):
        begun = blocks[item.block, : item.place]
        for j, (i, place) in enumerate([(item.block, item.place), *item.others]):
            ids = np.concatenate((begun, blocks[i, place : place + item.length]))
            for m, runner in enumerate(runners):
                x = log_softmax(runner.logits(ids.tolist()).copy())[item.place - 1 : -1]
                own = ids[item.place :, None]
                expected = np.take_along_axis(x, own, 1).sum()
                assert found[k, j, m] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("count", "length"), [(8, 32), (8, 256), (32, 512), (200, 64), (7, 37)])
def test_items_are_spread_and_have_four_choices(count: int, length: int) -> None:
    items = _items(count, length)
    assert len(items) == min(64, 2 * count)
    assert len({(item.block, item.place) for item in items}) == len(items)
    assert len({item.block for item in items}) == min(count, 64)
    for item in items:
        assert len({(item.block, item.place), *item.others}) == CHOICES
        for _, place in ((0, item.place), *item.others):
            assert 1 <= place and place + item.length <= length


def test_perplexity_and_its_error() -> None:
    """By hand; the error of perplexity is what a small change of both NLLs makes of it."""
    rng = np.random.default_rng(0)
    b = rng.gamma(2, 1.2, (24, 100))
    a = b + rng.normal(0.02, 0.3, b.shape)
    perplexity, nll = paired(a, b)
    differences = a.mean(1) - b.mean(1)
    assert nll.difference == pytest.approx(differences.mean(), rel=1e-12)
    error = math.sqrt(sum((d - differences.mean()) ** 2 for d in differences) / 23 / 24)
    assert nll.standard_error == pytest.approx(error, rel=1e-12)
    assert (nll.a, nll.b) == (pytest.approx(a.mean()), pytest.approx(b.mean()))
    assert perplexity.a == pytest.approx(math.exp(a.mean()))
    assert perplexity.difference == perplexity.a - perplexity.b
    left_out = [
        math.exp(np.delete(a, i, 0).mean()) - math.exp(np.delete(b, i, 0).mean()) for i in range(24)
    ]
    jackknife = math.sqrt(23 / 24 * sum((x - np.mean(left_out)) ** 2 for x in left_out))
    assert perplexity.standard_error == pytest.approx(jackknife, rel=0.05)


def test_choices_are_counted() -> None:
    scores = np.zeros((4, CHOICES, 2))
    for item, (a, b) in enumerate([(0, 0), (1, 0), (2, 2), (3, 1)]):
        scores[item, a, 0] = scores[item, b, 1] = 1
    assert choices(scores) == Choices(items=4, agreement=0.5, a=0.25, b=0.5)


def test_histogram_holds_every_token(pair: tuple[Path, Path]) -> None:
    blocks = np.random.default_rng(3).integers(0, 256, (4, 64)).astype(np.int32)
    a, b = (Scorer(open_model(path), 64, 64, 1) for path in pair)
    found = compare(a, b, blocks, 64)
    counts = distances(found)["kl_histogram"]
    assert sum(counts) == 4 * 63
    below = sum(counts[: KL_EDGES.index(1e-3) + 1])
    assert below == (found.kl < 1e-3).sum()


def test_what_a_model_computes_with_shows(pair: tuple[Path, Path]) -> None:
    """The same file: bytes that inputs, or keys and values, are rounded to, and nothing else."""
    blocks = np.random.default_rng(3).integers(0, 256, (2, 64)).astype(np.int32)
    given = [Precision("int16", "f32"), Precision("int8", "f32"), Precision("int16", "int8")]
    same, *others = (Scorer(open_model(pair[0]), 64, 64, 1, each) for each in (given[0], *given))
    found = [compare(other, same, blocks, 64).kl.mean() for other in others]
    assert found[0] == 0 and min(found[1:]) > 0


def by_subsets(x: list[str], y: list[str]) -> int:
    """The longest common subsequence, by its definition."""
    subsequences = {c for n in range(len(y) + 1) for c in combinations(y, n)}
    return max(n for n in range(len(x) + 1) if set(combinations(x, n)) & subsequences)


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        x, y = (rng.choice(list("abcd"), rng.integers(1, 9)).tolist() for _ in range(2))
        expected = 2 * by_subsets(x, y) / (len(x) + len(y))
        assert rouge_l([" ".join(x)], [" ".join(y)]) == pytest.approx(expected)
    assert rouge_l(["The Cat, sat!"], ["the cat sat"]) == 1.0
    assert rouge_l(["", "a"], ["", ""]) == 0.5


def test_bleu_is_sacrebleu() -> None:
    import sacrebleu

    texts, references = ["the cat sat on the mat today", "a b"], ["the cat sat on a mat", "a b"]
    assert bleu4(texts, references) == sacrebleu.corpus_bleu(texts, [references]).score
    assert 0 < bleu4(texts, references) < 100
    assert bleu4(["a"], ["a"]) == 100.0


def altered(seed: int, count: int) -> tuple[list[str], list[str]]:
    """Texts of 40 words, and the same with a share of the words exchanged, another for each."""
    rng, texts, references = np.random.default_rng(seed), [], []
    for share in rng.beta(1, 3, count):
        words = rng.integers(0, 1000, 40)
        other = np.where(rng.random(40) < share, words + 1000, words)
        references.append(" ".join(map(str, words)))
        texts.append(" ".join(map(str, other)))
    return texts, references


def test_error_of_bleu_is_how_it_scatters() -> None:
    """Over 40 draws of 16 texts: the mean of what each says of itself, and how they scatter."""
    draws = [altered(seed, 16) for seed in range(40)]
    scatter = np.std([bleu4(*draw) for draw in draws], ddof=1)
    assert np.mean([bleu4_error(*draw) for draw in draws]) == pytest.approx(scatter, rel=0.2)
    texts, references = draws[0]
    assert bleu4_error(references, references) == 0
    two, others = texts[:2], references[:2]
    apart = [bleu4(two[i : i + 1], others[i : i + 1]) for i in range(2)]
    assert bleu4_error(two, others) == pytest.approx(abs(apart[0] - apart[1]) / 2)


@pytest.mark.parametrize(
    ("count", "length", "expected"), [(8, 32, 16), (8, 37, 16), (15, 64, 30), (32, 512, 32), (200, 64, 32)]
)  # fmt: skip
def test_prompts_are_halves_of_blocks(count: int, length: int, expected: int) -> None:
    """Sixteen or more, none twice, evenly of all blocks."""
    blocks = np.arange(count * length, dtype=np.int32).reshape(count, length)
    prompts = _prompts(blocks)
    half = length // 2
    assert len(prompts) == len({p[0] for p in prompts}) == expected
    for first, *rest in prompts:
        assert first % length in (0, half)
        assert rest == list(range(first + 1, first + half))
    of = Counter(p[0] // length for p in prompts)
    assert len(of) == min(count, expected)


# -- the whole ------------------------------------------------------------------------------------


def test_a_model_against_itself() -> None:
    e = octavo.evaluate("smollm2", against="smollm2", tokens=256)
    assert (e.kl_mean, e.kl_p99, e.kl_max, e.top1) == (0, 0, 0, 1)
    assert (e.perplexity.difference, e.perplexity.standard_error) == (0, 0)
    assert (e.nll.difference, e.nll.standard_error) == (0, 0)
    assert (e.bleu4, e.bleu4_error, e.rouge_l, e.identical) == (100, 0, 1, 1)
    assert (e.outputs, e.choices.agreement) == (16, 1)
    assert e.bytes.a == e.bytes.b == open_checkpoint(octavo_path()).sources[0].stat().st_size
    assert (e.tokens, e.blocks, e.length) == (8 * 31, 8, 32)
    assert 2 < e.perplexity.a < 100
    for speed in (e.load_seconds, e.prefill_tps, e.decode_tps):
        assert speed.a > 0 and speed.b > 0
    assert min(e.peak_rss.a, e.peak_rss.b) > 90e6  # the weights alone


def octavo_path() -> Path:
    from octavo.checkpoint.hub import locate

    return locate("smollm2").path


@pytest.fixture(scope="module")
def evaluated(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command wrote of the small pair."""
    a, b = pair
    file = tmp_path_factory.mktemp("json") / "e.json"
    result = command("evaluate", str(a), "--against", str(b), "--tokens", "1024", "--json", str(file))  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert re.search(r"BLEU-4 \d+\.\d ± \d+\.\d, ROUGE-L 0\.\d+, \d+% of 16 ident", result.stdout)
    assert re.search(r"1,016 tokens of Python's reference manual in 8 blocks of 128", result.stdout)
    return dict(json.loads(file.read_text()))


def test_json_for_scripts(evaluated: dict[str, Any], pair: tuple[Path, Path]) -> None:
    p = evaluated["perplexity"]
    assert set(p) == {"a", "b", "difference", "standard_error"}
    assert p["difference"] == p["a"] - p["b"]
    assert evaluated["bytes"] == {k: f.stat().st_size for k, f in zip("ab", pair, strict=True)}
    assert evaluated["tokens"] == 8 * 127
    assert 0 < evaluated["kl_mean"] < evaluated["kl_p99"] <= evaluated["kl_max"]
    assert 0.3 < evaluated["top1"] < 1
    assert 0 <= evaluated["bleu4"] < 100 and evaluated["bleu4_error"] > 0
    assert evaluated["outputs"] == 16
    assert len(evaluated["worst"]) == 20 and evaluated["worst"][0]["kl"] == evaluated["kl_max"]


def test_figures_are_the_same_again(evaluated: dict[str, Any], pair: tuple[Path, Path]) -> None:
    """All but what a clock and the system say."""
    e = octavo.evaluate(str(pair[0]), against=str(pair[1]), tokens=1024, threads=1)
    again = json.loads(to_json(e))
    assert {k: v for k, v in again.items() if k not in SPEEDS} == {
        k: v for k, v in evaluated.items() if k not in SPEEDS
    }


def test_own_data_bounds_page_and_show(
    evaluated: dict[str, Any], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    a, b = pair
    text = tmp_path / "own.txt"
    text.write_text("\n\n".join(f"<b>{i}</b> & that was number {i * 7}." for i in range(600)))
    html = tmp_path / "e.html"
    result = command(
        "evaluate", str(a), "--against", str(b), "--data", str(text), "--tokens", "256", "--save",
        "--html", str(html), "--max-kl", "1e-9", "--min-top1", "1", "--max-perplexity", "1e6",
        "--activations", "int8", "--kv-dtype", "f32",
    )  # fmt: skip
    assert result.returncode == 1
    assert "a computed with activations int8, KV cache f32" in result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"broken: mean KL is 0\.\d+, above the bound of 1e-09", lines[0])
    assert re.fullmatch(r"broken: same top-1 is 0\.\d+, below the bound of 1", lines[1])
    shown = command("show", str(a)).stdout
    assert re.search(
        r"quality +perplexity \S+%, KL \S+, same top-1 \S+% against b \(248 tokens", shown
    )
    kept = json.loads(command("show", str(a), "--json").stdout)["quality"]
    assert kept["data"] == "own.txt" and kept["tokens"] == 248
    assert (kept["activations"], kept["kv_dtype"]) == ("int8", "f32")
    assert "that was" not in (tmp_path / a.with_name("a.gguf.quality.json")).read_text()
    check_page(html.read_text())


def check_page(html: str) -> None:
    """Nothing from elsewhere, nothing that runs, and the text is text."""
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", html)
    assert html.count("<svg") == 2 and "prefers-color-scheme: dark" in html
    assert "<b>5" not in html.partition("Where they differ")[2]
    assert "NaN" not in html and "nan" not in re.findall(r'="([^"]*)"', html)


def test_quality_of_other_weights_is_not_shown(tmp_path: Path) -> None:
    """Other weights of the same size, and a file of that name that somebody else wrote."""
    model = tmp_path / "m.gguf"
    save_gguf(SMALL, model, Q.Q4_0)
    checkpoint = open_checkpoint(model)
    save(figures(weights=fingerprint(checkpoint)), checkpoint)
    assert (
        "perplexity +100.00%, KL 0.1, same top-1 90.00% against b"
        in command("show", str(model)).stdout
    )
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    shown = command("show", str(model))
    assert shown.returncode == 0
    assert "m.gguf.quality.json is of other weights than these" in shown.stdout
    for content in ("[]", "{", '{"quality": "good"}'):
        (tmp_path / "m.gguf.quality.json").write_text(content)
        shown = command("show", str(model))
        assert shown.returncode == 0 and "m.gguf.quality.json" in shown.stdout
        assert json.loads(command("show", str(model), "--json").stdout)["quality"] is None


@pytest.mark.parametrize(
    ("bounds", "broken"),
    [
        (Bounds(), 0),
        (Bounds(max_kl=0.1, max_kl_p99=0.2, max_perplexity=100, min_top1=0.9, min_bleu4=50, min_choices=1), 0),
        (Bounds(max_kl=0.09, max_kl_p99=0.19, max_perplexity=99, min_top1=0.91, min_bleu4=51), 5),
        (Bounds(max_kl=0), 1),
    ],
)  # fmt: skip
def test_bounds(bounds: Bounds, broken: int) -> None:
    assert len(bounds.broken(figures())) == broken


# -- what cannot be measured ----------------------------------------------------------------------


def changed(source: Path, target: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """A copy of a GGUF file with other weights."""
    checkpoint = open_checkpoint(source)
    tensors = {
        n: NewTensor.of(change(n, t.vector()), TensorType.F32)
        for n, t in checkpoint.tensors.items()
    }  # fmt: skip
    write_gguf(target, checkpoint.metadata, tensors)
    return target


def test_weights_that_overflow(pair: tuple[Path, Path], tmp_path: Path) -> None:
    bad = changed(pair[1], tmp_path / "bad.gguf", lambda n, x: x * np.float32(1e38) if n == "output_norm.weight" else x)  # fmt: skip
    with pytest.raises(OctavoError, match=r"bad\.gguf computes logits that are no finite numbers"):
        octavo.evaluate(str(bad), against=str(pair[1]), tokens=256)


def test_other_vocabularies(pair: tuple[Path, Path], tmp_path: Path) -> None:
    message = fails(2, "evaluate", str(pair[0]), "--against", "smollm2")
    assert "a.gguf has a vocabulary of 320 tokens" in message and "of 49,152" in message
    save_gguf(SMALL, tmp_path / "c.gguf", Q.F32, {"tokenizer.ggml.add_bos_token": (True, 7)})
    message = fails(2, "evaluate", str(tmp_path / "c.gguf"), "--against", str(pair[0]))
    assert "c.gguf makes other tokens of the same text than a.gguf" in message


def test_models_without_text(minilm: Path) -> None:
    with pytest.raises(UsageError, match="generates no text"):
        octavo.evaluate(str(minilm), against=str(minilm))


def test_too_little_text(pair: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "few.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"word {i}"}) for i in range(30)))
    with pytest.raises(UsageError, match=r"the text has \d+ tokens; 256 are needed"):
        octavo.evaluate(str(pair[0]), against=str(pair[1]), data=text)
    with pytest.raises(UsageError, match="100 tokens in blocks of 512 are too few"):
        octavo.evaluate(str(pair[0]), against=str(pair[1]), tokens=100)
    with pytest.raises(UsageError, match="kv_dtype 'int3'; it may be auto or bf16"):
        octavo.evaluate(str(pair[0]), against=str(pair[1]), kv_dtype="int3")
    assert "no file or folder" in fails(2, "evaluate", *map(str, pair[:1]), "--against", str(pair[1]), "--data", "none")  # fmt: skip


def test_without_sacrebleu(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before anything is computed."""
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(UsageError) as e:
        octavo.evaluate("no/such-model", against=str(pair[1]))
    assert e.value.suggestions == ('pip install "octavo[compress]"',)


def test_figures_that_cannot_be_written(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "none" / "e.json"
    message = fails(1, "evaluate", str(pair[0]), "--against", str(pair[1]), "--tokens", "256", "--json", str(target))  # fmt: skip
    assert f"cannot write {target}: No such file or directory" in message


def test_interrupt_leaves_no_process(pair: tuple[Path, Path]) -> None:
    """Ctrl-C while the second engine starts ends both before the command ends."""
    words = [*OCTAVO, "evaluate", str(pair[0]), "--against", str(pair[1]), "--tokens", "512"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        children: list[psutil.Process] = []
        while process.poll() is None and len(children) < 2:
            children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert len(children) == 2
    assert not any(child.is_running() for child in children)


def test_page_of_equal_models() -> None:
    nothing = Pair(0.0, 0.0)  # of a model that no file holds and no clock saw
    e = figures(model="m<script>", bytes=nothing, load_seconds=nothing, block_nll=(nothing,) * 2)
    html = page(e).decode()
    check_page(html)
    assert "<div>BLEU-4<b>50.0 ± 2.5</b>ROUGE-L 0.500, 50% of 4 texts identical</div>" in html
    assert "They differ nowhere." in html and "m&lt;script&gt; against b" in html
