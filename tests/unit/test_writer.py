"""Checkpoints that are written: read back by the libraries that own the formats, and by us."""

from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.gguf import open_gguf
from octavo.checkpoint.safetensors import read_safetensors
from octavo.checkpoint.writer import (
    INDEX,
    NewTensor,
    replacing,
    write_folder,
    write_gguf,
    write_safetensors,
)
from octavo.compress.blocks import encode
from octavo.errors import CheckpointError, WriteError

RNG = np.random.default_rng(3)
ARRAYS: dict[str, tuple[TensorType, Any]] = {
    "f32": (TensorType.F32, RNG.standard_normal((3, 5)).astype(np.float32)),
    "f16": (TensorType.F16, RNG.standard_normal((7,)).astype(np.float16)),
    "i8": (TensorType.I8, np.arange(-4, 4, dtype=np.int8)),
    "i64": (TensorType.I64, np.arange(6).reshape(1, 2, 3)),
}
TENSORS = {name: NewTensor.of(a, kind) for name, (kind, a) in ARRAYS.items()}


def test_safetensors_reads_it(tmp_path: Path) -> None:
    bf16 = RNG.integers(0, 1 << 14, (2, 4)).astype(np.uint16)
    tensors = TENSORS | {"bf16": NewTensor.of(bf16, TensorType.BF16)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    with safe_open(tmp_path / "x.safetensors", "np") as f:
        assert f.metadata() == {"format": "pt"}
        for name, (_, array) in ARRAYS.items():
            assert (f.get_tensor(name) == array).all() and f.get_tensor(name).dtype == array.dtype
    ours = read_safetensors(tmp_path / "x.safetensors")
    assert list(ours) == list(tensors)
    assert (ours["bf16"].raw().view(np.uint16).reshape(2, 4) == bf16).all()


METADATA = {
    "general.architecture": "llama", "llama.block_count": 2, "small": -3, "large": 1 << 40,
    "very small": -(1 << 40), "rate": 0.5, "yes": True, "names": ["a", "é", ""],
    "kinds": [1, -1, 3], "scores": [0.5, 1.0], "flags": [True, False], "none": [],
}  # fmt: skip


def test_gguf_reads_it(tmp_path: Path) -> None:
    rows = RNG.standard_normal((4, 256)).astype(np.float32)
    blocks = {k: NewTensor.of(encode(rows, k), k) for k in (TensorType.Q4_0, TensorType.Q6_K)}
    tensors = TENSORS | {k.name: t for k, t in blocks.items()}
    write_gguf(tmp_path / "x.gguf", METADATA, tensors)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    for key, value in METADATA.items():
        found = reader.fields[key].contents()
        assert found == (pytest.approx(value) if isinstance(value, float) else value)
    kinds = {k: reader.fields[k].types[0].name for k in METADATA}
    assert [kinds[k] for k in ("llama.block_count", "small", "large", "very small", "rate")] == [
        "UINT32", "INT32", "UINT64", "INT64", "FLOAT32",
    ]  # fmt: skip
    found = {t.name: t for t in reader.tensors}
    assert list(found) == list(tensors)
    for name, (_, array) in ARRAYS.items():
        assert (np.asarray(found[name].data).reshape(array.shape) == array).all()
    for kind, tensor in blocks.items():
        assert found[kind.name].tensor_type == int(kind)
        assert (found[kind.name].data == tensor.data()).all()
    ours = open_gguf(tmp_path / "x.gguf")
    assert ours.metadata == METADATA
    assert {n: t.shape for n, t in ours.tensors.items()} == {n: t.shape for n, t in tensors.items()}


def test_a_model_survives_the_way_out_and_in(smollm2: Path, tmp_path: Path) -> None:
    """The demo model written anew has the same metadata and the same bytes of every tensor."""
    source = open_checkpoint(smollm2)
    tensors = {n: NewTensor(t.type, t.shape, t.raw) for n, t in source.tensors.items()}
    write_gguf(tmp_path / "copy.gguf", source.metadata, tensors)
    copy = open_checkpoint(tmp_path / "copy.gguf")
    assert copy.metadata == source.metadata and list(copy.tensors) == list(source.tensors)
    for name, tensor in source.tensors.items():
        assert copy.tensors[name].type == tensor.type
        assert (copy.tensors[name].raw() == tensor.raw()).all()


def test_shards(tmp_path: Path) -> None:
    """No file has more than it may, and an index says where tensors are; files keep their paths."""
    (tmp_path / "pooling.json").write_text("{}")
    tensors = {f"t{i}": NewTensor.of(np.full(100, i, np.float32), TensorType.F32) for i in range(7)}
    out, files = tmp_path / "out", {"1_Pooling/config.json": tmp_path / "pooling.json"}
    out.mkdir()  # an empty one may be there
    write_folder(out, {"model_type": "llama"}, tensors, files, shard_bytes=1000)
    names = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert sorted(p.name for p in out.iterdir()) == sorted(
        [*names, INDEX, "config.json", "1_Pooling"]
    )
    assert (out / "1_Pooling" / "config.json").read_text() == "{}"
    where = json.loads((out / INDEX).read_text())
    assert where["metadata"]["total_size"] == 2800
    for name, file in where["weight_map"].items():
        assert (read_safetensors(out / file)[name].vector() == float(name[1:])).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "pooling.json"]


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    out, good = tmp_path / "out", NewTensor.of(np.zeros(4, np.float32), TensorType.F32)

    def stop() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(out, {}, {"a": good, "b": NewTensor(TensorType.F32, (4,), stop)}, None, 16)
    with pytest.raises(WriteError, match="No such file"):
        write_folder(out, {}, {"a": good}, {"x": tmp_path / "none"})
    assert list(tmp_path.iterdir()) == []
    write_folder(out, {"n": 1}, {"a": good})
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(WriteError, match="is not empty; name a new folder"):
        write_folder(out, {"n": 2}, {"a": good})
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="Not a directory"):
        write_gguf(tmp_path / "file" / "x.gguf", {}, {})


