"""Responses of llama.cpp's `/completion` and `/infill`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.engine.request import SamplingParams
from octavo.errors import RequestError
from octavo.generate.prepare import PreparedRequest
from octavo.generate.reply import TextDelta, TokenInfo, Usage
from octavo.server.dialects.llama_cpp.errors import error_object
from octavo.server.dialects.llama_cpp.requests import one_prompt
from octavo.server.dialects.llama_cpp.schemas import Common
from octavo.server.dialects.openai.responses import sse, token_entry
from octavo.text import Tokenizer

encode = msgspec.json.Encoder().encode
NO_SLOT = -1  # requests have none


def settings(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as llama.cpp's server tells them."""
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": params.seed, "temperature": params.temperature, "top_k": params.top_k,
        "top_p": params.top_p, "min_p": params.min_p, "typical_p": params.typical_p,
        "repeat_penalty": params.repetition_penalty, "repeat_last_n": -1,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty, "stop": params.stop_strings,
        "ignore_eos": params.ignore_eos, "n_probs": params.logprobs or 0,
        "grammar": params.grammar or "",
    }  # fmt: skip


class CompletionWriter:
    """Writes completions, one object each. See `dialect`."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, body: Common, job: PreparedRequest, usage: Usage) -> None:
        self._job, self._usage = job, usage
        self.stream = bool(body.stream)
        self._alone = one_prompt(body)
        self._with_tokens = bool(body.return_tokens)
        self._timed = bool(body.timings_per_token)
        self._fields = body.response_fields
        self._predicted: dict[int, int] = {}  # tokens of each choice
        self._lines: set[int] = set()  # choices whose text has had a line break

    def opening(self) -> bytes:
        return b""

    def chunks(self, delta: TextDelta) -> bytes:
        """An object with what a delta says, and one with how its choice ended."""
        self._count(delta)
        out = b""
        if delta.text or delta.tokens:
            chunk = {
                "index": delta.choice, "content": delta.text, "tokens": delta.ids, "stop": False,
                "id_slot": NO_SLOT, **self._counts(delta.choice), **self._scores(delta.tokens),
            }  # fmt: skip
            out = sse(chunk | ({"timings": self._timings()} if self._timed else {}))
        if delta.finish:
            rest = [] if out else delta.ids  # tokens without a text
            out += sse(self._selected(self._result(delta, "", rest, [])))
        return out

    def closing(self) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return sse(error_object(error))

    def whole(self, choices: Sequence[Sequence[TextDelta]]) -> bytes:
        """The response of a request that does not stream."""
        results = []
        for deltas in choices:
            for delta in deltas:
                self._count(delta)
            text = "".join(d.text for d in deltas)
            ids = [i for d in deltas for i in d.ids] if self._with_tokens else []
            tokens = [t for d in deltas for t in d.tokens]
            results.append(self._selected(self._result(deltas[-1], text, ids, tokens)))
        return encode(results[0] if self._alone else results)

    def _count(self, delta: TextDelta) -> None:
        self._predicted[delta.choice] = self._predicted.get(delta.choice, 0) + len(delta.ids)
        if "\n" in delta.text:
            self._lines.add(delta.choice)

    def _counts(self, choice: int) -> dict[str, int]:
        return {
            "tokens_predicted": self._predicted[choice],
            "tokens_evaluated": len(self._prompt(choice)),
        }

    def _prompt(self, choice: int) -> list[int]:
        return self._job.prompts[choice // self._job.made]

    def _result(
        self, last: TextDelta, text: str, ids: list[int], tokens: list[TokenInfo]
    ) -> dict[str, Any]:
        """A completion that has ended."""
        choice, counts = last.choice, self._counts(last.choice)
        cached = counts["tokens_evaluated"] + counts["tokens_predicted"]
        return {
            "index": choice, "content": text, "tokens": ids, "id_slot": NO_SLOT, "stop": True,
            "model": self._job.model.name, **counts,
            "generation_settings": settings(self._job.params),
            "prompt": _text(self._job.model.tokenizer, self._prompt(choice)),
            "has_new_line": choice in self._lines, "truncated": False,
            "stop_type": _stop_type(last), "stopping_word": last.stop_string or "",
            "tokens_cached": cached, "timings": self._timings(), **self._scores(tokens),
        }  # fmt: skip

    def _selected(self, result: dict[str, Any]) -> dict[str, Any]:
        """The fields that are wanted; `a/b` is `b` of `a`. What there is not is left out."""
        if not self._fields:
            return result
        out = {}
        for path in self._fields:
            value: Any = result
            *outer, name = path.split("/")
            for part in outer:
                value = value.get(part) if isinstance(value, dict) else None
            if isinstance(value, dict) and name in value:
                out[name] = value[name]
        return out

    def _scores(self, tokens: list[TokenInfo]) -> dict[str, Any]:
        """Log-probabilities of the unmodified distribution, if they are wanted."""
        if self._job.params.logprobs is None:
            return {}
        tokenizer = self._job.model.tokenizer
        scored = [
            _entry(tokenizer, t.token, t.logprob)
            | {"top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in t.top]}
            for t in tokens
        ]
        return {"completion_probabilities": scored}

    def _timings(self) -> dict[str, Any]:
        """Of the whole request: what was computed, and in which time."""
        usage, now = self._usage, time.monotonic()
        begun, first = usage.began + usage.queued, usage.first or now
        computed = usage.prompt - usage.cached
        return {
            "cache_n": usage.cached,
            **_speed("prompt", computed, max(first - begun, 0.0)),
            **_speed("predicted", usage.completion, max((usage.last or now) - first, 0.0)),
        }


def _speed(what: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{what}_n": count, f"{what}_ms": 1000 * seconds,
        f"{what}_per_token_ms": 1000 * seconds / count if count else 0.0,
        f"{what}_per_second": count / seconds if seconds else 0.0,
    }  # fmt: skip


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {"id": token, **token_entry(tokenizer, token, logprob)}


def _stop_type(last: TextDelta) -> str:
    if last.finish == "length":
        return "limit"
    return "eos" if last.stop_string is None else "word"


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of a prompt, with the names of its control tokens."""
    return b"".join(map(tokenizer.spelled, ids)).decode("utf-8", "replace")
