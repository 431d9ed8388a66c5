"""Text that models are calibrated with and measured on, cut into blocks of tokens.

What one part holds the other does not: a document belongs to the part that its digest says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octavo.backends.base import Ints
from octavo.checkpoint.files import read_file
from octavo.errors import CheckpointError, UsageError
from octavo.text import Tokenizer

Part = Literal["calibration", "evaluation"]

PARTS: tuple[Part, Part] = ("calibration", "evaluation")
SELF = Path("self")  # instead of a file; one of that name goes by its whole path
MAX_DATA = 256 << 20  # bytes of a file
PIECES = (16_384, 4_096, 1_024, 256)  # characters that long documents are cut into
ENDINGS = ("", ".txt", ".md", ".rst", ".jsonl")  # of a folder's files that are read


def split(part: Part, data: Path | None = None, author: Path | None = None) -> list[str]:
    """Documents of one of the two `parts`."""
    return parts(data, author)[part]


def parts(data: Path | None = None, author: Path | None = None) -> dict[Part, list[str]]:
    """Documents in two parts that never share one.

    data: a text file, a .jsonl file with "text" or "messages" in each line, a folder of them, or
    `self` for what the model `author` writes; by default Python's own reference manual. A
    document's digest says which part it belongs to, so documents that are added later move no
    others. The order is that of the digests: the first ones are a fair sample. Raises UsageError
    for data that cannot be read, or not be split.
    """
    if data is None:
        return _in_parts(_manual())
    documents = _written(author) if author is not None and data == SELF else _read(data)
    for length in (None, *PIECES):
        pieces = documents if length is None else [p for d in documents for p in _cut(d, length)]
        found = _in_parts({_digest(p.strip()): p for p in pieces if p.strip()})
        if all(found.values()):
            return found
    text = sum(map(len, documents))
    raise UsageError(
        f"{data}: {text:,} characters are too few for a part to calibrate with and another to "
        f"measure on; some thousands are needed"
    )


def described(data: Path | None) -> str:
    """What the text is, for people."""
    if data is None:
        return "Python's reference manual"
    return "what the model writes itself" if data == SELF else data.name


def token_blocks(
    texts: list[str], tokenizer: Tokenizer, length: int, count: int, least: int = 1
) -> Ints:
    """Up to `count` blocks of `length` tokens of the texts one after the other, as many as are
    whole: `[blocks, length]`. Each begins as the model's prompts do.

    Raises UsageError if there are fewer than `least`.
    """
    bos = tokenizer.special.bos if tokenizer.special.add_bos else None
    first = [] if bos is None else [bos]
    own = length - len(first)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_bos=False)
        if len(ids) >= count * own:
            break
    if len(ids) < least * own:
        takes = f"a block of {length:,} takes" if least == 1 else f"{least} of {length:,} take"
        raise UsageError(
            f"the text has {len(ids):,} tokens; {takes} {least * own:,}, and as many again: one "
            "half of a text is to calibrate with, the other to evaluate on",
            "--data self",
        )
    blocks = [first + ids[i : i + own] for i in range(0, len(ids) - own + 1, own)]
    return np.array(blocks[:count], np.int32)


# -- documents ----------------------------------------------------------------------------------


def _manual() -> dict[bytes, str]:
    """Topics of the manual by their names' digests, which other versions of Python have too."""
    from pydoc_data.topics import topics

    return {_digest(name): text for name, text in topics.items()}


def _written(author: Path) -> list[str]:
    from octavo.compress.written import written

    return written(author)


def _read(data: Path) -> list[str]:
    if not data.exists():
        raise UsageError(f"no file or folder {str(data)!r}")
    if data.is_dir():
        files = sorted(p for p in data.rglob("*") if p.is_file() and p.suffix in ENDINGS)
        if not files:
            raise UsageError(f"{data} holds no .txt, .md, .rst or .jsonl file")
    else:
        files = [data]
    documents = [d for file in files for d in _documents(file)]
    if not any(map(str.strip, documents)):
        raise UsageError(f"{data} holds no text")
    return documents


def _documents(file: Path) -> Iterator[str]:
    try:
        text = read_file(file, MAX_DATA).decode()
    except CheckpointError as e:
        raise UsageError(str(e)) from None
    except UnicodeDecodeError as e:
        raise UsageError(f"{file.name}: byte {e.start:,} is not UTF-8") from None
    if file.suffix != ".jsonl":
        yield text.removeprefix("\ufeff")
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _line_text(line, f"{file.name}, line {number:,}")


def _line_text(line: str, where: str) -> str:
    """The text of a line of JSON: "text", or the contents of "messages" as paragraphs."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: not valid JSON") from None
    given = value if isinstance(value, dict) else {}
    if isinstance(text := given.get("text"), str):
        return _sound(text, where)
    if isinstance(messages := given.get("messages"), list):
        return _sound("\n\n".join(_contents(messages, where)), where)
    raise UsageError(f'{where}: neither "text", a string, nor "messages", a list')


def _contents(messages: list[Any], where: str) -> Iterator[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if content is None and isinstance(message, dict):
            continue  # of an assistant that only calls tools
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise UsageError(f'{where}: a message whose "content" is no text')
            yield text


def _sound(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where}: half a character") from None
    return text


# -- parts --------------------------------------------------------------------------------------


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


def _in_parts(documents: dict[bytes, str]) -> dict[Part, list[str]]:
    """Each goes where the first bit of its key says, in the order of keys."""
    out: dict[Part, list[str]] = {part: [] for part in PARTS}
    for key, document in sorted(documents.items()):
        out[PARTS[key[0] % 2]].append(document)
    return out


def _cut(document: str, length: int) -> Iterator[str]:
    """Pieces of at most `length` characters that end with a paragraph, line or word if they can."""
    at = 0
    while len(document) - at > length:
        head = document[at : at + length]
        end = next((e for mark in ("\n\n", "\n", " ") if (e := head.rfind(mark)) > 0), length)
        yield head[:end]
        at += end
    yield document[at:]
