"""OpenTelemetry traces: a span for each request, and one in it for each of its phases.

Spans are made when a request has ended, of the time stamps that it has then, and sent from a thread
of the exporter. Names and attributes are those of the conventions for generative AI.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo import __version__
from octavo.errors import UsageError
from octavo.server.exchange import Exchange, exchange
from octavo.server.logs import QUIET
from octavo.server.phases import moments

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import AttributeValue

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
NANO = 1_000_000_000


@dataclass(frozen=True)
class Trace:
    """Where a request's span belongs. parent: 0 for none. sampled: whether it is recorded."""

    trace: int
    span: int
    parent: int = 0
    sampled: bool = True

    @classmethod
    def of(cls, traceparent: str | None) -> Trace:
        """A new span in the trace that a W3C `traceparent` names, or in a new one."""
        span, found = secrets.randbits(64) | 1, TRACEPARENT.fullmatch(traceparent or "")
        trace, parent, flags = (int(part, 16) for part in found.groups()) if found else (0, 0, 1)
        if not (trace and parent):
            return cls(secrets.randbits(128) | 1, span)
        return cls(trace, span, parent, bool(flags & 1))

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-{self.sampled:02x}"


class Traces:
    """Traces of all requests, except those for health and metrics. processor: takes the spans."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource

        self._processor = processor
        self._resource = Resource.create({"service.name": "octavo", "service.version": __version__})
        self._begun: dict[int, Trace] = {}  # of requests in flight, by their exchanges

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Reads `traceparent` of each request, and sends its own with the response, and on to who
        answers where this is a gateway."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            trace = Trace.of(Headers(scope=scope).get("traceparent"))
            self._begun[id(exchange(scope))] = trace
            MutableHeaders(scope=scope)["traceparent"] = trace.traceparent

            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)["traceparent"] = trace.traceparent
                await send(message)

            await app(scope, receive, sent)

        return traced

    def observe(self, one: Exchange) -> None:
        trace = self._begun.pop(id(one), None) or Trace.of(None)
        if trace.sampled and one.route not in QUIET:
            for span in self._spans(one, trace):
                self._processor.on_end(span)

    def _spans(self, one: Exchange, trace: Trace) -> list[ReadableSpan]:
        """The request's span, and one for each phase."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        epoch = time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return epoch + int(moment * NANO)

        own = _context(trace.trace, trace.span)
        failed = Status(StatusCode.ERROR if one.status >= 500 else StatusCode.UNSET)
        name = f"{one.operation} {one.model}" if one.usage else f"{one.method} {one.route}"
        spans = [
            ReadableSpan(
                name, own, _context(trace.trace, trace.parent) if trace.parent else None,
                self._resource, _attributes(one), kind=SpanKind.SERVER, status=failed,
                start_time=at(one.began), end_time=at(one.ended),
            )
        ]  # fmt: skip
        for phase, (began, ended) in moments(one).items() if one.usage else ():
            spans.append(
                ReadableSpan(
                    phase, _context(trace.trace, secrets.randbits(64) | 1), own, self._resource,
                    events=_events(one, began, ended, epoch), start_time=at(began),
                    end_time=at(ended),
                )
            )  # fmt: skip
        return spans

    def close(self) -> None:
        self._processor.shutdown()


def _context(trace: int, span: int) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(1))


def _events(one: Exchange, began: float, ended: float, epoch: int) -> list[Event]:
    """What happened in a phase: parts of prompts, and preemptions."""
    from opentelemetry.sdk.trace import Event

    marks = [m for m in one.usage.marks if began < m.at <= ended] if one.usage else []
    return [
        Event("part" if m.tokens else "preempted", {"tokens": m.tokens}, epoch + int(m.at * NANO))
        for m in marks
    ]


def _attributes(one: Exchange) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "http.request.method": one.method, "http.route": one.route,
        "http.response.status_code": one.status, "octavo.request.id": one.id,
    }  # fmt: skip
    if one.code is not None:
        found["error.type"] = one.code
    if (usage := one.usage) is not None:
        found |= {
            "gen_ai.operation.name": one.operation, "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": one.model or "", "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.output_tokens": usage.completion,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
            "gen_ai.response.finish_reasons": tuple(usage.finishes),
        }  # fmt: skip
    return found


def open_traces(url: str) -> Traces:
    """Traces that are sent to an OTLP collector, over HTTP. Raises UsageError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UsageError("--otlp needs OpenTelemetry", 'pip install "octavo[otel]"') from None
    if not re.match(r"https?://[^/\s]+", url):
        raise UsageError(f"--otlp {url!r} is no address", "--otlp http://127.0.0.1:4318")
    path = "" if url.rstrip("/").endswith("/v1/traces") else "/v1/traces"
    return Traces(BatchSpanProcessor(OTLPSpanExporter(url.rstrip("/") + path, timeout=5)))
