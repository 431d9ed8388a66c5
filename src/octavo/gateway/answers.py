"""What answers say: whether they are sound and whole, what they took, and how a broken one ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.balance.retry import RETRYABLE
from octavo.errors import RequestError
from octavo.gateway.body import RESUMABLE
from octavo.gateway.errors import UpstreamFailed
from octavo.gateway.headers import KEYS
from octavo.gateway.job import RelayJob
from octavo.gateway.transport import Answer
from octavo.gateway.upstreams import UpstreamLease
from octavo.server.parsing import NOT_JSON
from octavo.server.resume import Spent

STREAMS = ("text/event-stream", "application/x-ndjson")
DONE = b"[DONE]"  # data of its own: texts may say so, too
LINES = 16  # the last of a stream, which say what it took: of some five events
BESIDE = (b":", b"event:", b"id:", b"retry:")  # lines of an event that are no data
# types of events by which streams end that need no DONE
LAST = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")
FAILED = ("error", "response.failed")  # types of events
LONGEST = 86_400.0  # seconds that an upstream may want to be left alone, for clients to hear of it
REST, MOST_REST = 1.0, 30.0  # seconds of an upstream that says that it is busy, and at most
LATE = b'"deadline_exceeded"'  # in an error: its client had given it so long
ELSEWHERE = ("engine_error", "engine_failed", "engine_closed", "internal_error", "shutting_down")


def end_of_event(media_type: str) -> bytes:
    """What each event of a stream ends in."""
    return b"\n" if media_type == STREAMS[1] else b"\n\n"


def start_of_data(media_type: str) -> bytes:
    """What there is once for each event that says something, but for one at the very beginning."""
    return b"\n" if media_type == STREAMS[1] else b"\ndata:"


def events(data: bytes, end: bytes) -> tuple[bytes, bytes]:
    """Whole events of a stream, and the beginning of the next. end: of an event."""
    size = data.rfind(end) + len(end) if end in data else 0
    if not size and b"\r\n\r\n" in data:
        size = data.rfind(b"\r\n\r\n") + 4
    return data[:size], data[size:]


def check_stream(answer: Answer, data: bytes, own: bool) -> None:
    """Raises UpstreamFailed for a stream that does not begin as one. own: an Octavo's."""
    if not data:
        answer.cut("ended before it began")
    elif answer.media_type == STREAMS[0] and data[:1] not in b"deri:\n\r":
        answer.cut("sends no event stream")
    elif answer.media_type == STREAMS[1] and data[:1] != b"{":
        answer.cut("sends no lines of JSON")
    elif _begins_failed(data, own):
        answer.cut("fails before it says anything")
    answer.check()


def refusal(job: RelayJob, lease: UpstreamLease, response: Response) -> UpstreamFailed:
    """What an answer that may be tried elsewhere says of an upstream: 5xx that it fails, 503 and
    429 that it is busy, the latter maybe with what its client's own key has sent alone."""
    text = f"upstream {lease.upstream.id} answers {response.status_code}"
    busy = response.status_code not in (500, 502)
    limited = busy and response.status_code != 504
    error = UpstreamFailed(text, "overloaded" if limited else "upstream_failed", busy)
    wish = wanted_wait(response)
    error.retry_after = wish if wish is not None and 0 <= wish <= LONGEST else None
    its_own = lease.upstream.place.key is None and any(k in job.headers for k in KEYS)
    if response.status_code == 503 or (response.status_code == 429 and not its_own):
        error.rest = min(REST if error.retry_after is None else error.retry_after, MOST_REST)
    return error


def wanted_wait(response: Response) -> float | None:
    """Seconds after which an upstream wants to be asked again."""
    with suppress(ValueError, KeyError):
        return float(response.headers["retry-after"])
    return None


