"""Models unlike Llama made smaller, or refused with what to do instead: OPT, gpt-oss with experts
stacked or in MXFP4, encoders that embed and that rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

import octavo
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.compress import calibrated
from octavo.compress.beside import beside
from octavo.compress.folder_view import as_folder
from octavo.errors import UsageError
from tests.families import FAMILIES, save_family
from tests.families import save_gguf as save_family_gguf
from tests.parity.test_encoders import small_encoder
from tests.parity.test_formats import published_gpt_oss
from tests.parity.test_rounding import bound, distance
from tests.small_models import Small
from tests.ux.test_command_line import fails
from tests.ux.test_command_line import octavo as command

DECODERS = ("opt", "opt-350m", "gpt-oss")
RECIPES = ("rtn-4", "rtn-8", "fp8", "int8-dynamic", "gptq-4", "awq-4", "w8a8")
LOOK = {"gptq-4", "awq-4", "w8a8"}  # at data


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "SEQUENCES", 4)
    monkeypatch.setattr(calibrated, "LENGTH", 64)


@pytest.fixture(scope="module")
def decoders(
    small_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Folders with a tokenizer."""
    root = tmp_path_factory.mktemp("decoders")
    files = beside(as_folder(open_checkpoint(small_gguf(Small(), Q.F32))))
    for name in DECODERS:
        save_family(FAMILIES[name], root / name)
        for file, content in files.items():
            if "tokenizer" in file:
                (root / name / file).write_bytes(content.make())  # type: ignore[union-attr]
    return {name: root / name for name in DECODERS}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that a small encoder has."""
    rng, path = np.random.default_rng(3), tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (" ".join(f"w{i}" for i in rng.integers(0, 96, 120)) for _ in range(16))
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


def encoder(folder: Path, head: bool, width: int = 64) -> Path:
    folder.mkdir()
    small_encoder(folder, "bert", head, hidden_size=width, intermediate_size=96, num_attention_heads=4)  # fmt: skip
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(
    name: str, recipe: str, decoders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """Every linear layer of OPT is rounded; of gpt-oss, whose experts lie stacked, those of
    attention, and the experts are said to stay. Logits move no further than weights do."""
    source = decoders[name]
    data = text if recipe in LOOK else None
    done = octavo.quantize(source, recipe=recipe, output=tmp_path / "out", data=data)
    experts = {f"model.layers.{i}.mlp.experts.{p}" for i in range(3) for p in ("gate_up_proj", "down_proj")}  # fmt: skip
    rounded = sum(count for kind, count in done.kinds.items() if kind not in ("F32", "BF16"))
    stay = {n for n in done.kept if n in experts}
    assert stay == (experts if name == "gpt-oss" else set())
    assert rounded + len(done.kept) - len(stay) == {"opt": 18, "opt-350m": 19, "gpt-oss": 12}[name]
    assert done.bytes_after == open_checkpoint(done.output).nbytes < done.bytes_before
    # Tokens may be routed elsewhere; and scales that move into norms count as errors of weights.
    bounded = name != "gpt-oss" and recipe not in ("awq-4", "w8a8")
    most = bound(source, done.output) if bounded else 0.7
    assert 0 < distance(source, done.output) < most < 1


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published: a folder is refused, as nothing can be won; in a GGUF file experts
    keep their blocks, which a recipe's would be larger than, and the rest is rounded."""
    published_gpt_oss(tmp_path / "folder")
    with pytest.raises(UsageError, match="folder is quantized already"):
        octavo.quantize(tmp_path / "folder", recipe="rtn-4", output=tmp_path / "out")
    source, out = tmp_path / "b.gguf", tmp_path / "a.gguf"
    family = FAMILIES["gpt-oss"]
    wide = replace(family, settings=family.settings | {"hidden_size": 256})
    save_family(wide, tmp_path / "wide")
    save_family_gguf(wide, tmp_path / "wide", tmp_path / "floats.gguf", Q.F32)
    save_family_gguf(wide, tmp_path / "wide", source, Q.MXFP4)
    done = octavo.quantize(source, recipe="q4_k_m", output=out)
    before, after = open_checkpoint(source).tensors, open_checkpoint(out).tensors
    blocks = {n for n, t in before.items() if t.type is TensorType.MXFP4}
    assert {n for n in before if n.endswith("_exps.weight")} < blocks
    assert all((dequantize(before[n]) == dequantize(after[n])).all() for n in blocks)
    assert done.bytes_after <= done.bytes_before
    of_floats = octavo.quantize(tmp_path / "floats.gguf", recipe="q4_k_m", output=tmp_path / "c.gguf")  # fmt: skip
    assert "MXFP4" not in of_floats.kinds
    with pytest.raises(octavo.errors.Unsupported, match="'gpt-oss' files have no folder's form"):
        octavo.quantize(source, recipe="rtn-4", output=tmp_path / "out")


@pytest.mark.parametrize("recipe", RECIPES)
def test_encoders(recipe: str, text: Path, tmp_path: Path) -> None:
    """Vectors keep their direction, and scores of pairs their values."""
    data, vectors, scores = text if recipe in LOOK else None, [], []
    for head in (False, True):
        source = encoder(tmp_path / f"model-{head}", head)
        out = tmp_path / f"out-{head}"
        octavo.quantize(source, recipe=recipe, output=out, data=data)
        for model in (source, out):
            llm = octavo.LLM(str(model))
            if head:
                scores.append(llm.rank("w5 w6", ["w1 w2 w3", "w9", "w7 w30"]))
            else:
                vectors.append(llm.embed("w5 w6 w20 w11"))
    close = 0.97 if recipe.endswith("-4") else 0.998
    assert float(vectors[0][0] @ vectors[1][0]) == pytest.approx(1, abs=1 - close)
    assert not np.array_equal(*vectors)
    assert scores[1] == pytest.approx(scores[0], abs=0.1) and scores[0] != scores[1]


@pytest.mark.parametrize(
    ("head", "says"),
    [(False, "it makes vectors, at /v1/embeddings"), (True, "it ranks texts, at /v1/rerank")],
)
def test_the_hint_after_an_encoder(head: bool, says: str, tmp_path: Path) -> None:
    source, out = encoder(tmp_path / "model", head), tmp_path / "out"
    done = command("quantize", str(source), "--recipe", "rtn-4", "--output", str(out))
    assert done.returncode == 0, done.stderr
    hints = [f"it generates no text: {says}", f"try: octavo serve {out}"]
    assert done.stdout.splitlines()[-2:] == hints


def test_the_hint_after_a_decoder(decoders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command("quantize", str(decoders["opt"]), "--recipe", "rtn-4", "--output", str(out))
    assert done.stdout.splitlines()[-1] == f"try: octavo chat {out}"


def test_what_encoders_cannot_do(tmp_path: Path) -> None:
    source, out = encoder(tmp_path / "model", head=False), str(tmp_path / "out")
    given = ("quantize", str(source), "--output", out, "--recipe")
    message = fails(2, *given, "distilled-4")
    assert "distilled-4 learns from next tokens, and model generates no text" in message
    assert message.rstrip().endswith("--recipe healed-4")
    message = fails(2, *given, "gptq-4", "--data", "self")
    assert "model generates no text to look at" in message
    narrow = encoder(tmp_path / "narrow", head=False, width=60)
    message = fails(2, "quantize", str(narrow), "--recipe", "rtn-4", "--output", out)
    assert "rounds no layer of narrow: 32 divides the rows and columns of none" in message
    octavo.quantize(narrow, recipe="int8-dynamic", output=out)  # which is the hint
    assert message.rstrip().endswith("--recipe int8-dynamic")
