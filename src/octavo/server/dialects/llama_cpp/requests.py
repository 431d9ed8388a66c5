"""llama.cpp's bodies as neutral requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidValue
from octavo.generate.request import GenerationRequest, Infill, Sampling
from octavo.server.dialects.llama_cpp.schemas import Common, CompletionBody, InfillBody
from octavo.server.dialects.openai.schemas import MAX_PROMPTS
from octavo.text.structure import Grammar, JsonSchema, Structure

# Sampling parameters by what bodies call them.
SAMPLING = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "typical_p": "typical_p", "seed": "seed", "stop": "stop", "ignore_eos": "ignore_eos",
    "repetition_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # fmt: skip
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEVER = -100.0  # the lowest bias
MAX_CHOICES = 128


def names(body: Common) -> Mapping[str, str]:
    """What the fields of its request are called in a body."""
    filled = isinstance(body, InfillBody)
    return {
        **SAMPLING, "max_tokens": "n_predict", "n": "n_cmpl", "logprobs": "n_probs",
        "structure": "json_schema" if body.grammar is None else "grammar",
        "prompts": "input_prefix" if filled else "prompt", "infill": "input_suffix",
    }  # fmt: skip


def completion_request(body: CompletionBody) -> GenerationRequest:
    """What a completion body asks for. Raises RequestError."""
    prompts = given_prompts(body)
    made = len(prompts) * (1 if body.n_cmpl is None else body.n_cmpl)
    if len(prompts) > MAX_PROMPTS or made > MAX_CHOICES:
        raise InvalidValue(f"{made} choices in one request; {MAX_CHOICES} at most", "prompt")
    return GenerationRequest(prompts=prompts, parse_special=True, **_common(body))


def infill_request(body: InfillBody) -> GenerationRequest:
    """What a body with a gap asks for. Raises RequestError."""
    files = tuple((file.filename, file.text) for file in body.input_extra or ())
    return GenerationRequest(
        prompts=[body.input_prefix + (body.prompt or "")],
        infill=Infill(body.input_suffix, files),
        **_common(body),
    )


def given_prompts(body: CompletionBody) -> list[str | list[int | str]]:
    """The prompts of a body: one that may mix texts and ids, or several. Raises InvalidValue."""
    given: Any = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidValue("prompt is empty", "prompt")
    kinds = {type(part) for part in given}
    if int in kinds and list not in kinds:
        return [given]
    if int in kinds:
        raise InvalidValue("prompt mixes token ids with lists", "prompt")
    return list(given)


def one_prompt(body: Common) -> bool:
    """Whether a body asks for one completion, which is then no list of one."""
    given = body.prompt if isinstance(body, CompletionBody) else ""
    several = isinstance(given, list) and not any(isinstance(part, int) for part in given)
    return not several and body.n_cmpl in (None, 1)


def _common(body: Common) -> dict[str, Any]:
    n = 1 if body.n_cmpl is None else body.n_cmpl
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidValue(f"n_cmpl is {n}; it must be between 1 and {MAX_CHOICES}", "n_cmpl")
    return {"sampling": _sampling(body), "structure": _structure(body), "n": n, "to_context": True}


def _sampling(body: Common) -> Sampling:
    given = {name: getattr(body, called) for name, called in SAMPLING.items()}
    if body.repeat_last_n == 0:  # no token is looked back at
        given |= PENALTIES
    if body.seed == -1:
        given["seed"] = None
    limit = body.n_predict  # below 0: until the context is full
    return Sampling(
        max_tokens=None if limit is None or limit < 0 else limit,
        logprobs=body.n_probs or None,
        logit_bias=_biases(body),
        **given,
    )


def _biases(body: Common) -> dict[str, float] | None:
    given = body.logit_bias
    if given is None or isinstance(given, dict):
        return given
    if any(bias is True for _, bias in given):
        raise InvalidValue("logit_bias: a bias is a number, or false for never", "logit_bias")
    return {str(token): NEVER if bias is False else bias for token, bias in given}


def _structure(body: Common) -> Structure | None:
    schema, grammar = body.json_schema, body.grammar or None
    if schema is not None and grammar is not None:
        raise InvalidValue("json_schema and grammar exclude each other", "json_schema")
    if grammar is not None:
        return Structure(Grammar(grammar))
    return None if schema is None else Structure(JsonSchema(schema, "json_schema"))