class _Usage(msgspec.Struct, frozen=True):
    """Anthropic's messages and OpenAI's responses have other names for the same."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def spent(self) -> Spent:
        prompt = self.prompt_tokens or self.input_tokens
        return Spent(prompt, self.completion_tokens or self.output_tokens, self.cached_tokens)


class _Whole(msgspec.Struct, frozen=True):
    """llama.cpp's and Ollama's own answers have no usage, but numbers beside their texts."""

    usage: _Usage | None = None
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    prompt_eval_count: int = 0
    eval_count: int = 0

    @property
    def spent(self) -> Spent:
        if self.usage is not None:
            return self.usage.spent
        prompt = self.tokens_evaluated or self.prompt_eval_count
        return Spent(prompt, self.tokens_predicted or self.eval_count)


class _Last(_Whole, frozen=True):
    """One of the last events of a stream. response: has its numbers within; Ollama's is text.
    done, stop: of Ollama's and llama.cpp's very last."""

    type: Any = None
    done: Any = None
    stop: Any = None
    response: _Whole | str | None = None

    @property
    def ends(self) -> bool:
        """Whether a stream that needs no DONE ends with it."""
        return self.type in LAST or self.done is True or self.stop is True

    @property
    def numbers(self) -> Spent:
        return self.response.spent if isinstance(self.response, _Whole) else self.spent


def read_spent(body: bytes, who: str) -> Spent:
    """The tokens that an answer says it took. Raises UpstreamFailed for what is no JSON."""
    try:
        return msgspec.json.decode(body, type=_Whole).spent
    except msgspec.ValidationError:
        return Spent()  # of another dialect
    except NOT_JSON:
        raise UpstreamFailed(f"upstream {who} answers with broken JSON") from None


class _Error(msgspec.Struct):
    code: str | None = None


class _Failure(msgspec.Struct):
    error: _Error


class _Told(msgspec.Struct):
    """An event of any dialect."""

    type: Any = None
    error: dict[str, Any] | str | None = None


def failure_in(data: bytes) -> bytes:
    """The line of a stream's events that is an error, as other servers send it before the end that
    a good stream has, b"" if none is. Texts may have the word, too."""
    for line in data.splitlines():
        if b'"error"' in line:
            with suppress(*NOT_JSON):
                told = msgspec.json.decode(line.removeprefix(b"data:"), type=_Told)
                if told.error or told.type in FAILED:
                    return line
    return b""


def _begins_failed(data: bytes, own: bool) -> bool:
    """Whether the first event of a stream is an error that another upstream might not give: not one
    of the request, which others number as HTTP does, or call invalid."""
    line = next((one for one in data.splitlines() if one and not one.startswith(BESIDE)), b"")
    if not failure_in(line):
        return False
    if own:
        return not is_final(line)
    error = msgspec.json.decode(line.removeprefix(b"data:"), type=_Told).error
    said = error if isinstance(error, dict) else {}
    code = said.get("code")
    if isinstance(code, int):
        return code in RETRYABLE or not 400 <= code < 500
    return not str(said.get("type")).startswith("invalid")


def is_final(rest: bytes) -> bool:
    """Whether the end of a stream is an error that another upstream would give, too."""
    data = rest.partition(b"data: ")[2].partition(b"\n")[0]
    try:
        return msgspec.json.decode(data, type=_Failure).error.code not in ELSEWHERE
    except NOT_JSON:
        return False


def _last_data(part: bytes) -> list[bytes]:
    """The data of the last events of a part of a stream, the latest first."""
    lines = [line.strip() for line in reversed(part.rsplit(b"\n", LINES)[-LINES:])]
    return [
        line.removeprefix(b"data:").lstrip()
        for line in lines
        if line and not line.startswith(BESIDE)
    ]


def streamed(job: RelayJob) -> Spent | None:
    """The tokens of a stream that has ended, as it says or about; None if its end is missing. An
    error is one."""
    path, last = job.asked.path, _last_data(b"".join(job.ends))
    done, told = DONE in last, [event for data in last if (event := _told(data))]
    if path not in RESUMABLE:
        done = done or any(event.ends for event in told)
    if not (done or job.erred):
        return None
    numbers = [event.numbers for event in told]
    found = next((spent for spent in numbers if spent.completion_tokens), Spent())
    return Spent(
        found.prompt_tokens or job.asked.ask.tokens,
        found.completion_tokens or job.chunks - (DONE in last),
        found.cached_tokens,
    )


def _told(data: bytes) -> _Last | None:
    """An event, if it is of any dialect that is known."""
    with suppress(*NOT_JSON):
        return msgspec.json.decode(data, type=_Last)
    return None


def complete(job: RelayJob) -> bool:
    """Whether the end of a stream has been passed on: what fails after it is no fault."""
    spent = streamed(job) if job.follower is None else job.follower.spent
    return spent is not None


def failure(path: str, error: RequestError) -> bytes:
    """The end of a stream that cannot go on. path: of its route."""
    said = {"message": str(error), "type": "upstream_error", "param": None, "code": error.code}
    body = msgspec.json.encode({"type": "error", "error": said})
    if path.startswith("/api/"):
        return msgspec.json.encode({"error": str(error)}) + b"\n"
    event = b"event: error\n" if path == "/v1/messages" else b""
    return event + b"data: " + body + b"\n\n"
