"""From a request to what an engine is told, and to how its reply is read.

Preparing may take longer than others' streams can wait (tokens, templates): call it in a thread.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.engine.request import (
    MAX_INT32,
    MAX_TIMEOUT,
    MIN_TIMEOUT,
    SamplingParams,
    Thinking,
    are_tokens,
    check_number,
)
from octavo.errors import InvalidValue, RequestError
from octavo.generate.lengths import check_length, check_texts, fitting
from octavo.generate.media import read_media
from octavo.generate.model import ServedModel
from octavo.generate.options import typed
from octavo.generate.output import ReplyFormat
from octavo.generate.prompts import encode_prompts, filling
from octavo.generate.request import MAX_PRIORITY, GenerationRequest, NamedTool
from octavo.generate.sampling import MAX_STOP_LENGTH, sampling_params
from octavo.text import tools
from octavo.text.chat import Written
from octavo.text.messages import Tool
from octavo.text.structure import Structure, Thoughts
from octavo.text.tools import THINK, THOUGHT
from octavo.vision.image import ImageInput

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# What chat templates are given by us.
RESERVED = frozenset(
    "messages tools add_generation_prompt continue_final_message tokenize chat_template "
    "bos_token eos_token".split()
)


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """`n` choices for each of `prompts`, the most likely of `made`.

    images: what the image tokens of a chat's one prompt stand for; image_offsets: where those of
    each begin. reply: how a chat's reply is read. structure: of every choice; constraint: the field
    that asked for it. prompt_name: that the sender has given its prompt.
    """

    model: ServedModel
    prompts: list[list[int]]
    params: SamplingParams
    n: int
    made: int
    images: Sequence[ImageInput] = ()
    image_offsets: Sequence[int] = ()
    echo: bool = False
    reply: ReplyFormat | None = None
    structure: Structure | None = None
    constraint: str = "structure"
    priority: int = 0
    timeout: float | None = None
    salt: str = ""
    prediction: Sequence[int] = ()
    tenant: str = ""
    ttft: float | None = None
    resume: Sequence[int] | None = None
    prompt_name: str = ""

    @property
    def names(self) -> dict[str, str]:
        """The fields of the request that the engine's fields come from."""
        prompt = "prompts" if self.reply is None else "messages"
        grammar = self.constraint if self.params.grammar is None else "grammar"
        return {"prompt": prompt, "grammar": grammar, "adapter": "model"}

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def image_tokens(self) -> int:
        return sum(image.tokens for image in self.images)


@dataclass(frozen=True, slots=True)
class _ToolUse:
    """The tools that a reply may call. required: it has to; strict: as their schemas say."""

    callable: Sequence[Tool]
    required: bool
    strict: bool
    parallel: bool


def prepare(request: GenerationRequest, model: ServedModel) -> PreparedRequest:
    """A request made ready for an engine. Raises RequestError naming one of its fields."""
    check_number("priority", request.priority, int, -MAX_PRIORITY, MAX_PRIORITY)
    if request.timeout is not None:
        check_number("timeout", request.timeout, float, MIN_TIMEOUT, MAX_TIMEOUT)
    if model.adapter and model.adapter not in model.client.adapters:
        raise RequestError(f"no adapter {model.adapter[:64]!r}", "model", "model_not_found")
    if isinstance(given := request.sampling, SamplingParams):
        given = typed(msgspec.structs.asdict(given), SamplingParams)
        request = replace(request, sampling=given)
    n, made = _counts(request)
    if request.messages is None:
        job = _completion(request, model, n, made)
    else:
        job = _chat(request, model, n, made)
    job.params.check(model.vocabulary)
    return job if request.resume is None else _resumed(request.resume, job)


def _resumed(tokens: Sequence[int], job: PreparedRequest) -> PreparedRequest:
    """A request whose reply has begun elsewhere. Raises InvalidValue."""
    if len(job.prompts) * job.made > 1 or job.echo or job.params.beam is not None:
        raise InvalidValue("resume takes one choice, without echo and beam search", "resume")
    if not are_tokens(tokens, job.model.vocabulary):
        raise InvalidValue(
            f"resume holds a token outside 0 to {job.model.vocabulary - 1}", "resume"
        )
    room = job.model.context - job.prompt_tokens
    most = room if job.params.max_tokens is None else job.params.max_tokens
    if tokens and len(tokens) >= most:
        raise InvalidValue(
            f"resume holds {len(tokens)} tokens; the reply has {most} at most", "resume"
        )
    return replace(job, resume=tokens)


