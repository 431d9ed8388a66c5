"""What the front and an engine process say to each other: length-prefixed msgpack frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from octavo.checkpoint.identity import FileState
from octavo.engine.block_changes import CachedPrompt
from octavo.engine.constraint import TokenTable
from octavo.engine.events import TokenEvent
from octavo.engine.plan import Plan
from octavo.engine.profile import Profile
from octavo.engine.request import Request

MAX_FRAME = 64 << 20
EVENT_BYTES = 1 << 20  # of events in a frame: the front reads one in some milliseconds
RECEIVE = 1 << 20  # bytes read at a time
HEADER = 4


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load this model with exactly these sizes."""

    path: str
    plan: Plan
    files: dict[str, FileState] = {}  # of the model, as they were when the plan was made
    mmproj: str = "none"  # the file with its image encoder


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The tokens of the model that is being loaded: with them the engine is ready."""

    table: TokenTable


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


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Profile the engine until TakeProfile."""


class TakeProfile(msgspec.Struct, frozen=True, tag=True):
    """Answered by Profiled, each in its turn."""


class Profiled(msgspec.Struct, frozen=True, tag=True):
    profile: Profile


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


class Events(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Everything one step produced, and the engine's counts after it. stored, removed: blocks of
    the prefix cache that came and went; prompts: those that they are of."""

    events: list[TokenEvent]
    stats: dict[str, int]
    stored: list[int] = []
    removed: list[int] = []
    prompts: list[CachedPrompt] = []


class Working(msgspec.Struct, frozen=True, tag=True):
    """Sent every second while there is work: a step is getting on if it has begun more
    operations since."""

    operations: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start."""

    kind: str
    message: str
    suggestions: list[str]


ToEngine = (
    Start | Vocabulary | Submit | Abort | LoadAdapter | UnloadAdapter | StartProfile | TakeProfile
)
ToFront = Loading | Ready | Refused | Events | Failed | Adapted | Working | Profiled

_encoder = msgspec.msgpack.Encoder()
Message = TypeVar("Message")


def frame(message: ToEngine | ToFront) -> bytes:
    """A message with its length before it. Raises ValueError, TypeError or OverflowError for one
    that cannot be sent."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body):,} bytes; {MAX_FRAME:,} at most")
    return _framed(body)


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "little") + body


class FrameBuffer(Generic[Message]):
    """Cuts a byte stream into messages, wherever its pieces end."""

    def __init__(self, messages: Any) -> None:
        """messages: ToEngine or ToFront."""
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(messages)
        self._data = bytearray()

    def push(self, data: bytes) -> None:
        """Takes what has arrived."""
        self._data += data

    def pop(self) -> Message | None:
        """The next message that has arrived as a whole. Raises ValueError for what is none."""
        if len(self._data) < HEADER:
            return None
        length = int.from_bytes(self._data[:HEADER], "little")
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length:,} bytes")
        if len(self._data) < HEADER + length:
            return None
        message = self._decoder.decode(self._data[HEADER : HEADER + length])
        del self._data[: HEADER + length]
        return message


def event_frames(made: Events) -> Iterator[bytes]:
    """What a step produced, in frames of a moderate size."""
    body = _encoder.encode(made)
    if len(body) <= EVENT_BYTES or len(made.events) <= 1:
        yield _framed(body)
        return
    half = len(made.events) // 2
    yield from event_frames(msgspec.structs.replace(made, events=made.events[:half]))
    yield from event_frames(Events(made.events[half:], made.stats))
