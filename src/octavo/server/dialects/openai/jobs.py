"""What one HTTP request asks of the engine, and which of its results are the answer.

Jobs are made in threads: what a body asks for may take longer than others' streams can wait.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from octavo.engine.request import Request, SamplingParams
from octavo.errors import RequestError
from octavo.generate.model import ServedModel
from octavo.generate.output import ReplyFormat
from octavo.generate.reply import TextDelta, TokenInfo
from octavo.server.dialects.openai import sampling_request
from octavo.server.dialects.openai.messages import ToolUse, conversation, tool_use
from octavo.server.dialects.openai.schemas import (
    ChatBody,
    CompletionBody,
    Conversation,
    prompts,
)
from octavo.text import ChatTemplate, Tokenizer
from octavo.text.structure import Structure


@dataclass(frozen=True)
class Job:
    """`n` choices for each of `prompts`, the most likely of `best_of` if that is more.

    role: whose message a chat's reply is. ids: the reply has token ids; named: and its
    log-probabilities name tokens by them.
    """

    route: str
    prompts: list[list[int]]
    params: SamplingParams
    n: int
    best_of: int = 0
    echo: bool = False
    reply: ReplyFormat | None = None
    role: str = "assistant"
    ids: bool = False
    named: bool = False
    structure: Structure | None = None  # of every choice

    @property
    def chat(self) -> bool:
        return self.route == "chat"

    @property
    def made(self) -> int:
        """Choices computed for each prompt."""
        return max(self.n, self.best_of)

    def tuned(self, requests: list[Request]) -> list[Request]:
        """The requests with the log-probabilities that ranking needs."""
        if self.made == self.n or self.params.logprobs is not None:
            return requests
        return [
            msgspec.structs.replace(r, params=msgspec.structs.replace(r.params, logprobs=0))
            for r in requests
        ]

    def best(self, choices: list[list[TextDelta]]) -> list[list[TextDelta]]:
        """The choices to return: of each prompt's those with the best log-probability per token."""
        if self.made == self.n:
            return choices
        out = []
        for first in range(0, len(choices), self.made):
            own = choices[first : first + self.made]
            out += sorted(own, key=_rank)[: self.n]
        return out


def template_of(served: ServedModel) -> ChatTemplate:
    """The model's chat template. Raises RequestError if it has none."""
    if served.template is None:
        raise RequestError(
            f"{served.name} has no chat template, so it cannot chat. Use /v1/completions, "
            "or start the server with --chat-template FILE.",
            "model",
            "no_chat_template",
        )
    return served.template


def encode_chat(body: Conversation, served: ServedModel, use: ToolUse | None) -> list[int]:
    """Ids of the conversation in a body. Raises RequestError."""
    generation, continued = sampling_request.ending(body)
    messages = conversation(body.messages)
    sampling_request.check_texts((m.text for m in messages), served, "messages")
    return template_of(served).encode(
        messages,
        use.told if use else (),
        sampling_request.template_options(body),
        generation=generation,
        continued=continued,
    )


def chat_job(body: ChatBody, served: ServedModel) -> Job:
    """The job of a chat request. Raises RequestError."""
    sampling_request.check_numbers(body)
    n = sampling_request.choices(body)
    limit, logprobs = sampling_request.chat_limits(body)
    template = template_of(served)
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    ids = encode_chat(body, served, use)
    sampling_request.check_length([ids], limit, served, "messages")
    params = sampling_request.sampling(body, served, limit, logprobs)
    about = use, template.style, served.tokenizer, template.reasons, template.thinking(ids)
    structure = sampling_request.chat_structure(body, *about)
    params, reply = sampling_request.for_chat(params, *about, body.thinking_token_budget)
    last = (body.messages or [])[-1:]
    role = "assistant" if sampling_request.ending(body)[0] else last[0].role
    return _checked(
        Job("chat", [ids], params, n, 0, False, reply, role, *_ids_wanted(body), structure), served
    )


def completion_job(body: CompletionBody, served: ServedModel) -> Job:
    """The job of a completion request. Raises RequestError."""
    sampling_request.check_numbers(body)
    n = sampling_request.choices(body)
    best_of = sampling_request.candidates(body, n)
    limit = 16 if body.max_tokens is None else body.max_tokens
    encode, given = served.tokenizer.encode, prompts(body)
    sampling_request.check_texts((p for p in given if isinstance(p, str)), served, "prompt")
    ids = [encode(p) if isinstance(p, str) else p for p in given]
    sampling_request.check_length(ids, limit, served, "prompt")
    params = sampling_request.sampling(body, served, limit, body.logprobs)
    if body.echo and body.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    return _checked(
        Job(
            "completions", ids, params, n, best_of, bool(body.echo), None, "", *_ids_wanted(body),
            sampling_request.structure(body),
        ),
        served,
    )  # fmt: skip


def _ids_wanted(body: ChatBody | CompletionBody) -> tuple[bool, bool]:
    return bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)


def _checked(job: Job, served: ServedModel) -> Job:
    job.params.check(served.vocabulary)
    count = len(job.prompts) * (1 if job.params.beam else job.made)
    if count > sampling_request.MAX_CHOICES:
        raise RequestError(
            f"{count} choices in one request; {sampling_request.MAX_CHOICES} at most",
            "n",
            "invalid_value",
        )
    return job


def _rank(pieces: list[TextDelta]) -> float:
    scores = [t.logprob for p in pieces for t in p.tokens if t.logprob is not None]
    return -sum(scores) / max(1, len(scores))


async def echoed(
    pieces: AsyncGenerator[TextDelta, None], tokenizer: Tokenizer, job: Job
) -> AsyncGenerator[TextDelta, None]:
    """Puts each prompt, with its log-probabilities if asked for, before its completion."""
    begun: set[int] = set()
    scored: dict[int, list[TokenInfo]] = {}  # by prompt: the texts of a beam search share theirs
    async with aclosing(pieces):
        async for piece in pieces:
            number = piece.choice // job.made
            if piece.prompt:
                scored[number] = piece.prompt
            wanted = job.params.prompt_logprobs is not None
            ready = not wanted or number in scored or len(job.prompts[number]) == 1
            if piece.choice not in begun and ready:
                begun.add(piece.choice)
                text = tokenizer.decode(job.prompts[number]) + piece.text
                piece = replace(piece, text=text, tokens=scored.get(number, []) + piece.tokens)
            yield piece