def _counts(request: GenerationRequest) -> tuple[int, int]:
    """Choices of each prompt that are returned, and that are made."""
    beam = request.sampling.beam
    n = request.n if beam is None or request.n != 1 else beam.n
    check_number("n", n, int, 1, MAX_INT32)
    if beam is not None and n != beam.n:
        raise InvalidValue(f"n is {n}, but {beam.n} of the beam search", "n")
    made = n if request.best_of is None else request.best_of
    check_number("best_of", made, int, n, MAX_INT32)
    if made > n and beam is not None:
        raise InvalidValue("best_of and beam search exclude each other", "best_of")
    return n, made


def _completion(
    request: GenerationRequest, model: ServedModel, n: int, made: int
) -> PreparedRequest:
    model.require("generate")
    for field in ("tools", "thinking_budget"):
        if getattr(request, field):
            raise InvalidValue(f"{field} needs messages", field)
    if request.echo and request.infill is not None:
        raise InvalidValue("echo and infill exclude each other", "echo")
    ids = encode_prompts(request, model)
    sampling = fitting(request, ids, model)
    check_length(ids, sampling.max_tokens, model, "prompts")
    params = sampling_params(sampling, model)
    if request.infill is not None and not params.ignore_eos:
        ends = filling(model).ends
        params = msgspec.structs.replace(params, stop_token_ids=[*params.stop_token_ids, *ends])
    if request.echo and params.logprobs is not None:
        most = max(params.logprobs, params.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=most)
    return PreparedRequest(
        model=model, prompts=ids, params=params, n=n, made=made, echo=request.echo,
        structure=_only(request.structure, params), priority=request.priority,
        timeout=request.timeout, salt=_salt(request), tenant=request.tenant, ttft=request.ttft,
        prediction=_predicted(request, model),
    )  # fmt: skip


def _chat(request: GenerationRequest, model: ServedModel, n: int, made: int) -> PreparedRequest:
    template = model.chat_template
    if request.media is None:
        request = replace(request, media=read_media(request.messages or (), model))
    ids = encode_chat(request, model)
    use = _tool_use(request)
    sampling = fitting(request, [ids], model)
    check_length([ids], sampling.max_tokens, model, "messages")
    params = sampling_params(sampling, model)
    thinking = template.thinking(ids)
    structure, constraint = _only(request.structure, params), "structure"
    if use is not None and (use.required or use.strict):
        if structure is not None or params.grammar is not None:
            raise InvalidValue(
                "tools that are enforced and response_format exclude each other", "tools"
            )
        constraint = "tools"
        structure = Structure(
            tools.tool_grammar(
                use.callable, template.style, model.tokenizer, required=use.required,
                parallel=use.parallel,
            )
        )  # fmt: skip
    if structure is not None and template.reasons:
        opening, closing = (tools.terminal(m, model.tokenizer) for m in (THINK, THOUGHT))
        structure = Structure(structure.what, Thoughts(opening, closing, inside=thinking))
    if request.thinking_budget is not None:
        params = _bounded(params, request.thinking_budget, model, thinking)
    style = template.style if use is not None else None
    names = frozenset(t.name for t in use.callable) if use is not None else frozenset()
    images = [image for p in request.media or () for image in p.images]
    return PreparedRequest(
        model=model, prompts=[ids], params=params, n=n, made=made,
        images=images, image_offsets=_image_offsets(ids, images, model), echo=request.echo,
        reply=ReplyFormat(style, template.reasons, thinking, names), structure=structure,
        constraint=constraint, priority=request.priority, timeout=request.timeout,
        salt=_salt(request), tenant=request.tenant, ttft=request.ttft,
        prediction=_predicted(request, model),
    )  # fmt: skip


def _predicted(request: GenerationRequest, model: ServedModel) -> list[int]:
    """Ids of the predicted reply, as many as a reply can have. Raises RequestError."""
    if not (text := request.prediction):
        return []
    if request.sampling.beam is not None:
        told = "prediction and beam search exclude each other"
        raise RequestError(told, "prediction", "unsupported_parameter")
    check_texts([text], model, "prediction")
    return model.tokenizer.encode(text, add_bos=False)[: model.context]


