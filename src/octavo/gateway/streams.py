"""Streams of upstreams, as far as the gateway looks into them."""

from __future__ import annotations

from octavo.gateway.transport import Answer

STREAMS = ("text/event-stream", "application/x-ndjson")


def whole_events(data: bytes, media_type: str) -> tuple[bytes, bytes]:
    """Whole events of a stream, and the beginning of the next."""
    end = b"\n" if media_type == STREAMS[1] else b"\n\n"
    if data.endswith(end):
        return data, b""
    size = data.rfind(end) + len(end) if end in data else 0
    if not size and b"\r\n\r\n" in data:
        size = data.rfind(b"\r\n\r\n") + 4
    return data[:size], data[size:]


def check_stream(answer: Answer, data: bytes) -> None:
    """Raises UpstreamFailed for a stream that does not begin as one."""
    if not data:
        answer.cut("ended before it began")
    elif answer.media_type == STREAMS[0] and data[:1] not in b"deri:\n\r":
        answer.cut("sends no event stream")
    elif answer.media_type == STREAMS[1] and data[:1] != b"{":
        answer.cut("sends no lines of JSON")
    answer.check()
