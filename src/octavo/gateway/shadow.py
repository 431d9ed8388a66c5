"""Shows the canary what the old version of a model answers, and measures how far they are apart."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.gateway.admission import UpstreamQueue
from octavo.gateway.body import RESUMABLE, Relayed
from octavo.gateway.errors import UpstreamFailed
from octavo.gateway.headers import with_key
from octavo.gateway.token_limits import most_tokens
from octavo.gateway.transport import Transport
from octavo.release.controller import Assigned, Releases
from octavo.release.divergence import token_kl
from octavo.server.parsing import NOT_JSON
from octavo.server.sender import SENDER

LOG = logging.getLogger("octavo.gateway")
COMPLETIONS = "/v1/completions"
SHADOW_TOKENS = 64  # of an answer
TOP = 20  # tokens whose log-probabilities are compared
MOST_AT_ONCE = 2  # answers; others are left out meanwhile
SECONDS = 60.0  # for each request
OWN_CHOICE = (  # fields of a request that say which answers it wants, not what they answer
    "stream", "stream_options", "n", "best_of", "echo", "use_beam_search", "beam_width", "resume",
    "logprobs", "top_logprobs", "prompt_logprobs", "max_completion_tokens", "min_tokens",
    "ignore_eos", "priority", "timeout",
)  # fmt: skip


class _Chance(msgspec.Struct, frozen=True):
    logprob: float


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] = []
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, _Chance] | None] = []


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class Shadow:
    """Asks the old version again, greedily, and both for what they think of each token of that
    answer; what users get is not touched. Only upstreams with a free place are asked."""

    def __init__(self, releases: Releases, admission: UpstreamQueue, transport: Transport) -> None:
        self._releases, self._admission, self._transport = releases, admission, transport
        self._running: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()  # releases whose versions could not be compared

    def answered(self, asked: Relayed, model: str, assigned: Assigned) -> None:
        """The old version has answered a request, which a part is compared of."""
        full = len(self._running) >= MOST_AT_ONCE
        if full or random.random() >= assigned.shadow or (body := greedy(asked)) is None:
            return
        task = asyncio.create_task(self._compare(asked, body, model, assigned))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _compare(
        self, asked: Relayed, body: dict[str, Any], model: str, assigned: Assigned
    ) -> None:
        try:
            said = await self._ask(asked, assigned.stable, asked.path, body)
            prompt = said.prompt_token_ids or said.choices[0].prompt_token_ids
            answer = said.choices[0].token_ids
            if not prompt or not answer:
                raise UpstreamFailed("the old version tells no ids of tokens")
            both = {"model": body["model"], "prompt": [*prompt, *answer], "max_tokens": 1,
                    "temperature": 0, "prompt_logprobs": TOP}  # fmt: skip
            old, new = await asyncio.gather(
                *(
                    self._ask(asked, p, COMPLETIONS, both)
                    for p in (assigned.stable, assigned.canary)
                )
            )
            kl = mean_kl(old.choices[0], new.choices[0], len(answer))
        except (RequestError, *NOT_JSON, LookupError, ValueError, TimeoutError) as e:
            if assigned.release not in self._told:
                self._told.add(assigned.release)
                why = str(e) if isinstance(e, RequestError) else type(e).__name__
                LOG.warning("versions of %s cannot be compared: %s", model, why)
            return
        if kl is not None:
            with suppress(RequestError):  # the release has ended meanwhile
                self._releases.shadow(model, [kl], assigned.release)

    async def _ask(self, asked: Relayed, pool: str, path: str, body: Mapping[str, Any]) -> _Answer:
        """What an upstream of a pool answers. Raises UpstreamFailed, TimeoutError, NOT_JSON."""
        lease = self._admission.spare(asked, (pool,), ())
        if lease is None:
            raise UpstreamFailed(f"no upstream of {pool} is free", "overloaded")
        up = lease.upstream
        last = {"priority": 1} if up.own else {}  # after what users want
        headers = with_key({"content-type": "application/json", SENDER: asked.salt}, up)
        try:
            async with asyncio.timeout(SECONDS):
                data = msgspec.json.encode({**body, **last})
                answer = await self._transport.open(up, path, headers, data, SECONDS)
                try:
                    whole = await answer.whole()
                finally:
                    answer.close()
        finally:
            lease.end()
        if answer.status != 200:
            raise UpstreamFailed(f"upstream {up.id} answers {answer.status}")
        return msgspec.json.decode(whole, type=_Answer, strict=False)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


def greedy(asked: Relayed) -> dict[str, Any] | None:
    """A request for the most likely answer to the same; None for what is not compared: several
    prompts, images, other routes."""
    if asked.path not in RESUMABLE:
        return None
    body: dict[str, Any] = msgspec.json.decode(asked.body)
    if asked.path == COMPLETIONS:
        single = isinstance(body.get("prompt"), str)
    else:
        contents = [message.get("content") for message in body.get("messages", ())]
        parts = [part for c in contents if isinstance(c, list) for part in c]
        single = all(isinstance(part, str) or part.get("type") == "text" for part in parts)
    if not single:
        return None
    most = min(SHADOW_TOKENS, most_tokens(asked) or SHADOW_TOKENS)
    kept = {name: value for name, value in body.items() if name not in OWN_CHOICE}
    return kept | {
        "model": asked.outline.model, "temperature": 0, "max_tokens": most,
        "return_token_ids": True,
    }  # fmt: skip


def mean_kl(old: _Choice, new: _Choice, tokens: int) -> float | None:
    """Nats a token that two versions are apart over the last tokens of a prompt; None if they do
    not tell."""
    pairs = list(zip(old.prompt_logprobs, new.prompt_logprobs, strict=True))[-tokens:]
    found = [token_kl(_chances(a), _chances(b)) for a, b in pairs if a and b]
    return sum(found) / len(found) if found else None


def _chances(given: Mapping[int, _Chance]) -> dict[int, float]:
    return {token: chance.logprob for token, chance in given.items()}
