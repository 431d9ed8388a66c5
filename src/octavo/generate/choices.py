"""The choices of a request: one engine request each, their deltas merged, the best of them kept."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import msgspec

from octavo.engine.events import BeamText, Ended, Token, TokenEvent, ends
from octavo.engine.request import Request, SamplingParams
from octavo.errors import RequestError
from octavo.generate.output import OutputProcessor, failure
from octavo.generate.prepare import PreparedRequest
from octavo.generate.quality import Quality
from octavo.generate.reply import (
    Completion,
    TextDelta,
    TokenInfo,
    Usage,
    prompt_scores,
    whole_calls,
)
from octavo.text.structure import JsonSchema

LONGER = 500  # characters that the name of a prompt may have beyond one for each of its tokens


async def generate(job: PreparedRequest, usage: Usage) -> AsyncGenerator[TextDelta, None]:
    """The deltas of all choices as they come, the last of each with `finish`.

    Choice i belongs to prompt i // job.made. Closing the iterator aborts every request. Where
    `usage.covers` says no, all choices end with "length".
    Raises RequestError, whose `param` is a field of GenerationRequest.
    """
    requests = _requests(job, await _constrained(job))
    deltas = _one(job, requests[0], 0, usage) if len(requests) == 1 else _all(job, requests, usage)
    if job.echo:
        deltas = _echoed(job, deltas)
    running = set(range(len(job.prompts) * job.made))
    async with aclosing(deltas):
        async for delta in deltas:
            yield delta
            if delta.finish:
                running.discard(delta.choice)
            if usage.covers is not None and running and not usage.covers(usage.computed):
                break
        else:
            return
    for choice in sorted(running):
        usage.finishes.append("length")
        yield TextDelta(choice, "", finish="length")


async def generate_whole(job: PreparedRequest, usage: Usage) -> list[list[TextDelta]]:
    """The deltas of each choice, the best `n` of each prompt's, once all have ended.

    A choice is empty where a beam search found fewer texts than were asked for.
    """
    choices: list[list[TextDelta]] = [[] for _ in range(len(job.prompts) * job.made)]
    async with aclosing(generate(job, usage)) as deltas:
        async for delta in deltas:
            choices[delta.choice].append(delta)
    if job.made == job.n:
        return choices
    groups = (choices[i : i + job.made] for i in range(0, len(choices), job.made))
    each = zip(job.prompts, groups, strict=True)
    return [best for prompt, group in each for best in _best(job, prompt, group)]


def completions(
    job: PreparedRequest, choices: list[list[TextDelta]], usage: Usage
) -> list[Completion]:
    """The choices of `generate_whole` as finished replies, without empty ones."""
    scores = prompt_scores(job.prompts, choices)
    each = zip((job.prompts[i // job.n] for i in range(len(choices))), choices, scores, strict=True)
    return [_completion(job, *one, usage) for one in each if one[1]]


def _completion(
    job: PreparedRequest, prompt: list[int], deltas: list[TextDelta], scored: list[TokenInfo],
    usage: Usage,
) -> Completion:  # fmt: skip
    stopped = any(d.stop_token is not None for d in deltas)
    ids = [i for d in deltas for i in d.ids]
    tokens = [t for d in deltas for t in d.tokens] if job.params.logprobs is not None else None
    scores = scored if job.params.prompt_logprobs is not None else None
    return Completion(
        text="".join(d.text for d in deltas),
        tokens=ids[:-1] if stopped else ids,
        finish_reason=next((d.finish for d in deltas if d.finish), "abort"),
        prompt_tokens=len(prompt),
        cached_tokens=usage.cached,
        logprobs=None if tokens is None else [t.logprob or 0.0 for t in tokens],
        top_logprobs=None if tokens is None else [dict(t.top) for t in tokens],
        prompt_logprobs=None if scores is None else [t.logprob for t in scores],
        prompt_top_logprobs=None if scores is None else [dict(t.top) for t in scores],
        score=next((d.score for d in deltas if d.score is not None), None),
        reasoning="".join(d.reasoning for d in deltas),
        tool_calls=whole_calls(deltas),
    )


def _best(
    job: PreparedRequest, prompt: list[int], group: list[list[TextDelta]]
) -> list[list[TextDelta]]:
    """The `n` choices of a prompt with the highest log-probability per token, best first."""
    # An echoed prompt counts for none of them: it would weigh more the shorter they are.
    echoed = len(prompt) if job.echo and job.params.prompt_logprobs is not None else 0

    def rank(deltas: list[TextDelta]) -> float:
        logprobs = [t.logprob or 0.0 for d in deltas for t in d.tokens][echoed:]
        return -sum(logprobs) / max(1, len(logprobs))

    return sorted(group, key=rank)[: job.n]


async def _constrained(job: PreparedRequest) -> SamplingParams:
    """The parameters with the grammar that the constraint is made. Raises RequestError."""
    if (structure := job.structure) is None:
        return job.params
    try:
        grammar = await job.model.grammars.grammar(structure)
    except RequestError as e:  # whatever is wrong is the fault of the field that it came in
        raise e.renamed({e.param: job.constraint} if e.param else {}) from None
    return msgspec.structs.replace(job.params, grammar=grammar, grammar_exit=structure.exits)


def _requests(job: PreparedRequest, params: SamplingParams) -> list[Request]:
    """`made` requests per prompt. Choice i draws with seed + i, as if it had been asked for alone.

    A beam search gives its choices in one request.
    """
    if job.made > job.n and params.logprobs is None:  # they are ranked by them
        params = msgspec.structs.replace(params, logprobs=0)
    out = []
    images, group = list(job.images), secrets.token_hex(12)
    name = job.prompt_name if len(job.prompts) == 1 else ""
    if len(name) > LONGER + len(job.prompts[0]):
        name = ""  # names stay in memory with what they name, and must not take more
    for prompt in job.prompts:
        for i in range(1 if params.beam else job.made):
            seed = ((params.seed or 0) + i + (1 << 63)) % (1 << 64) - (1 << 63)
            out.append(
                Request(
                    id=secrets.token_hex(12),
                    prompt=prompt,
                    params=msgspec.structs.replace(params, seed=seed),
                    timeout=job.timeout,
                    priority=job.priority,
                    salt=job.salt,
                    tenant=job.tenant,
                    ttft=job.ttft,
                    progress=True,
                    adapter=job.model.adapter,
                    images=images,
                    image_offsets=list(job.image_offsets),
                    prediction=list(job.prediction),
                    group=group,
                    prompt_name=name,
                    resume=list(job.resume or ()),
                )
            )
    return out


async def _events(job: PreparedRequest, request: Request) -> AsyncGenerator[TokenEvent, None]:
    """The events of a request. Raises RequestError naming fields of GenerationRequest."""
    try:
        async with aclosing(job.model.client.submit(request)) as events:
            async for event in events:
                if isinstance(event, Ended) and (error := failure(event)):
                    raise error
                yield event
    except RequestError as e:
        raise e.renamed(job.names) from None


async def _one(
    job: PreparedRequest, request: Request, first: int, usage: Usage
) -> AsyncGenerator[TextDelta, None]:
    """The deltas of one request: choice `first`, or from there on the texts of a beam search."""
    readers: dict[int, tuple[OutputProcessor, Quality]] = {}
    json = job.structure is not None and isinstance(job.structure.what, JsonSchema)

    def push(event: TokenEvent) -> TextDelta:
        index = event.index if isinstance(event, BeamText) else 0
        if index not in readers:
            tokenizer = job.model.tokenizer
            output = OutputProcessor(tokenizer, request, first + index, usage, job.reply)
            readers[index] = output, Quality(json)
        output, quality = readers[index]
        delta = output.push(event)
        usage.signs += quality.push(delta)
        return delta

    for token in request.resume:
        if delta := push(Token(request.id, token)):
            yield delta
    async with aclosing(_events(job, request)) as events:
        async for event in events:
            usage.reach(first // job.made, event, len(request.prompt))
            if delta := push(event):
                if delta.finish:
                    usage.finishes.append(delta.finish)
                yield delta
                # A stop string may end a choice before the engine does.
                if delta.finish and (ends(event) or not isinstance(event, BeamText)):
                    return


async def _all(
    job: PreparedRequest, requests: list[Request], usage: Usage
) -> AsyncGenerator[TextDelta, None]:
    """The deltas of several requests, in the order they come."""
    # What waits in it is counted as used: more than one would run beyond what a key has left.
    queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue(1)

    async def pump(request: Request, first: int) -> None:
        try:
            async with aclosing(_one(job, request, first, usage)) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
            await queue.put(None)
        except Exception as e:
            await queue.put(e)

    width = job.made if job.params.beam is not None else 1  # choices of a request
    tasks: list[asyncio.Task[None]] = []

    async def start() -> None:
        for i, request in enumerate(requests):
            tasks.append(asyncio.create_task(pump(request, i * width)))
            await asyncio.sleep(0)  # each sends a prompt, which may be long: others have a turn

    starter = asyncio.create_task(start())
    try:
        running = len(requests)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        starter.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(starter, *tasks, return_exceptions=True)


async def _echoed(
    job: PreparedRequest, deltas: AsyncGenerator[TextDelta, None]
) -> AsyncGenerator[TextDelta, None]:
    """Puts each prompt, with its log-probabilities if asked for, before its continuation. They have
    as many alternatives as a reply's, although more may be wanted of the prompt."""
    begun: set[int] = set()
    scored: dict[int, list[TokenInfo]] = {}  # by prompt: the texts of a beam search share theirs
    wanted = job.params.prompt_logprobs is not None
    for number, prompt in enumerate(job.prompts if wanted else ()):
        if len(prompt) == 1:  # of which nothing is told
            scored[number] = [TokenInfo(prompt[0], None, [])]
    async with aclosing(deltas):
        async for delta in deltas:
            number = delta.choice // job.made
            if delta.prompt:
                scored[number] = delta.prompt
            if delta.choice not in begun and (number in scored or not wanted):
                begun.add(delta.choice)
                text = job.model.tokenizer.decode(job.prompts[number]) + delta.text
                top = job.params.logprobs
                first = [replace(t, top=t.top[:top]) for t in scored.get(number, ())]
                delta = replace(delta, text=text, tokens=first + delta.tokens)
            yield delta
