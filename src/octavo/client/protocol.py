"""What the front and an engine process say to each other: length-prefixed msgpack frames."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from octavo.checkpoint.identity import FileState
from octavo.engine.constraint import TokenTable
from octavo.engine.events import TokenEvent
from octavo.engine.plan import Plan
from octavo.engine.request import Request

MAX_FRAME = 64 << 20
EVENT_BYTES = 1 << 20  # of events in a frame: the front reads one in some milliseconds
HEADER = 4


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load this model with exactly these sizes."""

    path: str
    table: TokenTable
    plan: Plan
    files: dict[str, FileState] = {}  # of the model, as they were when the table was made


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """A LoRA adapter in a PEFT folder; `files` of it, as they were when it was first asked for."""

    serial: int
    name: str
    path: str
    files: dict[str, FileState]


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Has no answer: an adapter that is loaded can always be unloaded."""

    name: str


class Adapted(msgspec.Struct, frozen=True, tag=True):
    """The end of loading an adapter; `message` says why it failed."""

    serial: int
    message: str = ""
    param: str | None = None
    code: str | None = None


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Bytes packed since the last frame."""

    bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    pid: int
    isa: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that can never be served."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None


class Events(msgspec.Struct, frozen=True, tag=True):
    """Everything one step produced, and the engine's counts after it."""

    events: list[TokenEvent]
    stats: dict[str, int]


class Working(msgspec.Struct, frozen=True, tag=True):
    """Sent every second while there is work: a step is getting on if it has begun more
    operations since."""

    operations: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start."""

    kind: str
    message: str
    suggestions: list[str]


ToEngine = Start | Submit | Abort | LoadAdapter | UnloadAdapter
ToFront = Loading | Ready | Refused | Events | Failed | Adapted | Working

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToEngine | ToFront) -> bytes:
    """A message with its length before it. Raises ValueError, TypeError or OverflowError for one
    that cannot be sent."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body):,} bytes; {MAX_FRAME:,} at most")
    return len(body).to_bytes(HEADER, "little") + body


class FrameBuffer:
    """Cuts a byte stream into messages for the engine. ValueError: a frame that is too long."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> list[ToEngine]:
        self._data += data
        out: list[ToEngine] = []
        while len(self._data) >= HEADER:
            length = int.from_bytes(self._data[:HEADER], "little")
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._data) < HEADER + length:
                break
            out.append(_to_engine.decode(self._data[HEADER : HEADER + length]))
            del self._data[: HEADER + length]
        return out


async def read_frame(reader: asyncio.StreamReader) -> ToFront:
    """The next message from an engine. Raises EOFError when it is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(HEADER), "little")
        if length > MAX_FRAME:
            raise EOFError(f"a frame of {length} bytes")
        return _to_front.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError) as e:
        raise EOFError(str(e)) from None


def event_frames(events: list[TokenEvent], stats: dict[str, int]) -> Iterator[bytes]:
    """What a step produced, in frames of a moderate size."""
    body = _encoder.encode(Events(events, stats))
    if len(body) <= EVENT_BYTES or len(events) == 1:
        yield len(body).to_bytes(HEADER, "little") + body
        return
    half = len(events) // 2
    yield from event_frames(events[:half], stats)
    yield from event_frames(events[half:], stats)
