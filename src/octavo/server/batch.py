"""Runs the lines of a batch: each is the body of a request, and its answer is a line too."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.errors import RequestError, UsageError
from octavo.server.parsing import NOT_JSON

AT_ONCE = 64  # requests of all batches that are in flight
PAUSE = 0.5  # seconds before a request that is not served now is sent again
LONGEST = 15.0  # of them, for each is twice the one before
MOST_LINES = 50_000
MAX_LINE = 8 << 20
BEGINNING = b'{"id":"batch_req_'  # of each line of results
encode = msgspec.json.Encoder().encode
Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # a path and a body
Write = Callable[[bytes, bool], None]  # a line of results, and whether it is an answer


class Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Result(msgspec.Struct):
    """What is read of a line of results."""

    custom_id: str


class Fault(NamedTuple):
    """What is wrong with line number `line`, from 1."""

    line: int
    message: str


class ShuttingDown(Exception):
    """The batch cannot go on here; what is done is done."""


def read_lines(path: Path, urls: Iterable[str]) -> Iterator[Line | Fault]:
    """The lines of a file, one by one, each as a Line or as what is wrong with it."""
    known, seen = set(urls), set[str]()
    with path.open("rb") as file:
        for number, text in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if number > MOST_LINES or len(text) > MAX_LINE:
                yield Fault(number, f"at most {MOST_LINES:,} lines of {MAX_LINE:,} bytes are taken")
                return
            if not text.strip():
                continue
            try:
                line = msgspec.json.decode(text, type=Line)
            except NOT_JSON as e:
                yield Fault(number, f"not a request: {e}")
                continue
            if line.custom_id in seen:
                yield Fault(number, f"custom_id {line.custom_id[:64]!r} comes twice")
            elif line.method != "POST" or line.url not in known:
                yield Fault(number, f"POST to one of {', '.join(sorted(known))} is taken")
            else:
                yield line
            seen.add(line.custom_id)


def finished_ids(path: Path) -> set[str]:
    """The requests that a file of results answers. A line that was cut off is removed from it.
    Raises UsageError for a file of anything else, which stays as it is."""
    found: set[str] = set()
    if not path.exists():
        return found
    with path.open("r+b") as file:
        end = 0
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n") and text[: len(BEGINNING)] == BEGINNING[: len(text)]:
                break
            try:
                if not (text.startswith(BEGINNING) and text.endswith(b"\n")):
                    raise ValueError
                found.add(msgspec.json.decode(text, type=Result).custom_id)
            except (ValueError, *NOT_JSON):
                what = f"line {number} of {path.name} is no result of a batch"
                raise UsageError(f"{what}; name another file") from None
            end += len(text)
        file.truncate(end)
    return found


async def run_lines(lines: Iterable[Line], ask: Ask, write: Write, at_once: int = AT_ONCE) -> None:
    """Answers lines, several at once, in the order in which they are done.

    Raises ShuttingDown when no more are taken.
    """
    left = iter(lines)

    async def work() -> None:
        for line in left:
            write(*await _answered(line, ask))

    workers = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _answered(line: Line, ask: Ask) -> tuple[bytes, bool]:
    """The result of a line. What cannot be served now is asked again."""
    error, pause = None, PAUSE
    while True:
        try:
            status, body = await ask(line.url, bytes(line.body))
        except RequestError as e:
            status, body = e.status, b"null"
            error = {"code": e.code, "message": str(e)}
            break
        if status not in (429, 503):
            break
        if b'"shutting_down"' in body:
            raise ShuttingDown
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST)
    id = "batch_req_" + secrets.token_hex(12)
    response = {"status_code": status, "request_id": id, "body": msgspec.Raw(body)}
    result = {"id": id, "custom_id": line.custom_id, "response": response, "error": error}
    return encode(result) + b"\n", status < 400