def test_what_formats_cannot_hold(tmp_path: Path) -> None:
    q4 = NewTensor.of(encode(np.ones((1, 32), np.float32), TensorType.Q4_0), TensorType.Q4_0)
    short = NewTensor(TensorType.F32, (4,), lambda: np.zeros(3, np.float32))
    deep = NewTensor.of(np.zeros((1,) * 5, np.float32), TensorType.F32)
    path = tmp_path / "x"
    for fails, message in (
        (lambda: write_safetensors(path, {"q": q4}), "tensor 'q' is Q4_0, not of safetensors"),
        (lambda: write_safetensors(path, {"s": short}), "'s' has 12 bytes, its shape 16"),
        (lambda: write_gguf(path, {}, {"d": deep}), r"'d': F32 \[1, 1, 1, 1, 1\] cannot be in a"),
        (lambda: write_gguf(path, {"k": [1, "a"]}, {}), "k: a GGUF file holds no"),
        (lambda: write_gguf(path, {"k": None}, {}), "k: a GGUF file holds no NoneType"),
    ):
        with pytest.raises(CheckpointError, match=message):
            fails()
        assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_older_file(tmp_path: Path) -> None:
    """A write that stops half way, a full disk (here: a limit of file sizes), a folder that is not."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, TENSORS)
    before = path.read_bytes()

    def stop() -> Any:
        raise KeyboardInterrupt

    tensors = TENSORS | {"more": NewTensor(TensorType.F32, (8,), stop)}
    with pytest.raises(KeyboardInterrupt):
        write_safetensors(path, tensors)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    pid = os.fork()
    if not pid:  # in a process of its own: a limit of files is everybody's
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        big = {"x": NewTensor.of(np.zeros(1 << 16, np.float32), TensorType.F32)}
        try:
            write_safetensors(path, big)
        except WriteError as e:
            os._exit(7 if "File too large" in str(e) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(WriteError, match="No such file or directory"), replacing(tmp_path / "a/b"):
        pass


def test_headers_are_aligned(tmp_path: Path) -> None:
    """safetensors' header ends at a multiple of 8, GGUF's tensors begin at multiples of 32."""
    write_safetensors(tmp_path / "x", TENSORS)
    (length,) = struct.unpack("<Q", (tmp_path / "x").read_bytes()[:8])
    assert length % 8 == 0
    write_gguf(tmp_path / "y", METADATA, TENSORS)
    assert all(t.data_offset % 32 == 0 for t in gguf.GGUFReader(tmp_path / "y").tensors)
