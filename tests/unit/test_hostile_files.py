"""Damaged and hostile model files: a typed one-line error, no crash, no large allocation."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.adapter import read_adapter
from octavo.checkpoint.pooling import read_pooling
from octavo.errors import CheckpointError, ModelNotFound, OctavoError
from octavo.models import build_program
from octavo.text import load_tokenizer
from octavo.text.chat import template_source
from tests.small_models import Small, save_gguf, save_hf
from tests.unit.test_mutated_files import tokenizer as make_tokenizer

ALLOWANCE = 16 << 20  # bytes a refusal may allocate


def opens(path: Path) -> bool:
    """Whether a file loads as far as weights; if not, the error must be typed, short and cheap."""
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        build_program(checkpoint)
        load_tokenizer(checkpoint)
        return True
    except OctavoError as e:
        assert len(str(e)) < 400 and "\n" not in str(e)
        return False
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < ALLOWANCE


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    save_gguf(Small(layers=1), path, Q.Q4_0)
    assert opens(path)
    return path.read_bytes()


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(tensors: int = 0, pairs: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def tensor(
    name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


PAD = b"\0" * 4096
HOSTILE = {
    "empty": b"",
    "magic only": b"GGUF",
    "wrong magic": header(magic=b"GGML") + PAD,
    "version 1": header(version=1) + PAD,
    "version 99": header(version=99) + PAD,
    "big-endian version": header(version=3 << 24) + PAD,
    "2^63 tensors": header(tensors=1 << 63) + PAD,
    "2^63 pairs": header(pairs=1 << 63) + PAD,
    "more tensors than bytes": header(tensors=10_000) + PAD,
    "key of 2^64-1": header(pairs=1) + struct.pack("<Q", (1 << 64) - 1) + PAD,
    "string value of 2^62": header(pairs=1) + string(b"k") + struct.pack("<IQ", 8, 1 << 62) + PAD,
    "array of 2^61 u64": header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 10, 1 << 61) + PAD,
    "array of 2^60 strings": header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60) + PAD,
    "array of 2^40 u8": header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 0, 1 << 40) + PAD,
    "array of unknown type": header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 77, 1) + PAD,
    "nested arrays": header(pairs=1) + string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 200 + PAD,
    "unknown value type": header(pairs=1) + string(b"k") + struct.pack("<I", 99) + PAD,
    "duplicate key": header(pairs=2) + (string(b"k") + struct.pack("<II", 4, 1)) * 2 + PAD,
    "key is not UTF-8": header(pairs=1) + string(b"\xff\xfe") + struct.pack("<II", 4, 1) + PAD,
    "alignment 0": header(pairs=1) + string(b"general.alignment") + struct.pack("<II", 4, 0) + PAD,
    "alignment 3": header(pairs=1) + string(b"general.alignment") + struct.pack("<II", 4, 3) + PAD,
    "alignment 2^31": header(pairs=1) + string(b"general.alignment") + struct.pack("<II", 4, 1 << 31) + PAD,
    "alignment is text": header(pairs=1) + string(b"general.alignment") + struct.pack("<I", 8) + string(b"x") + PAD,
    "no dimensions": header(1) + tensor(dims=()) + PAD,
    "five dimensions": header(1) + tensor(dims=(1, 1, 1, 1, 1)) + PAD,
    "dimension overflow": header(1) + tensor(dims=(1 << 32, 1 << 32)) + PAD,
    "product of 2^64": header(1) + tensor(dims=(1 << 16, 1 << 16, 1 << 16, 1 << 16)) + PAD,
    "dimension of 2^63": header(1) + tensor(dims=(1 << 63,)) + PAD,
    "tensor past the end": header(1) + tensor(dims=(1 << 20,)) + PAD,
    "offset past the end": header(1) + tensor(offset=1 << 40) + PAD,
    "offset of 2^64-32": header(1) + tensor(offset=(1 << 64) - 32) + PAD,
    "offset not aligned": header(1) + tensor(offset=1) + PAD,
    "type 4": header(1) + tensor(kind=4) + PAD,
    "type 2^32-1": header(1) + tensor(kind=(1 << 32) - 1) + PAD,
    "ragged block row": header(1) + tensor(dims=(33,), kind=2) + PAD,
    "duplicate tensor": header(2) + tensor() * 2 + PAD,
    "no architecture": header() + PAD,
    "architecture is a number": header(pairs=1) + string(b"general.architecture") + struct.pack("<II", 4, 1) + PAD,
    "unknown architecture": header(pairs=1) + string(b"general.architecture") + struct.pack("<I", 8) + string(b"mamba9") + PAD,
    "llama without anything": header(pairs=1) + string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama") + PAD,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_gguf(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[name])
    assert not opens(path)


def test_sparse_terabyte(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(1) + tensor(dims=(1 << 36,)))
    os.truncate(path, 1 << 40)
    assert not opens(path)


SPARSE = 256 << 20
LENGTHY = {
    "numbers": struct.pack("<IIQ", 9, 0, SPARSE - 200),
    "doubles": struct.pack("<IIQ", 9, 12, SPARSE // 8 - 200),
    "empty strings": struct.pack("<IIQ", 9, 8, SPARSE // 8 - 200),
    "empty arrays": struct.pack("<IIQ", 9, 9, SPARSE // 8 - 200),
    "one string": struct.pack("<IQ", 8, SPARSE - 200),
}


@pytest.mark.parametrize("name", LENGTHY)
def test_sparse_values(name: str, tmp_path: Path) -> None:
    """A quarter of a gigabyte of nothing, claimed by one value, on a few kilobytes of disk."""
    path = tmp_path / "m.gguf"
    path.write_bytes(header(pairs=1) + string(b"tokenizer.ggml.tokens") + LENGTHY[name])
    os.truncate(path, SPARSE)
    assert not opens(path)


def test_text_of_many_strings(tmp_path: Path) -> None:
    """Each string is small; together they are more than any vocabulary has."""
    path = tmp_path / "m.gguf"
    path.write_bytes(header(pairs=9) + b"".join(
        string(b"k%d" % i) + struct.pack("<IQ", 8, 10 << 20) + bytes(10 << 20) for i in range(9)
    ))  # fmt: skip
    with pytest.raises(OctavoError, match="strings of more than 67108864 bytes"):
        open_checkpoint(path)


def test_many_tensors_and_pairs(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for claim in (header(tensors=1 << 18), header(pairs=1 << 18)):
        path.write_bytes(claim)
        os.truncate(path, 64 << 20)
        with pytest.raises(OctavoError, match="131072 and 65536 at most"):
            open_checkpoint(path)


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "device"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
     "chat_template.jinja", "modules.json", "1_Pooling/config.json", "model.safetensors.index.json"],
)  # fmt: skip
def test_files_that_are_no_files(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for a writer, and nothing is read from a device."""
    folder = tmp_path / "m"
    save_hf(Small(layers=1), folder)
    make_tokenizer(folder)
    open_folder(folder)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if name.endswith(".index.json"):  # which is not asked beside a whole file
        (folder / "model.safetensors").unlink()
    monkeypatch.chdir(path.parent)  # the path of a socket has 107 bytes at most
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OctavoError, match=f"{path.name}: .*(regular file|cannot be read)"):
        open_folder(folder)


