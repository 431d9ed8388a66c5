"""Token events as text: detokenizing, stop strings, thoughts, tool calls, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.events import (
    NOT_COMPUTED,
    BeamText,
    Ended,
    Progress,
    PromptLogprobs,
    Token,
    TokenEvent,
)
from octavo.engine.request import Request
from octavo.errors import DeadlineExceeded, EngineFailed, RequestError
from octavo.generate.reply import TextDelta, TokenInfo, Usage
from octavo.text import ReplyParser, TextStream, Tokenizer
from octavo.text.tools import MARKERS, ToolFormat

Sampled = tuple[int, float, list[tuple[int, float]]]  # token, log-probability, alternatives


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a chat reply is told apart into thoughts, content and tool calls. names: of functions."""

    tools: ToolFormat | None
    reasoning: bool
    thinking: bool
    names: frozenset[str] = frozenset()

    def parser(self) -> ReplyParser:
        return ReplyParser(self.tools, self.reasoning, self.thinking, self.names)


def failure(event: Ended) -> RequestError | None:
    """The error that a request ended with, if it did. It names the engine's fields."""
    if event.finish == "deadline":
        return DeadlineExceeded()
    if event.finish == "refused":
        return RequestError(event.error or "", event.param, event.code)
    if event.finish == "error":
        return EngineFailed(NOT_COMPUTED, code="engine_error")
    return None


class OutputProcessor:
    """Turns the events of one choice into text deltas, and counts them."""

    def __init__(
        self, tokenizer: Tokenizer, request: Request, choice: int, usage: Usage,
        reply: ReplyFormat | None = None,
    ) -> None:  # fmt: skip
        markers = reply is not None and (reply.tools is not None or reply.reasoning)
        table = tokenizer.bytes_saying(MARKERS) if markers else tokenizer.bytes
        self._stream = TextStream(table, request.params.stop_strings)
        self._parser = reply.parser() if reply else None
        self._request, self._choice, self._usage = request, choice, usage
        self._prompt: list[TokenInfo] = []
        self._ids: list[int] = []  # that no delta has told of yet
        self._last = 0.0  # when its latest token was sampled

    def push(self, event: TokenEvent) -> TextDelta:
        """What an event adds, which may be nothing."""
        if isinstance(event, PromptLogprobs):
            return TextDelta(self._choice, "", prompt=self._scored(event))
        self._usage.stamp(event.times)
        if isinstance(event, Progress):
            return TextDelta(self._choice, "")
        if isinstance(event, Token):
            if now := event.times.last_token:  # 0.0 where another engine has sampled it
                self._usage.gaps.token(now, self._last)
                self._last = now
            self._usage.predict(self._choice, event.predicted)
            return self._read([(event.token, event.logprob, event.top)], event.finish)
        if isinstance(event, BeamText):
            self._usage.beam_width = event.width
            tokens = list(zip(event.tokens, event.logprobs, event.tops, strict=True))
            return self._read(tokens, event.finish, event.score)
        return self._read([], event.finish if isinstance(event, Ended) else None)

    def _read(
        self, sampled: list[Sampled], finish: str | None, score: float | None = None
    ) -> TextDelta:
        """Tokens as text. finish: how the last of them ended the choice, if it did."""
        stop_token = sampled[-1][0] if sampled and finish == "stop" else None
        shown = sampled if stop_token is None else sampled[:-1]
        self._usage.completion += len(sampled)
        self._ids += [token for token, _, _ in sampled]
        text, end = "", None
        for token, _, _ in shown:
            more, end = self._stream.push(token, None)
            text += more
        if finish and end is None:
            more, end = self._stream.push(None, finish)
            text += more
        wanted = self._request.params.logprobs is not None
        tokens = [TokenInfo(*one) for one in shown] if wanted else []
        return self._delta(text, tokens, end, score, stop_token)

    def _delta(
        self, text: str, tokens: list[TokenInfo], finish: str | None, score: float | None,
        stop_token: int | None,
    ) -> TextDelta:  # fmt: skip
        reasoning, calls = "", []
        if self._parser is not None:
            delta = self._parser.push(text)
            reasoning, calls, text = delta.reasoning, delta.calls, delta.content
            if finish:
                rest = self._parser.finish()
                reasoning += rest.reasoning
                calls, text = calls + rest.calls, text + rest.content
            if finish == "stop" and self._parser.calls:
                finish = "tool_calls"
        made = TextDelta(
            self._choice, text, tokens, finish, reasoning, calls, [], score, self._ids, stop_token,
            self._stream.matched if finish else None,
        )  # fmt: skip
        if made:
            self._ids = []
        return made

    def _scored(self, event: PromptLogprobs) -> list[TokenInfo]:
        """The log-probabilities of the prompt, when the last of them has come."""
        prompt = self._request.prompt
        self._prompt = self._prompt or [TokenInfo(prompt[0], None, [])]
        for logprob, top in event.logprobs:
            self._prompt.append(TokenInfo(prompt[len(self._prompt)], logprob, top))
        return self._prompt if len(self._prompt) == len(prompt) else []
