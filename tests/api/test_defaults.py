"""Sampling parameters that a model's files recommend: defaults of requests, shown, switched off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType as V

import octavo
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.sampling import read_sampling
from octavo.cli.show import show
from octavo.engine.defaults import default_params
from octavo.errors import CheckpointError
from tests.api.server import serving
from tests.small_models import Small, save_gguf, save_hf

GREEDY = {"general.sampling.temp": (0.0, V.FLOAT32), "general.sampling.top_k": (7, V.INT32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(Small(), path)
    return path


def written(folder: Path, **config: Any) -> octavo.SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return default_params(open_checkpoint(folder), {})


def test_of_folders(folder: Path) -> None:
    assert written(folder) == octavo.SamplingParams()
    full = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    assert written(folder, **full) == octavo.SamplingParams(**full)
    unheard = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": [1, 2], "temperature": None}
    assert written(folder, **unheard) == octavo.SamplingParams()
    assert written(folder, top_k=-1).top_k == 0
    assert default_params(open_checkpoint(folder), {}, "none") == octavo.SamplingParams()
    written(folder, temperature=0.6, top_k=9)
    assert (
        "sampling       temperature 0.6, top_k 9" in CliRunner().invoke(show, [str(folder)]).output
    )
    known = default_params(open_checkpoint(folder), {"top_k": 3})
    assert known == octavo.SamplingParams(temperature=0.6, top_k=3)


@pytest.mark.parametrize(
    "config", [{"temperature": 5}, {"top_k": 1.5}, {"top_p": "x"}, {"min_p": -1}, {"top_k": 10**30}]
)
def test_values_that_no_request_could_have(folder: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be used") as error:
        written(folder, **config)
    assert "--generation-config none" in error.value.suggestions[0]


def test_of_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    more = {
        "general.sampling.temp": (0.7, V.FLOAT32), "general.sampling.top_p": (0.8, V.FLOAT32),
        "general.sampling.top_k": (20, V.INT32), "general.sampling.min_p": (0.05, V.FLOAT32),
        "general.sampling.penalty_repeat": (1.1, V.FLOAT32), "general.sampling.mirostat": (1, V.INT32),
    }  # fmt: skip
    save_gguf(Small(), path, Q.Q8_0, more)
    assert read_sampling(open_checkpoint(path)) == {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
    }  # fmt: skip
    shown = CliRunner().invoke(show, [str(path)]).output
    line = "temperature 0.7, top_p 0.8, top_k 20, min_p 0.05, repetition_penalty 1.1"
    assert f"sampling       {line}" in shown


def test_in_the_python_api(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(Small(), path, Q.Q8_0, GREEDY)
    assert octavo.LLM(str(path), memory="512MiB").defaults == octavo.SamplingParams(
        temperature=0, top_k=7
    )
    plain = octavo.LLM(str(path), memory="512MiB", generation_config="none")
    assert plain.defaults == octavo.SamplingParams()


def test_in_a_server(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(Small(), path, Q.Q8_0, GREEDY)

    def texts(*options: str, **request: Any) -> set[str]:
        with serving(str(path), "--memory", "512MiB", *options, log=tmp_path / "log") as s:
            body = {"prompt": "the", "max_tokens": 8} | request
            replies = [s.post("/v1/completions", body | {"seed": i}) for i in range(4)]
            assert {status for status, _ in replies} == {200}
            return {reply["choices"][0]["text"] for _, reply in replies}

    assert len(texts()) == 1  # greedy, as the file says
    assert len(texts(temperature=1.0, top_k=0)) == 4  # the request's own count
    assert len(texts("--generation-config", "none")) == 4
