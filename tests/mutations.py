"""Opens a model again and again, each time with one value of one JSON file replaced by a bad one.

A program of its own (`python -m tests.mutations FOLDER FILE...`, or with a GGUF file alone), so that
memory can be limited and a crash is seen. Prints a line for each outcome that is neither a model nor a typed, short error.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.pooling import read_pooling
from octavo.errors import OctavoError
from octavo.models import build_program
from octavo.text import load_tokenizer
from octavo.text.chat import template_source

ROOM = 512 << 20  # of address space, over what the program has
SECONDS = 5.0
SURROGATE, HUGE = "\ud800", 10**400
BAD: list[Any] = [
    None, True, -1, 0, 1 << 31, 500_000_000, 1 << 63, HUGE, 1.5, 1e308, float("nan"), float("-inf"), "",
    "x" * 5000, SURROGATE, "\x1b[31m", "\0", [], {}, [[]], [{}], [None], [1 << 40], {"a": {"b": []}},
]  # fmt: skip

BAD_GGUF = [b for b in BAD if not isinstance(b, dict) and b not in (None, HUGE)]  # as it can say


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON document has values; of long lists and tables only the first and last entries."""
    yield at
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in dict.fromkeys([*keys[:40], *keys[-1:]]):
            yield from places(value[key], (*at, key))


def replaced(value: Any, at: tuple[Any, ...], bad: Any) -> Any:
    if not at:
        return bad
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:], bad)
    return copy


def open_all(checkpoint: Checkpoint) -> None:
    """What a start does with a checkpoint before it loads weights, and a little encoding."""
    program = build_program(checkpoint)
    read_pooling(checkpoint, program.task != "generate")
    tokenizer = load_tokenizer(checkpoint)
    template_source(checkpoint)
    tokenizer.decode(tokenizer.encode("Some words, 123 \u65e5\u672c\n"))
    tokenizer.encode_segments("a b", "c")


def outcome(call: Callable[[], object]) -> str:
    """What is wrong with how a call ended; "" if nothing is."""
    begin = time.monotonic()
    try:
        call()
    except OctavoError as e:
        text = str(e)
        if len(text) > 500 or "\n" in text or "\x1b" in text:
            return f"message {text[:200]!r}"
    except BaseException as e:  # a panic of the tokenizers library is no Exception
        return f"{type(e).__name__}: {str(e)[:200]}"
    took = time.monotonic() - begin
    return f"{took:.1f} s" if took > SECONDS else ""


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def document(path: Path) -> tuple[Any, Callable[[Any], bytes]]:
    """What a file says in JSON, and how it is written when it says something else."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return json.loads(data), lambda value: json.dumps(value).encode()
    length = int.from_bytes(data[:8], "little")

    def written(value: Any) -> bytes:
        header = json.dumps(value).encode()
        return len(header).to_bytes(8, "little") + header + data[8 + length :]

    return json.loads(data[8 : 8 + length]), written


def in_folder(folder: Path, name: str) -> Iterator[tuple[tuple[Any, ...], Any, str]]:
    path = folder / name
    good = path.read_bytes()
    value, written = document(path)
    for at in list(places(value)):
        for bad in BAD:
            path.write_bytes(written(replaced(value, at, bad)))
            yield at, bad, outcome(lambda: open_all(open_checkpoint(folder)))
    path.write_bytes(good)


def in_gguf(path: Path) -> Iterator[tuple[tuple[Any, ...], Any, str]]:
    checkpoint = open_checkpoint(path)
    for at in list(places(dict(checkpoint.metadata)))[1:]:
        for bad in BAD_GGUF:
            metadata = replaced(dict(checkpoint.metadata), at, bad)
            changed = replace(checkpoint, metadata=metadata)
            yield at, bad, outcome(lambda c=changed: open_all(c))  # type: ignore[misc]


def main(model: Path, names: list[str]) -> None:
    usual = outcome(lambda: open_all(open_checkpoint(model)))
    assert not usual, usual
    limit_memory()
    tried = 0
    for name in names or [model.name]:
        for at, bad, wrong in in_folder(model, name) if model.is_dir() else in_gguf(model):
            tried += 1
            if wrong:
                print(name, "/".join(map(str, at)), ascii(bad)[:40], wrong)
    print("tried", tried)


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    main(Path(sys.argv[1]), sys.argv[2:])
