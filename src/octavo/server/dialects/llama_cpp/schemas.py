"""Request bodies of llama.cpp's API. Every field is obeyed, ignored, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from octavo.server.bounds import sampling
from octavo.server.dialects.openai.schemas import MAX_PROMPTS, Int
from octavo.server.parsing import Fields
from octavo.server.sizes import AtMost, Mixed, Texts

KIB = 1 << 10
MAX_FILES = 128

# What belongs to samplers that are off has no effect.
FIELDS = Fields(
    ignored=frozenset(
        "id_slot cache_prompt n_keep n_cache_reuse dynatemp_exponent dry_base dry_allowed_length "
        "dry_penalty_last_n dry_sequence_breakers xtc_threshold mirostat_tau mirostat_eta".split()
    ),
    unsupported={
        "dynatemp_range": (0,),
        "dry_multiplier": (0,),
        "xtc_probability": (0,),
        "top_n_sigma": (-1, 0),
        "mirostat": (0,),
        "min_keep": (0,),
        "n_indent": (0,),
        "t_max_predict_ms": (-1, 0),
        "post_sampling_probs": (False,),
        "return_progress": (False,),
        "samplers": ([],),
        "lora": ([],),
    },
)


class Common(msgspec.Struct, kw_only=True):
    """Fields of both endpoints that generate text. None stands for the model's default."""

    model: str | None = None
    n_predict: Int | None = None
    n_cmpl: Int | None = None
    temperature: Annotated[float | None, sampling("temperature")] = None
    top_k: Int | None = None
    top_p: Annotated[float | None, sampling("top_p")] = None
    min_p: Annotated[float | None, sampling("min_p")] = None
    typical_p: Annotated[float | None, sampling("typical_p")] = None
    seed: Int | None = None
    stop: Annotated[str | list[str] | None, AtMost(32 * KIB)] = None
    repeat_penalty: float | None = None
    repeat_last_n: Literal[0, -1] | None = None
    presence_penalty: Annotated[float | None, sampling("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, sampling("frequency_penalty")] = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[
        dict[str, float] | list[tuple[Int, float | bool]] | None, AtMost(128 * KIB)
    ] = None
    grammar: Annotated[str | None, AtMost(1024 * KIB)] = None
    json_schema: Annotated[dict[str, Any] | bool | None, AtMost(1024 * KIB)] = None
    n_probs: Int | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[str] | None, AtMost(4 * KIB)] = None


class CompletionBody(Common, kw_only=True):
    prompt: Annotated[str | list[str | Int | list[str | Int]], Mixed(MAX_PROMPTS)]


class ExtraFile(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    filename: str = "tmp"


class InfillBody(Common, kw_only=True):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile] | None, Texts(MAX_FILES)] = None
    prompt: str | None = None  # more text before the gap
