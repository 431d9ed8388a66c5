"""Log lines: route, status, sizes and times of requests; never prompts, keys or headers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from queue import Full, Queue
from threading import Thread
from typing import Any, TextIO

from octavo.generate.reply import Usage
from octavo.server.exchange import Exchange

QUIET = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/ui/", "/v1/requests"})
MOST_LINES = 10_000  # waiting to be written
LOG = logging.getLogger("octavo.server")


class TextFormat(logging.Formatter):
    """`12:34:56  what happened`; warnings and errors say that they are."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}  " if record.levelno >= logging.WARNING else ""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock}  {level}{record.getMessage()}"


class JsonFormat(logging.Formatter):
    """One object a line: time, level, logger, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(),
            "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        return json.dumps(line | getattr(record, "fields", {}))


class _Queue(QueueHandler):
    """Hands records to another thread. Drops them when the queue is full."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(Full):
            self.queue.put_nowait(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


class _Stream(logging.StreamHandler[TextIO]):
    """Writes lines as long as somebody reads them."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing: there is nobody, or no room, to say it to."""


def _write(waiting: Queue[logging.LogRecord | None], handler: logging.Handler) -> None:
    while (record := waiting.get()) is not None:
        handler.handle(record)


@contextmanager
def logging_to(stream: TextIO, level: str = "info", form: str = "text") -> Iterator[None]:
    """Writes the lines of all octavo loggers to a stream until the end of the block.

    A thread writes them: a blocked terminal must not block the server.
    """
    written = _Stream(stream)
    written.setFormatter(JsonFormat() if form == "json" else TextFormat())
    waiting: Queue[logging.LogRecord | None] = Queue(MOST_LINES)
    writer = Thread(target=_write, args=(waiting, written), daemon=True)
    handler = _Queue(waiting)
    logger = logging.getLogger("octavo")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    writer.start()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        with suppress(Full):
            waiting.put(None, timeout=1)
        writer.join(5)  # a blocked reader must not block the end either


def log_exchange(one: Exchange) -> None:
    """One line for a request that has ended."""
    level = logging.INFO
    if one.route in QUIET:
        level = logging.DEBUG
    elif one.status >= 500:
        level = logging.WARNING if one.status == 503 else logging.ERROR
    if LOG.isEnabledFor(level):
        LOG.log(level, "%s", _text(one), extra={"fields": exchange_fields(one)})


def _text(one: Exchange) -> str:
    name = one.route.removeprefix("/v1/").removesuffix("/completions") or one.route
    if one.status == 200 and one.usage is not None:
        return f"{name}  {_speed(one.usage)}  {one.status}"
    reason = f" {one.code}" if one.code else ""
    sizes = f"{one.method} {one.received} bytes  {1000 * one.seconds:.0f} ms"
    return f"{name}  {sizes}  {one.status}{reason}"


def _speed(usage: Usage) -> str:
    """Tokens, time to the first and tokens per second."""
    if not usage.completion:
        return f"{usage.prompt} tokens"
    first = f"ttft {1000 * (usage.first - usage.began):.0f} ms" if usage.first else "no token"
    speed = ""
    if usage.first and usage.last and usage.last > usage.first and not usage.beam_width:
        speed = f"  {(usage.completion - 1) / (usage.last - usage.first):.0f} tok/s"
    return (
        f"{usage.prompt} → {usage.completion} tokens  {first}{speed}  "
        f"cache {usage.cached}/{usage.prompt}"
    )


def exchange_fields(one: Exchange) -> dict[str, Any]:
    """What a line tells of a request."""
    fields: dict[str, Any] = {
        "route": one.route, "method": one.method, "status": one.status, "code": one.code,
        "model": one.model, "seconds": round(one.seconds, 6), "received_bytes": one.received,
        "sent_bytes": one.sent,
    }  # fmt: skip
    usage = one.usage
    if one.ttft is not None:
        fields["ttft_seconds"] = round(one.ttft, 6)
    if usage is not None:
        fields |= {
            "prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
            "cached_tokens": usage.cached, "finish_reasons": usage.finishes,
        }  # fmt: skip
        if usage.first is not None:
            fields["queue_seconds"] = round(usage.queued, 6)
    return fields
