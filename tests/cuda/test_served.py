"""`--device cuda` through the Python API and a real server, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from octavo import LLM, SamplingParams
from octavo.backends.cuda.executable import CudaExecutable
from octavo.backends.cuda.inputs import StepSize
from octavo.backends.cuda.probe import HOST
from octavo.errors import DeviceUnusable
from tests.api.server import serving
from tests.cuda.gpu import GPU
from tests.small_models import Small, save_gguf


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    save_gguf(Small(layers=2), path, Q.Q4_0)
    return path


def test_a_server_gives_what_python_gives(
    small: Path, tmp_path: Path, host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    placed = CudaExecutable.calls

    def counted(self: CudaExecutable, size: StepSize) -> object:
        steps.append(size.rows)
        return placed(self, size)

    monkeypatch.setattr(CudaExecutable, "calls", counted)
    prompts = [[5, 6, 7], list(range(10, 50))]
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, ignore_eos=True)
    memory = "2GiB" if GPU else "400MiB"
    with LLM(str(small), device="cuda", memory=memory, context=128) as llm:
        expected = [c.text for c in llm.generate(prompts, params)]
    assert {1, 2} & set(steps) and max(steps) >= 40
    arguments = (str(small), "--device", "cuda", "--memory", memory, "--context", "128")
    env = {} if GPU else {HOST: "torch"}
    with serving(*arguments, log=tmp_path / "log", env=env) as server:
        body = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "ignore_eos": True}
        for ids, text in zip(prompts, expected, strict=True):
            status, reply = server.post("/v1/completions", body | {"prompt": ids})
            assert status == 200 and reply["choices"][0]["text"] == text
        status, trace = server.post("/v1/profile", {"seconds": 0.1})
        assert status == 200
        assert [p["threads"] for p in trace["otherData"]["processes"]] == [1, 1]
    assert "an engine has ended" not in (tmp_path / "log").read_text()
    assert f"kernels   {'sm_' if GPU else 'host'}" in (tmp_path / "log").read_text()


def test_without_a_gpu_it_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.backends.cuda import probe

    def missing(_: int) -> probe.Gpu:
        raise DeviceUnusable("there is no NVIDIA driver here (libcuda.so.1)", "--device cpu")

    monkeypatch.setattr(probe, "check_torch", lambda: None)
    monkeypatch.setattr(probe, "find_gpu", missing)
    with pytest.raises(DeviceUnusable, match="no NVIDIA driver"):
        LLM(str(small), device="cuda")
