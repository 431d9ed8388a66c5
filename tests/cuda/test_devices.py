"""Which device is used, what is said when it cannot be, and that nothing of it is imported before."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from octavo.backends import describe_gpu, get_backend, resolve_device
from octavo.backends.base import ProgramOptions, StepLimits
from octavo.backends.cuda import probe
from octavo.backends.cuda.device import check_room, torch_device
from octavo.cli.plan import plan
from octavo.errors import DeviceUnusable, DoesNotFit, Unsupported, UsageError
from tests.cuda.loaded import load, open_program, prompt
from tests.families import FAMILIES, save_family

MISSING = partial(probe.find_gpu, library="libnothing.so")


def test_auto_is_the_cpu_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CONTROL", (Path("/nonexistent"),))
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    assert describe_gpu() == "none"


def test_auto_is_a_gpu_where_one_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = probe.Gpu(0, "some GPU", 80 << 30, (9, 0))
    monkeypatch.setattr(probe, "CONTROL", (tmp_path,))
    monkeypatch.setattr(probe, "check_torch", lambda: None)
    monkeypatch.setattr(probe, "find_gpu", lambda number: gpu._replace(number=number))
    assert resolve_device("auto") == "cuda:0"
    assert resolve_device("cuda:1") == "cuda:1"
    assert get_backend("cuda:1").kernels == ["sm_90"]
    assert describe_gpu() == "some GPU, 80 GiB"


def test_auto_is_the_cpu_where_no_gpu_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "CONTROL", (tmp_path,))
    monkeypatch.setattr(probe, "find_gpu", MISSING)
    assert resolve_device("auto") == "cpu"
    monkeypatch.setattr(probe, "check_torch", lambda: None)
    assert describe_gpu().startswith("not usable: there is no NVIDIA driver here")


@pytest.mark.parametrize("asked", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cudas", ""])
def test_other_words_are_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="is not auto, cpu, cuda or cuda:N"):
        resolve_device(asked)


def test_no_driver() -> None:
    with pytest.raises(DeviceUnusable, match=r"no NVIDIA driver here \(libcuda.so.1\)") as e:
        probe.find_gpu(0, "libnothing.so")
    assert e.value.suggestions == ("--device cpu",)


class Driver:
    """A driver with one GPU of some age."""

    def __init__(self, code: int = 0, capability: tuple[int, int] = (9, 0)) -> None:
        self.code, self.attributes = code, {75: capability[0], 76: capability[1]}

    def cuInit(self, _: int) -> int:
        return self.code

    def cuDeviceGetCount(self, out: object) -> None:
        out._obj.value = 1  # type: ignore[attr-defined]

    def cuDeviceGet(self, *_: object) -> None: ...

    def cuDeviceGetName(self, name: object, *_: object) -> None:
        name.value = b"Test GPU"  # type: ignore[attr-defined]

    def cuDeviceTotalMem_v2(self, out: object, _: object) -> None:
        out._obj.value = 24 << 30  # type: ignore[attr-defined]

    def cuDeviceGetAttribute(self, out: object, attribute: int, _: object) -> None:
        out._obj.value = self.attributes[attribute]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("driver", "number", "said"),
    [
        (Driver(100), 0, "the NVIDIA driver finds no GPU"),
        (Driver(803), 0, r"does not start \(error 803\)"),
        (Driver(), 2, "there is no GPU 2: the driver has 1"),
        (Driver(capability=(7, 5)), 0, "Test GPU has compute capability 7.5; kernels take 8.0"),
    ],
)
def test_unusable_gpus(
    driver: Driver, number: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe.ctypes, "CDLL", lambda _: driver)
    with pytest.raises(DeviceUnusable, match=said):
        probe.find_gpu(number)


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.ctypes, "CDLL", lambda _: Driver())
    assert probe.find_gpu(0) == probe.Gpu(0, "Test GPU", 24 << 30, (9, 0))


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "PyTorch, which is missing"),
        ({"torch": "2.8.0", "triton": "3.4.0"}, "PyTorch 2.8.0 is too old for this: 2.11 or later"),
        ({"torch": "2.13.0+cpu"}, r"PyTorch 2.13.0\+cpu is built without CUDA"),
    ],
)
def test_unusable_pytorch(
    versions: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "installed", versions.get)
    with pytest.raises(DeviceUnusable, match=said) as e:
        probe.check_torch()
    assert e.value.suggestions == ('pip install "octavo[cuda]"',)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_family(FAMILIES["llama"], tmp_path)
    return tmp_path


def test_what_is_not_supported_is_named(llama: Path, host: None) -> None:
    backend, program = get_backend("cuda:0"), open_program(llama)
    with pytest.raises(Unsupported, match="LoRA adapters on a GPU"):
        backend.compile(program, adapters=True)
    compiled = backend.compile(program)
    with pytest.raises(Unsupported, match="--kv-dtype int8 on a GPU, which caches bf16"):
        compiled.kv_dtype("int8")
    with pytest.raises(Unsupported, match="--activations int16 on a GPU"):
        compiled.activations("int16")
    with pytest.raises(Unsupported, match="packed weights kept on disk"):
        compiled.load(None, ProgramOptions(StepLimits(1, 1, 1), 1, "bf16", packed=True))  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="leaving out parts"):
        load(program, llama).skip([0])


def test_plans_without_a_gpu(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_gpu", MISSING)
    asked = [str(llama), "--device", "cuda", "--json"]
    done = CliRunner().invoke(plan, [*asked, "--memory", "24GiB"], catch_exceptions=False)
    made = json.loads(done.output)
    compiled = get_backend("cuda:0").compile(open_program(llama))
    options = ProgramOptions(StepLimits(512, 256, made["capacity"] // 16), 1, "bf16")
    planned = compiled.footprint(options)
    assert made["device"] == "cuda:0"
    assert made["weights"] == planned.weights
    assert made["kv_cache"] == planned.cache
    assert made["total"] <= 24 << 30
    with pytest.raises(UsageError, match="there is no GPU here to plan for"):
        CliRunner().invoke(plan, asked, catch_exceptions=False)


def test_planning_imports_no_torch(llama: Path) -> None:
    code = (
        "import sys; from octavo.cli.plan import plan\n"
        f"plan([{str(llama)!r}, '--device', 'cuda', '--memory', '24GiB'], standalone_mode=False)\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "octavo.backends.cuda.memory" in modules
    assert not {"torch", "triton"} & modules


def test_steps_are_prompts(llama: Path, host: None) -> None:
    """Operations one after the other, as image encoders are computed, are a step."""
    executable = load(open_program(llama), llama)
    step = prompt([5, 6, 7])
    executable.step(step)
    expected = executable.logits(3).tolist()
    executable.logits(3).fill(0)
    for first, last in zip([0, *executable.pauses], executable.pauses, strict=False):
        executable.run(step, first, last)
    assert executable.logits(3).tolist() == expected


def test_a_gpu_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 24 << 30))
    gpu = torch.device("cuda", 0)
    check_room(gpu, 1 << 30)
    said = r"the model takes 2,048 MiB of the GPU's memory; 1,024 of 24,576 MiB are free"
    with pytest.raises(DoesNotFit, match=said):
        check_room(gpu, 2 << 30)


def test_pytorch_that_cannot_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(probe.HOST, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnusable, match=r"cannot use the GPU: the driver is too old for CUDA"):
        torch_device(0)
