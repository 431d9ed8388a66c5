"""Passes requests on to upstreams and their answers back; goes to another where one fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.balance.hedge import Hedges
from octavo.balance.retry import RETRYABLE, Backoff, RetryBudget
from octavo.errors import DeadlineExceeded, RequestError
from octavo.gateway.admission import UpstreamQueue
from octavo.gateway.answers import STREAMS, check_stream, failure, read_spent, refusal, wanted_wait
from octavo.gateway.body import RESPONSES, Relayed, read_outline
from octavo.gateway.deadline import Deadline
from octavo.gateway.errors import NoUpstream, RolledBack, UpstreamFailed
from octavo.gateway.events import Finished
from octavo.gateway.headers import back, headers_of, onward, with_key
from octavo.gateway.health import Health
from octavo.gateway.hedge import Begun, Try, begin, first_good, good
from octavo.gateway.job import RelayJob, count, reserve
from octavo.gateway.passage import Passage
from octavo.gateway.response_cache import ResponseCache, followed, key_of
from octavo.gateway.traffic import SESSION, Traffic, units_of
from octavo.gateway.transport import Answer, Transport
from octavo.gateway.upstream import Upstream
from octavo.gateway.upstreams import UpstreamLease
from octavo.generate.reply import Usage
from octavo.server.background import to_its_end
from octavo.server.bodies import Bodies
from octavo.server.exchange import Exchange, exchange
from octavo.server.guard import principal
from octavo.server.http import EventStream, started, while_connected
from octavo.server.parsing import NOT_JSON
from octavo.server.resume import Follower
from octavo.server.sender import computed_for

Keeper = Callable[[str], Awaitable[Upstream]]  # of a response, by its id
JSON = "application/json"


class Relay:
    """traffic: which pool a request goes to. watch: is told of every
    request that has ended. guarded: keys are the gateway's own, and no business of upstreams."""

    def __init__(
        self, admission: UpstreamQueue, transport: Transport, health: Health, traffic: Traffic,
        watch: Callable[[Finished], None], guarded: bool,
    ) -> None:  # fmt: skip
        self.traffic = traffic
        self._admission, self._transport, self._health = admission, transport, health
        self._watch = watch
        self.guarded = guarded
        self._bodies = Bodies()
        self._backoff = Backoff()
        self.hedges, self.cache = Hedges(), ResponseCache()
        self._budget = RetryBudget(time.monotonic)

    async def answer(self, request: Request, path: str, keeper: Keeper | None = None) -> Response:
        """The answer of an upstream. path: the route's. keeper: finds who has what the request
        follows. Raises RequestError, ClientGone."""
        async with self._bodies.whole(request) as body:
            outline = read_outline(body)
        one, sender, who = exchange(request.scope), principal(request.scope), computed_for(request)
        model = outline.model or outline.name or self._admission.only_model
        outline.model = model
        sender.check_model(model)
        given = headers_of(request.scope)
        units = units_of(given, outline, sender, one)
        dealt = self.traffic.deal(model, units, outline.tokens)
        if dealt.chosen is not None:
            body = dealt.body(body, path)
            outline = read_outline(body)
            outline.model = dealt.model
        at = None
        if keeper is not None and (previous := outline.previous) is not None:
            at = await keeper(previous)
        if at is not None:
            dealt = dealt.kept_in(at.place.pool)
        query = request.scope["query_string"].decode()
        target = f"{path}?{query}" if query else path
        session = given.get(SESSION, "")
        name = "" if at is None else at.id
        asked = Relayed(path, target, body, outline, who.salt, session, name, who.tenant)
        passed_on = onward(given, one.id, self.guarded, who.salt)
        job = RelayJob(asked, passed_on, dealt, Usage(began=one.began), asked.resume())
        one.usage, one.operation = job.usage, asked.operation
        one.at_end.append(job.settle)
        await reserve(request.scope, job)
        key = key_of(job, self.cache.generation) if self.cache.limit else None
        if key is not None:
            coming, ended = self.cache.coming(key), True
            if coming is not None:
                ended = await while_connected(request.receive, followed(coming, job.due))
            if (kept := self.cache.take(key)) is not None:
                one.model = outline.model
                return kept.response()
            if coming is None:  # else it is not kept, and the others do not wait for one another
                one.at_end.append(self.cache.begin(key))
            elif not ended:
                key = None
        one.at_end.append(lambda: self._ended(job, one))
        self._budget.request()
        response = await self._run(job, request, key)
        pool = "" if job.lease is None else job.lease.upstream.place.pool
        if told := dealt.headers(pool):
            response.headers.update(told)
        return response

    async def _run(self, job: RelayJob, request: Request, key: bytes | None) -> Response:
        one = exchange(request.scope)
        try:
            answer = await while_connected(request.receive, self._first(job))
        except (UpstreamFailed, NoUpstream, DeadlineExceeded) as e:
            if (spare := job.spare(e.status)) is None:
                raise
            return spare
        lease = job.lease
        assert lease is not None
        one.model = lease.upstream.called(job.asked.outline.model or "")
        if isinstance(answer, Response):
            if (spare := job.spare(answer.status_code)) is not None:
                return spare
            if key is not None:
                self.cache.keep(key, answer)
            return answer
        direct = key is None and job.asked.path != RESPONSES  # else others read it, too
        frames, kind = self._frames(job, answer, one, direct), answer[0].headers["content-type"]
        if key is not None:
            frames = self.cache.stream(key, frames, kind, job)
        return EventStream(await started(frames), kind, {"x-replica": lease.upstream.id})

    # -- until something has come -----------------------------------------------------------------

    async def _first(self, job: RelayJob) -> Begun:
        """A whole answer, or one that streams and its first bytes. Raises RequestError."""
        usage = job.usage
        while True:
            usage.submitted = usage.submitted or time.monotonic()
            lease = await self._admission.place(job.asked, job.dealt.pools, job.failed, job.due)
            job.lease = lease
            usage.admitted = usage.first or time.monotonic()  # it has waited so long for a place
            refused, wish = None, None
            try:
                found = await self._begun(job, lease)
                if not isinstance(found, Response) or found.status_code not in RETRYABLE:
                    return found
                refused, wish, error = found, wanted_wait(found), refusal(job, lease, found)
            except UpstreamFailed as e:
                error = e
            except BaseException:
                lease.end()
                raise
            if await self._again(job, lease, error, wish):
                continue
            if refused is not None and refused.headers.get("content-type", "").startswith(JSON):
                return refused
            try:
                raise error
            finally:
                del error  # it holds this frame

    async def _begun(self, job: RelayJob, lease: UpstreamLease) -> Begun:
        """What an upstream answers, or another, if the first says nothing for a while."""
        model, stream = lease.upstream.called(job.asked.outline.model or ""), job.asked.stream
        began = time.monotonic()
        seconds = None if job.follower is not None else self.hedges.seconds(model, stream)
        if seconds is None:
            found = await self._limited(job, lease)
        else:
            found = await self._hedged(job, lease, seconds)
        if good(found):
            self.hedges.seen(model, stream, time.monotonic() - began)
        return found

    async def _hedged(self, job: RelayJob, lease: UpstreamLease, seconds: float) -> Begun:
        first = begin(self._limited(job, lease), lease)
        tries = [first]
        try:
            await asyncio.wait({first.task}, timeout=seconds)
            if not first.task.done() and (other := self._spare(job, lease)) is not None:
                job.hedges += 1
                beside = replace(job, lease=other)
                tries.append(begin(self._limited(beside, other), other))
                if await first_good(tries) is tries[1]:
                    tries.reverse()
                    job.lease, job.follower, job.hedge_won = other, beside.follower, True
            return await tries[0].task
        except asyncio.CancelledError:
            tries.append(first)
            raise
        finally:
            if tries[1:]:
                try:
                    await to_its_end(self._leave(job, tries[1:]))
                except asyncio.CancelledError:
                    await to_its_end(self._leave(job, tries[:1]))  # nobody hears of it
                    raise

    async def _leave(self, job: RelayJob, tries: list[Try]) -> None:
        """Ends what is not wanted."""
        for one in tries:
            if await one.leave() is False:
                job.failed.add(one.lease.upstream.id)
                self._health.look(one.lease.upstream)

    def _spare(self, job: RelayJob, lease: UpstreamLease) -> UpstreamLease | None:
        """Another upstream for a request, if there is one and the budget allows it."""
        if self._budget.left < 1:
            return None
        barred = {lease.upstream.id, *job.failed}
        found = self._admission.spare(job.asked, job.dealt.pools, barred)
        if found is not None:
            self._budget.retry()
        return found

    async def _limited(self, job: RelayJob, lease: UpstreamLease) -> Begun:
        """What an upstream answers in time, while it is not known to be down and its version is not
        rolled back."""
        up, timeouts = lease.upstream, self._transport.timeouts
        limit = Deadline(up, timeouts.first if job.asked.stream else timeouts.total)
        if self.traffic.rolled_back(job.dealt, up.place.pool):
            raise RolledBack(up.id)
        self.traffic.sent(job.dealt, up.place.pool, limit.cut)
        try:
            async with limit:
                found = await self._try(job, lease)
        except UpstreamFailed:
            if limit.over and self.traffic.rolled_back(job.dealt, up.place.pool):
                raise RolledBack(up.id) from None
            raise
        finally:
            self.traffic.answered(limit.cut)
        if not isinstance(found, Response):
            up.cut.add(found[0].cut)
        return found

    async def _try(self, job: RelayJob, lease: UpstreamLease) -> Begun:
        """What an upstream answers. Raises UpstreamFailed."""
        up, timeouts = lease.upstream, self._transport.timeouts
        own = up.own and job.resume is not None
        job.follow(own)
        wait = timeouts.first if job.asked.stream else timeouts.total
        headers = with_key(job.headers, up) | job.told(up)
        answer = await self._transport.open(up, job.asked.target, headers, job.body, wait)
        try:
            if answer.status == 200 and answer.media_type in STREAMS:
                data = await answer.read()
                check_stream(answer, data, up.own)
                answer.limit_pauses(timeouts.idle if own else timeouts.foreign)
                lease.first()
                return answer, data
            return self._whole(job, lease, answer, await answer.whole())
        except BaseException:
            answer.close()
            raise

    def _whole(self, job: RelayJob, lease: UpstreamLease, answer: Answer, body: bytes) -> Response:
        """An answer that has come as a whole."""
        answer.close()
        if answer.status == 200:
            if answer.media_type != JSON:
                raise UpstreamFailed(f"upstream {lease.upstream.id} answers with no JSON")
            count(job.usage, read_spent(body, lease.upstream.id))
            if job.dealt.seen is not None:
                job.dealt.seen.whole(body)
            lease.end(True)
        elif answer.status not in RETRYABLE:
            lease.end(None if answer.status < 500 else False)
        headers = back(answer.headers, lease.upstream)
        return Response(body, answer.status, headers, answer.headers.get("content-type"))

    async def _again(
        self, job: RelayJob, lease: UpstreamLease, error: UpstreamFailed, wish: float | None
    ) -> bool:
        """Whether to try again after a failure, once it is time to.

        An upstream that is gone, or has refused, can be left without more load on others than there
        was; what is busy may not be asked much more often than it is anyhow.
        """
        if isinstance(error, RolledBack):
            lease.end()
            job.dealt = msgspec.structs.replace(job.dealt, rolled_back=True)
            return True
        refused = error.code == "overloaded"
        lease.end(None if refused else False, rest=error.rest)
        self._health.look(lease.upstream)
        job.failed.add(lease.upstream.id)
        job.tries += 1
        others = any(
            u.id not in job.failed for u in self._admission.candidates(job.asked, job.dealt.pools)
        )
        delay = self._backoff.delay(job.tries, random.random(), None if others else wish)
        charged = error.busy and not (refused and others)
        if delay is None or (charged and not self._budget.retry()):
            return False
        delay = 0.0 if others else delay
        if job.due is not None and time.monotonic() + delay >= job.due:
            return False
        job.retries += 1
        await asyncio.sleep(delay)
        return True

    # -- streams ----------------------------------------------------------------------------------

    async def _frames(
        self, job: RelayJob, first: tuple[Answer, bytes], one: Exchange, direct: bool
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream, whoever gives them. direct: but for those that were written."""
        answer, data = first
        while True:
            lease = job.lease
            assert lease is not None
            try:
                if not job.failovers:
                    yield b""
                passage = Passage(job, answer, one, direct)
                while data:
                    ready = passage.feed(data)
                    if passage.whole:
                        one.final = True
                        break
                    if ready:
                        yield ready
                    ready, data = b"", await passage.read()
                rest = ready + passage.end()
                lease.end(None if job.late else not job.erred, job.tokens)
                if job.erred and not job.late:
                    one.failed(UpstreamFailed(f"upstream {lease.upstream.id} says that it failed"))
                    self._health.look(lease.upstream)
                if rest:
                    yield rest
                return
            except (UpstreamFailed, *NOT_JSON) as e:
                error = e if isinstance(e, UpstreamFailed) else UpstreamFailed(
                    f"upstream {lease.upstream.id} sends what no server says"
                )  # fmt: skip
                error.__traceback__ = None  # it would hold this frame, which holds the error
            except BaseException:
                lease.end()
                raise
            finally:
                lease.upstream.cut.discard(answer.cut)
                answer.close()
            if job.follower is None:
                lease.end(False)
                self._health.look(lease.upstream)
                one.failed(error)
                one.final = True
                yield failure(job.asked.path, error)
                return
            try:
                answer, data = await self._elsewhere(job, lease, error)
            except RequestError as last:
                one.failed(last)
                one.final = True
                yield failure(job.asked.path, last)
                return

    async def _elsewhere(
        self, job: RelayJob, lease: UpstreamLease, error: UpstreamFailed
    ) -> tuple[Answer, bytes]:
        """The rest of a stream that broke off, of another upstream. Raises RequestError."""
        assert job.follower is not None
        job.follower = Follower(job.follower.tokens)
        if job.tokens:  # of weights that only its pool is known to have
            job.dealt = msgspec.structs.replace(job.dealt, only=lease.upstream.place.pool)
            job.asked = msgspec.structs.replace(job.asked, begun=True)
        if not await self._again(job, lease, error, None):
            try:
                raise error
            finally:
                del error  # it holds this frame
        job.failovers += 1
        found = await self._first(job)
        if isinstance(found, Response):
            raise UpstreamFailed(f"{error}; another answers {found.status_code}")
        return found

    def _ended(self, job: RelayJob, one: Exchange) -> None:
        """Tells of a request that has ended."""
        told = job.finished(one)
        if told.replica and told.status < 500:
            self._admission.answered()
        self._watch(told)
        if job.dealt.seen is None:
            return  # nobody compares versions
        batch = 0 if job.lease is None else job.lease.upstream.running
        down = not self._admission.candidates(job.asked, job.dealt.pools[:1])
        cached = sum(job.usage.reused.values())
        self.traffic.ended(job.dealt, job.asked, told, cached, batch, down)
