"""What of an answer that streams is passed on to its client, and whether its end is one."""

from __future__ import annotations

from octavo.gateway.answers import (
    LATE,
    complete,
    end_of_event,
    events,
    failure_in,
    is_final,
    start_of_data,
    streamed,
)
from octavo.gateway.errors import UpstreamFailed
from octavo.gateway.job import RelayJob, count
from octavo.gateway.transport import Answer
from octavo.server.exchange import Exchange


class Passage:
    """One upstream's part of a stream: of what can go on elsewhere up to the last token that is
    known, of others whole events. direct: nobody but its client reads what is passed on."""

    def __init__(self, job: RelayJob, answer: Answer, one: Exchange, direct: bool) -> None:
        self._job, self._answer, self._one = job, answer, one
        self._usage, self._follower, self._seen = job.usage, job.follower, job.dealt.seen
        self._end, self._held = end_of_event(answer.media_type), b""
        self._data = start_of_data(answer.media_type)
        self._direct = one.direct if direct else None

    def feed(self, data: bytes) -> bytes:
        """What can be passed on once this has come, maybe nothing. Raises NOT_JSON."""
        job, usage = self._job, self._usage
        usage.last = self._answer.connection.heard
        if usage.first is None:
            usage.first = usage.last
        if (follower := self._follower) is not None:
            before = len(follower.tokens)
            ready = follower.feed(data)
            if len(follower.tokens) > before:
                job.tries = 0
        else:
            if self._held or not data.endswith(self._end):
                data, self._held = events(self._held + data, self._end)
            ready = data
            self._note(ready)
            if b'"error"' in ready:
                self._look_for_failure(ready)
        if ready and self._seen is not None:
            self._seen.feed(ready)
        return ready

    def _note(self, ready: bytes) -> None:
        """Counts events with data, and keeps the last of them; comments are none."""
        if found := ready.count(self._data) + ready.startswith(b"data:"):
            job = self._job
            job.chunks += found
            job.ends = job.ends[1], ready

    def _look_for_failure(self, data: bytes) -> None:
        job = self._job
        if told := failure_in(data):
            assert job.lease is not None
            job.erred, job.late = True, job.lease.upstream.own and LATE in told

    async def read(self) -> bytes:
        """More of the answer, b"" at its end. Raises UpstreamFailed."""
        try:
            return await self._answer.read(None if self._direct is None else self._pass_on)
        except UpstreamFailed:
            if not complete(self._job):
                raise
            return b""  # what fails after the end is no fault

    def _pass_on(self) -> bool:
        """Writes what has come, in the midst of a stream, without waking the task that reads it:
        whether it did. Raises NOT_JSON."""
        one, direct = self._one, self._direct
        if direct is None or one.streamed is None or not direct.open():
            return False
        if ready := self.feed(self._answer.connection.take()):
            one.sent += len(ready)
            direct.write(ready)
        return True

    @property
    def whole(self) -> bool:
        """All has come, its end with it."""
        return self._answer.over and complete(self._job)

    def end(self) -> bytes:
        """What is passed on at the end. Raises UpstreamFailed if that is missing. A stream that
        says itself that it failed has failed, and needs no other end."""
        job, held = self._job, self._held
        if (follower := job.follower) is not None:
            spent = follower.spent
            if spent is None and is_final(follower.rest):
                return follower.rest
        else:
            self._look_for_failure(held)
            if held:
                self._note(held + b"\n")  # a last event may be without the line that ends it
            spent = streamed(job)
        if spent is None:
            assert job.lease is not None
            raise UpstreamFailed(f"upstream {job.lease.upstream.id} ended in the middle")
        if follower is None:
            job.chunks = spent.completion_tokens
        count(job.usage, spent)
        return held