def render_chat(request: GenerationRequest, model: ServedModel) -> Written:
    """A request's conversation as its template writes it. Raises RequestError."""
    template, messages = model.chat_template, request.messages or ()
    if not messages:
        raise InvalidValue("messages is empty", "messages")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidValue(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    _check_tools(request.tools)
    check_texts((m.text for m in messages), model, "messages")
    media = request.media
    if media is None:
        media = read_media(messages, model)
    options = _checked_options({**request.template_options, **request.required_options})
    for name in request.required_options:
        if name not in template.variables:
            told = f"{name}: the chat template of {model.name} does not read it"
            raise RequestError(told, name, "unsupported_parameter")
    return template.write(
        messages, request.tools, options,
        generation=request.add_generation_prompt, continued=request.continue_final_message,
        placeholders=model.placeholders, media=[p.text for p in media],
    )  # fmt: skip


def encode_chat(request: GenerationRequest, model: ServedModel) -> list[int]:
    """Ids of a request's conversation. Raises RequestError."""
    seen, written = model.images, render_chat(request, model)
    ids = model.tokenizer.encode_rendered(written.text, written.escape)
    bos = model.tokenizer.special.bos
    if seen and model.tokenizer.special.add_bos and bos is not None and ids[:1] != [bos]:
        return [bos, *ids]  # as processors of images do, which tokenize the rendered text
    return ids


def _image_offsets(ids: list[int], images: Sequence[ImageInput], model: ServedModel) -> list[int]:
    """Where the tokens of each image begin."""
    offsets, at = [], 0
    for image in images:
        kind = model.images if image.time is None else model.videos
        assert kind is not None
        at = ids.index(kind.token, at)
        offsets.append(at)
        at += image.tokens
    return offsets


def _checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a template: plain values under names that nothing else uses."""
    for name, value in given.items():
        plain = value is None or isinstance(value, bool | int | float | str)
        plain = plain and len(str(value)) <= MAX_STOP_LENGTH
        if name in RESERVED or name.startswith("_") or not name.isidentifier() or not plain:
            raise InvalidValue(f"template_options.{name[:32]} cannot be given", "template_options")
    return dict(given)


def _check_tools(given: Sequence[Tool]) -> None:
    names = [tool.name for tool in given]
    if len(given) > MAX_TOOLS or len(set(names)) < len(names):
        raise InvalidValue(f"tools takes up to {MAX_TOOLS} functions of different names", "tools")
    for i, name in enumerate(names):
        at = f"tools[{i}].function.name"
        if not TOOL_NAME.fullmatch(name):
            raise InvalidValue(f"{at} has 1 to 64 letters, digits, '_', '.' and '-'", at)


def _tool_use(request: GenerationRequest) -> _ToolUse | None:
    """What tools and tool_choice allow; None if nothing may be called."""
    given, choice = request.tools, request.tool_choice
    if isinstance(choice, NamedTool):
        usable = [t for t in given if t.name == choice.name]
        if not usable:
            raise InvalidValue("tool_choice names none of the tools", "tool_choice")
        return _ToolUse(usable, True, any(t.strict for t in given), False)
    if choice not in ("none", "auto", "required"):
        raise InvalidValue("tool_choice is none, auto, required or a function", "tool_choice")
    if choice == "required" and not given:
        raise InvalidValue("tool_choice is required, but there are no tools", "tool_choice")
    if choice == "none" or not given:
        return None
    strict = any(t.strict for t in given)
    return _ToolUse(given, choice == "required", strict, request.parallel_tool_calls)


def _only(structure: Structure | None, params: SamplingParams) -> Structure | None:
    """The request's constraint. Raises RequestError if there is a grammar as well."""
    if structure is not None and params.grammar is not None:
        raise InvalidValue("only one constraint can be given", "structure")
    return structure


def _bounded(
    params: SamplingParams, budget: int, model: ServedModel, thinking: bool
) -> SamplingParams:
    """Parameters that end thoughts after `budget` tokens. thinking: the prompt has opened them."""
    begin, end = (model.tokenizer.vocabulary.get(marker) for marker in (THINK, THOUGHT))
    if not model.chat_template.reasons or end is None:
        raise InvalidValue("this model does not think", "thinking_budget")
    if budget < 0:
        raise InvalidValue("thinking_budget is below 0", "thinking_budget")
    if not thinking and begin is None:
        return params  # they begin with several tokens, if they do
    closing = [end, *model.tokenizer.encode("\n\n", add_bos=False)]
    own = () if thinking else (begin, model.tokenizer.blank)
    bounded = Thinking(budget, closing, *own)
    return msgspec.structs.replace(params, thinking=bounded)


def _salt(request: GenerationRequest) -> str:
    """What keeps cached prefixes apart: the principal's salt, joined with the request's own."""
    if not request.cache_salt:
        return request.salt
    return hashlib.sha256(f"{request.salt}/{request.cache_salt}".encode()).hexdigest()[:32]
