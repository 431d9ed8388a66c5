"""`--draft`, `--speculation self` and `octavo tune`, as users give them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import octavo
from octavo.bench.tune import expected_gain, tune
from octavo.cli.screen import step_bar
from octavo.engine.stats import EngineStats
from octavo.engine.tuned import read_tuned
from octavo.errors import ModelNotFound, UsageError
from tests.api.server import serving
from tests.draft_pair import write_pair
from tests.small_models import Small
from tests.ux.test_command_line import fails
from tests.ux.test_command_line import octavo as run
from tests.waiting import until

# Large enough that a draft is worth its time.
SHAPE = Small(heads=6, kv_heads=2, head_dim=64, hidden=384, ffn=1536, layers=2, vocabulary=320)
LAYERS = 8
PROMPTS = ["The sea is", "def main():", "1 2 3 4 5 6"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder, SHAPE, layers=LAYERS)
    return folder


def large(pair: Path, **options: object) -> octavo.LLM:
    return octavo.LLM(str(pair / "large.gguf"), context=512, memory="400MiB", **options)  # type: ignore[arg-type]


def texts(llm: octavo.LLM) -> list[list[int]]:
    out = []
    for temperature in (0.0, 0.7):
        params = octavo.SamplingParams(
            temperature=temperature, max_tokens=40, seed=5, ignore_eos=True
        )
        out += [c.tokens for c in llm.generate(PROMPTS, params, progress=False)]
        out += [llm.generate(p, params, progress=False)[0].tokens for p in PROMPTS]
    return out


def until_drafted(llm: octavo.LLM, name: str) -> EngineStats:
    """The counts once drafts of a source were verified. They may wait for a quieter machine: they
    are only made where they seem to save time."""

    def drafted() -> int:
        llm.generate(PROMPTS, octavo.SamplingParams(max_tokens=400), progress=False)
        return int(getattr(llm.stats(), f"accepted_{name}"))

    until(drafted)
    return llm.stats()


def test_texts_are_the_same_with_a_draft_model(pair: Path) -> None:
    with large(pair, speculation="off") as llm:
        expected = texts(llm)
    with large(pair, draft=str(pair / "small.gguf"), speculation="draft") as llm:
        assert texts(llm) == expected
        stats = until_drafted(llm, "draft")
        assert stats.accepted_draft <= stats.drafted_draft and stats.drafted_lookup == 0


def test_a_stop_string_ends_a_run_of_accepted_tokens(pair: Path) -> None:
    params = octavo.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with large(pair, speculation="off") as llm:
        whole = llm.generate(PROMPTS[0], params, progress=False)[0].text
    with large(pair, draft=str(pair / "small.gguf"), speculation="draft") as llm:
        until_drafted(llm, "draft")
        for at in (40, 31, 20, 7):
            stop = whole[at : at + 4]
            params = octavo.SamplingParams(
                temperature=0, max_tokens=60, ignore_eos=True, stop=[stop]
            )
            for _ in range(3):
                (done,) = llm.generate(PROMPTS[0], params, progress=False)
                assert (done.text, done.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_the_server_has_a_draft_model(pair: Path, tmp_path: Path) -> None:
    arguments = (str(pair / "large.gguf"), "--draft", str(pair / "small.gguf"), "--memory", "400MiB", "--context", "512")  # fmt: skip
    with serving(*arguments, log=tmp_path / "log") as server:

        def text(**fields: object) -> str:
            body = {"prompt": "The sea is", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            status, reply = server.post("/v1/completions", body | fields)
            assert status == 200, reply
            return str(reply["choices"][0]["text"])

        assert text() == text(speculation="off")
        _, metrics = server.get("/metrics")
    assert 'octavo_verified_draft_tokens_total{model_name="large",source="draft"}' in metrics


def test_the_plan_counts_the_draft_model(pair: Path) -> None:
    def plan(*more: str) -> dict[str, int]:
        result = run("plan", str(pair / "large.gguf"), "--json", "--memory", "400MiB", *more)
        return json.loads(result.stdout)  # type: ignore[no-any-return]

    plain, beside = plan(), plan("--draft", str(pair / "small.gguf"))
    parts = ("weights", "buffers", "kv_cache", "encoder", "image_cache", "draft", "process")
    for p in (plain, beside):
        assert p["total"] == sum(p[name] for name in parts) <= 400 << 20
    assert plain["draft"] == 0 < beside["draft"] and beside["kv_cache"] < plain["kv_cache"]
    shown = run("plan", str(pair / "large.gguf"), "--draft", str(pair / "small.gguf")).stdout
    assert "draft model" in shown


def test_what_cannot_be_is_refused(pair: Path, minilm: Path) -> None:
    model, draft = str(pair / "large.gguf"), str(pair / "small.gguf")
    assert "needs a draft model" in fails(2, "serve", model, "--speculation", "draft")
    off = fails(2, "serve", model, "--draft", draft, "--speculation", "off")
    assert "--speculation off does not use --draft" in off
    assert "generates no text" in fails(2, "serve", model, "--draft", str(minilm))
    assert "--draft is about one model" in fails(2, "serve", model, draft, "--draft", draft)
    with pytest.raises(UsageError, match="speculation 'deep'"):
        large(pair, speculation="deep")
    with pytest.raises(ModelNotFound):
        large(pair, draft=str(pair / "none.gguf"))


def test_self_speculation_is_tuned_once(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    with large(pair, speculation="off") as llm:
        expected = texts(llm)
    with pytest.raises(UsageError, match="not known yet") as error:
        large(pair, speculation="self")
    assert error.value.suggestions[0].startswith("octavo tune ")
    tuned, path = tune(pair / "large.gguf", "large", 1, step_bar)
    assert path.is_relative_to(tmp_path / "tuned")
    assert (
        tuned.parts == 2 * LAYERS
        and 0 < len(tuned.skip) <= tuned.parts
        and 0.4 <= tuned.agreement <= 1
    )
    with large(pair, speculation="self") as llm:
        assert texts(llm) == expected
        stats = until_drafted(llm, "self")
        assert stats.accepted_self <= stats.drafted_self
        assert stats.drafted_lookup == stats.drafted_draft == 0


def test_what_is_tuned_is_of_the_files_as_they_are(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.checkpoint import open_checkpoint

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "m.gguf"
    copy.write_bytes((pair / "small.gguf").read_bytes())
    tuned, _ = tune(copy, "m", 1, step_bar)
    assert read_tuned(open_checkpoint(copy)) == tuned
    assert read_tuned(open_checkpoint(copy), tuned.parts) == tuned
    with pytest.raises(UsageError, match="not known yet"):
        read_tuned(open_checkpoint(copy), tuned.parts + 1)
    copy.write_bytes((pair / "large.gguf").read_bytes())
    with pytest.raises(UsageError, match="not known yet"):
        read_tuned(open_checkpoint(copy))


def test_expected_gain() -> None:
    assert expected_gain(1.0, 0.0, lambda n: 1.0) == 16.0
    assert expected_gain(0.5, 0.25, lambda n: 1.0) == pytest.approx(1.5 / 1.25)
    assert expected_gain(0.0, 0.5, lambda n: 1.0) == pytest.approx(1 / 1.5)