def open_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    build_program(checkpoint)
    load_tokenizer(checkpoint)
    read_pooling(checkpoint, False)
    template_source(checkpoint)


def test_paths_that_are_no_paths(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    for path in (tmp_path / "m.gguf", tmp_path / ("x" * 300), Path("a\0b"), tmp_path / "absent"):
        with pytest.raises(ModelNotFound, match="no file or folder"):
            open_checkpoint(path)
    with pytest.raises(CheckpointError, match="m.gguf: a FIFO, not a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_that_are_no_files(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors({"a": entry()}))
    (tmp_path / name).unlink()
    (os.mkfifo if kind == "fifo" else os.mkdir)(tmp_path / name)
    with pytest.raises(OctavoError):
        read_adapter(tmp_path)


# -- tokenizers -------------------------------------------------------------------------------


def vocabulary(**changes: Any) -> dict[str, Any]:
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
    }  # fmt: skip
    frame = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    model_changes = changes.pop("model", {})
    return {"version": "1.0", "added_tokens": [], **frame, "model": model | model_changes} | changes


TRUNCATION = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
PADDING = {
    "strategy": {"Fixed": 1 << 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "a",
}  # fmt: skip
TEMPLATE = {
    "type": "TemplateProcessing", "pair": [], "special_tokens": {},
    "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
}  # fmt: skip
HOSTILE_TOKENIZERS = {
    "id of 5e8": (vocabulary(model={"vocab": {"a": 0, "b": 1, "ab": 500_000_000}}), "ids up to 500000000"),
    "merge of strangers": (vocabulary(model={"merges": [["a", "z"]]}), "out of vocabulary"),
    "merge of numbers": (vocabulary(model={"merges": [[1, 2]]}), "cannot be read"),
    "no unknown token": (vocabulary(model={"unk_token": "<unk>", "vocab": {"b": 1}, "merges": []}), "<unk>"),
    "panic while reading": (vocabulary(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "cannot be read"),
    "panic while splitting": (vocabulary(pre_tokenizer={"type": "FixedLength", "length": 0}), "non-zero"),
    "panic while framing": (vocabulary(post_processor=TEMPLATE), "cannot encode"),
    "pattern": (vocabulary(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": False}), "parenthesis"),
    "nothing": ([], "cannot be read"),
    "many values": ([0] * (5 << 20), "values; at most"),
}  # fmt: skip


def tokenizer_of(folder: Path, content: Any) -> Any:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return load_tokenizer(Checkpoint(folder, "hf", {}, {}, {path.name: path}))


@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_hostile_tokenizers(name: str, tmp_path: Path) -> None:
    content, reason = HOSTILE_TOKENIZERS[name]
    with pytest.raises(OctavoError, match=reason) as raised:
        tokenizer_of(tmp_path, content)
    assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


def test_settings_that_change_ids_are_switched_off(tmp_path: Path) -> None:
    """Truncation, padding to a terabyte, empty patterns, and merges that are left out at random."""
    replace = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
    tokenizer = tokenizer_of(tmp_path, vocabulary(
        truncation=TRUNCATION, padding=PADDING, normalizer=replace, model={"dropout": 0.5}
    ))  # fmt: skip
    assert [tokenizer.encode("ab" * 50) for _ in range(20)] == [[2] * 50] * 20


def test_a_panic_while_encoding_is_a_typed_error(tmp_path: Path) -> None:
    sound = tokenizer_of(tmp_path, vocabulary())
    assert sound.encode("ab") == [2]
    sound._tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(length=0)
    with pytest.raises(CheckpointError, match="cannot encode this text"):
        sound.encode("ab")


HOSTILE_VOCABULARIES: dict[str, tuple[dict[str, Any], str]] = {
    "merge of one part": ({"merges": ["ab"]}, "merge 'ab' is not of two parts"),
    "merge of strangers": ({"merges": ["a z"]}, "out of vocabulary"),
    "merges are numbers": ({"merges": [1]}, "no merges"),
    "model is a list": ({"model": ["gpt2"]}, "tokenizer model"),
    "pre is a list": ({"pre": ["gpt-2"]}, "pre-tokenizer is"),
    "scores are text": ({"model": "llama", "scores": ["x"] * 3}, "not numbers"),
    "a token of a megabyte": ({"model": "llama", "scores": [0.0] * 3, "tokens": ["a", "b", "x" * (1 << 20)]}, "1048578 characters"),
    "no [CLS]": ({"model": "bert"}, "no .UNK. token"),
    "every token controls": (
        {"tokens": [str(i) for i in range(70_000)], "token_type": [3] * 70_000, "merges": []}, "70000 control tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_VOCABULARIES)
def test_hostile_vocabularies(name: str) -> None:
    changes, reason = HOSTILE_VOCABULARIES[name]
    usual = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in (usual | changes).items()}
    with pytest.raises(OctavoError, match=reason):
        load_tokenizer(Checkpoint(Path("m.gguf"), "gguf", metadata, {}))


# -- damage -----------------------------------------------------------------------------------


def test_truncated_anywhere(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for i in range(64):
        path.write_bytes(good[: len(good) * i // 64])
        assert not opens(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_corrupted_anywhere(
    good: bytes, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(good)
    for at, value in changes:
        data[at % len(data)] = value
    path = tmp_path_factory.mktemp("corrupt") / "m.gguf"
    path.write_bytes(data)
    opens(path)


NUMBERS = {
    "llama.block_count": 1 << 31, "llama.embedding_length": 1 << 31, "llama.attention.head_count": 3,
    "llama.attention.head_count_kv": 3, "llama.feed_forward_length": 7, "llama.context_length": 1 << 31,
    "llama.attention.key_length": 15,
}  # fmt: skip


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [0, "listed"])
def test_impossible_hyperparameters(key: str, value: Any, good: bytes, tmp_path: Path) -> None:
    number = NUMBERS[key] if value == "listed" else value
    at = good.index(key.encode()) + len(key) + 4
    path = tmp_path / "m.gguf"
    path.write_bytes(good[:at] + struct.pack("<I", number) + good[at + 4 :])
    assert not opens(path)


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_epsilon(eps: float, good: bytes, tmp_path: Path) -> None:
    at = good.index(b"layer_norm_rms_epsilon") + len(b"layer_norm_rms_epsilon") + 4
    path = tmp_path / "m.gguf"
    path.write_bytes(good[:at] + struct.pack("<f", eps) + good[at + 4 :])
    assert not opens(path)


def test_shards(good: bytes, tmp_path: Path) -> None:
    """Two parts load given either; a missing part is named."""
    reader = gguf.GGUFReader(_write(tmp_path / "whole.gguf", good))
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(parts):
        w = gguf.GGUFWriter(path, "llama")
        for t in reader.tensors[i::2]:
            w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    for path in parts:
        assert len(open_checkpoint(path).tensors) == len(reader.tensors)
    parts[1].unlink()
    with pytest.raises(OctavoError, match="m-00002-of-00002.gguf is missing"):
        open_checkpoint(parts[0])
    with pytest.raises(CheckpointError, match="0 parts"):
        open_checkpoint(_write(tmp_path / "x-00001-of-00000.gguf", good))


def test_tensors_of_nothing(tmp_path: Path) -> None:
    """Also if the model does not use them."""
    w = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    w.add_tensor("unused", np.zeros((0, 64), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(CheckpointError, match=r"'unused' has shape \[0, 64\]"):
        open_checkpoint(tmp_path / "m.gguf")


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# -- safetensors ------------------------------------------------------------------------------


def safetensors(entries: Any, data: bytes = b"\0" * 64) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (16,), offsets: Any = (0, 64)) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": list(offsets) if isinstance(offsets, tuple) else offsets,
    }


HOSTILE_SAFETENSORS = {
    "empty": b"",
    "short": b"\0" * 7,
    "header of 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "header of 200 MiB": struct.pack("<Q", 200 << 20) + b"{}",
    "not JSON": safetensors(b"{"),
    "a list": safetensors([]),
    "deep": safetensors(b"[" * 100_000),
    "entry is a number": safetensors({"a": 1}),
    "unknown dtype": safetensors({"a": entry("F8_E9M9")}),
    "no shape": safetensors({"a": entry(shape=None)}),
    "negative shape": safetensors({"a": entry(shape=[-16])}),
    "shape of booleans": safetensors({"a": entry(shape=[True])}),
    "huge shape": safetensors({"a": entry(shape=[1 << 40, 1 << 40])}),
    "size mismatch": safetensors({"a": entry(shape=[15])}),
    "past the end": safetensors({"a": entry(shape=[32], offsets=[0, 128])}),
    "negative offset": safetensors({"a": entry(offsets=[-64, 0])}),
    "reversed": safetensors({"a": entry(offsets=[64, 0])}),
    "overlap": safetensors({"a": entry(), "b": entry(shape=[8], offsets=[0, 32])}),
    "nine dimensions": safetensors({"a": entry(shape=[1] * 8 + [16])}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(HOSTILE_SAFETENSORS[name])
    assert not opens(tmp_path)


CONFIGS = [
    b"", b"{", b"[]", b"[" * 100_000, b'{"model_type": 5}', b'{"model_type": "llama"}',
    b'{"model_type": "gpt9"}',
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_hostile_config(config: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": entry()}))
    assert not opens(tmp_path)


def test_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": entry()}))
    index = tmp_path / "model.safetensors.index.json"
    for name in ("../x.safetensors", "/etc/passwd", "missing.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert not opens(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    save_hf(Small(layers=1), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert not opens(tmp_path)


def test_command_line_survives(tmp_path: Path) -> None:
    """The command ends with an exit code and one line, not with a signal or a traceback."""
    path = tmp_path / "m.gguf"
    for name in ("empty", "2^63 tensors", "tensor past the end", "unknown architecture"):
        path.write_bytes(HOSTILE[name])
        command = [sys.executable, "-m", "octavo.cli.main", "show", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode in (3, 6)
        assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
