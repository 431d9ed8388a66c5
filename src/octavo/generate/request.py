"""What is asked of a model, whichever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.request import BeamSearch, SamplingParams
from octavo.text.messages import Message, Tool
from octavo.text.structure import Structure


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters by name; what is None is as the model's defaults say.

    The fields are those of SamplingParams. bad_words are texts here. logit_bias has token ids as
    keys, which may be written as text.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, Any] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam: BeamSearch | None = None


@dataclass(frozen=True)
class NamedTool:
    """A tool choice: this function has to be called."""

    name: str


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """An answer to a conversation, or continuations of texts.

    messages: the conversation; else `prompts`, each text or token ids. tools: the functions the
    model is told of; tool_choice: "none", "auto", "required" or a NamedTool; parallel_tool_calls:
    whether a reply may hold several calls. sampling: overrides of the model's defaults, or whole
    SamplingParams. structure: what a reply has to look like. n: choices for each prompt, the most
    likely of `best_of` if that is given. echo: each prompt comes before its continuation.
    thinking_budget: tokens of thoughts, at most. template_options: further values for the template.
    add_generation_prompt: the template opens a reply; continue_final_message: the reply continues
    the last message. priority: lower runs first. timeout: seconds. salt: of the principal who asks;
    cache_salt: the request's own. Both keep cached prefixes apart.

    Errors name these fields; a dialect translates the names to its own.
    """

    messages: Sequence[Message] | None = None
    prompts: Sequence[str | list[int]] = ()
    tools: Sequence[Tool] = ()
    tool_choice: str | NamedTool = "auto"
    parallel_tool_calls: bool = True
    sampling: Sampling | SamplingParams = field(default_factory=Sampling)
    structure: Structure | None = None
    n: int = 1
    best_of: int | None = None
    echo: bool = False
    thinking_budget: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int = 0
    timeout: float | None = None
    salt: str = ""
    cache_salt: str | None = None
