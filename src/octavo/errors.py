"""What can go wrong, as types: one line that says what and with which numbers, then what to try."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from copy import copy
from os.path import basename

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text without control characters, with which files and models could steer a terminal.

    Newlines and tabs stay; halves of surrogate pairs, which cannot be written, become U+FFFD.
    """
    return _CONTROL.sub("", text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


class OctavoError(Exception):
    """An error for the user. `exit_code` is the command line's; `suggestions` can be pasted."""

    exit_code = 1

    def __init__(self, message: str, *suggestions: str) -> None:
        super().__init__(printable(message).replace("\n", " "))  # it may quote a file
        self.suggestions = tuple(map(printable, suggestions))


class UsageError(OctavoError):
    exit_code = 2


class ModelNotFound(OctavoError):
    """`model` means nothing here; `instead`: names to put in its place."""

    exit_code = 3

    def __init__(
        self, message: str, *suggestions: str, model: str = "", instead: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, *suggestions)
        self.model, self.instead = model, instead


class CacheError(OctavoError):
    """The cache folder cannot be used, or is full."""


class CheckpointError(OctavoError):
    """A model file is damaged, truncated or hostile."""

    exit_code = 3


class WriteError(OctavoError):
    """A file cannot be written; what was there before is as it was."""


class WrittenByAnother(WriteError):
    """Another run writes the same file or folder."""


class DoesNotFit(OctavoError):
    """The plan needs more memory than it may use."""

    exit_code = 4


class DeviceUnusable(OctavoError):
    """What was asked for to compute on is missing, too old, or does not answer."""

    exit_code = 6


class PortTaken(OctavoError):
    exit_code = 5


class ModelChanged(OctavoError):
    """Files of a model are not those that it was first read from."""

    exit_code = 3


class Unsupported(OctavoError):
    """A sound model of a kind that Octavo does not run."""

    exit_code = 6


class RequestError(OctavoError):
    """A request that cannot be served: `param` names the field, `code` is OpenAI's error code.

    retry_after: seconds after which the client may try again.
    """

    status = 400
    retry_after: float | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def renamed(self, names: Mapping[str, str]) -> RequestError:
        """The same error for an API that has other names for some fields."""
        field, rest = re.match(r"(\w*)(.*)", self.param or "", re.DOTALL).groups()  # type: ignore[union-attr]
        if field not in names:
            return self
        other = copy(self)
        other.param = names[field] + rest
        text = str(self)
        other.args = (names[field] + text.removeprefix(field) if text.startswith(field) else text,)
        return other


class InvalidValue(RequestError):
    """A field whose value cannot be taken."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "invalid_value")


class ContextExceeded(RequestError):
    """More tokens than the context takes. `param` names the field that the prompt came in.

    Client libraries know this error by OpenAI's words "maximum context length".
    """

    def __init__(self, context: int, prompt: int, completion: int, param: str) -> None:
        parts = f"{prompt} in the {param}"
        parts += f", {completion} in the completion" if completion else ""
        shorten = f"{param} or completion" if completion else param
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt + completion} tokens ({parts}). Please reduce the length of the {shorten}.",
            param,
            "context_length_exceeded",
        )
        self.context, self.prompt, self.completion = context, prompt, completion

    def renamed(self, names: Mapping[str, str]) -> RequestError:
        param = names.get(self.param or "", self.param or "")
        return ContextExceeded(self.context, self.prompt, self.completion, param)


class Overloaded(RequestError):
    """It cannot be served now; the client may try again, after `retry_after` seconds."""

    status = 503

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None,
        retry_after: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__(message, param, code)
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    """The time that the client gave the request has passed."""

    status = 408

    def __init__(self) -> None:
        super().__init__("the request's deadline passed", "timeout", "deadline_exceeded")


class EngineFailed(RequestError):
    """The engine could not finish the request; nothing was wrong with it."""

    status = 500


def engine_closed() -> EngineFailed:
    """What everybody gets who asks something of an engine or a worker that is closed."""
    return EngineFailed("the engine is closed", code="engine_closed")


def place(error: BaseException) -> str:
    """The type of an unexpected error and where it came from, for a log: its text may hold a
    prompt's."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" in {f.name}, line {f.lineno} of {basename(f.filename)}" for f in frames)
    return type(error).__name__ + where
