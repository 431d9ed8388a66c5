"""Which requests an engine takes: everything is checked before any of it is queued."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.request import (
    MAX_INT32,
    MAX_TIMEOUT,
    MIN_TIMEOUT,
    Request,
    are_tokens,
    check_number,
)
from octavo.errors import ContextExceeded, RequestError
from octavo.models.images import Vision
from octavo.program import Task


@dataclass(frozen=True, slots=True)
class Admission:
    """What one engine can serve.

    context: most tokens of a sequence, prompt and completion. grammars, adapters: whether it has
    any use for them. vision: what encodes its images.
    """

    vocabulary: int
    context: int
    task: Task
    grammars: bool
    adapters: bool
    vision: Vision | None = None

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that can never be served.

        `param` names a field of Request or SamplingParams, whatever a caller's API calls it.
        Lengths are checked before contents.
        """
        request.params.check(self.vocabulary)
        self._check_length(request)
        for name in ("prompt", "resume", "prediction"):
            if not are_tokens(getattr(request, name), self.vocabulary):
                raise _invalid(f"{name} holds a token outside 0 to {self.vocabulary - 1}", name)
        check_number("priority", request.priority, int, -MAX_INT32, MAX_INT32)
        for name in ("timeout", "ttft"):
            if (seconds := getattr(request, name)) is not None:
                check_number(name, seconds, float, MIN_TIMEOUT, MAX_TIMEOUT)
        types = request.token_type_ids
        if types and (len(types) != len(request.prompt) or not are_tokens(types, 2)):
            raise _invalid("token_type_ids are 0 or 1 for each prompt token", "token_type_ids")
        self._check_abilities(request)
        if request.images or request.image_offsets:
            self._check_images(request)

    def _check_length(self, request: Request) -> None:
        prompt, wanted = len(request.prompt), request.params.max_tokens
        if not prompt:
            raise _invalid("the prompt is empty", "prompt")
        wanted = 0 if request.pool else 1 if wanted is None else wanted
        if prompt + wanted > self.context:
            raise ContextExceeded(self.context, prompt, wanted, "prompt")

    def _check_abilities(self, request: Request) -> None:
        if request.adapter and not self.adapters:
            raise RequestError("this engine has no adapters", "adapter", "model_not_found")
        if self.task != "generate" and not request.pool:
            raise RequestError("this model generates no text", "model", "unsupported_task")
        if request.params.grammar is not None and not self.grammars:
            raise RequestError(
                "this engine has no vocabulary for grammars", "grammar", "unsupported_parameter"
            )

    def _check_images(self, request: Request) -> None:
        """Each image fills placeholders of the prompt, one after the other."""
        if self.vision is None:
            raise RequestError("this model takes no images", "images", "unsupported_parameter")
        if request.pool or (self.vision.mutual and request.params.prompt_logprobs is not None):
            name = "pool" if request.pool else "prompt_logprobs"
            raise RequestError(
                f"images and {name} exclude each other in this model", name,
                "unsupported_parameter",
            )  # fmt: skip
        if len(request.images) != len(request.image_offsets):
            raise _invalid("each image has an offset in the prompt", "images")
        end = 0
        for image, offset in zip(request.images, request.image_offsets, strict=True):
            self.vision.check(image)
            token = self.vision.placeholder if image.time is None else self.vision.video
            placeholders = request.prompt[offset : offset + image.tokens] if offset >= end else []
            if placeholders != [token] * image.tokens:
                raise _invalid("an image is not where its placeholders are", "images")
            end = offset + image.tokens


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param, "invalid_value")
