"""What can go wrong, as types: one line that says what and with which numbers, then what to try."""

from __future__ import annotations

import traceback
from pathlib import Path


class OctavoError(Exception):
    """An error for the user. `exit_code` is the command line's; `suggestions` can be pasted."""

    exit_code = 1

    def __init__(self, message: str, *suggestions: str) -> None:
        super().__init__(message)
        self.suggestions = suggestions


class UsageError(OctavoError):
    exit_code = 2


class ModelNotFound(OctavoError):
    exit_code = 3


class CheckpointError(OctavoError):
    """A model file is damaged, truncated or hostile."""

    exit_code = 3


class DoesNotFit(OctavoError):
    """The plan needs more memory than it may use."""

    exit_code = 4


class PortTaken(OctavoError):
    exit_code = 5


class ModelChanged(OctavoError):
    """Files of a model are not those that it was first read from."""

    exit_code = 3


class Unsupported(OctavoError):
    """A sound model of a kind that Octavo does not run."""

    exit_code = 6


class RequestError(OctavoError):
    """A request that cannot be served: `param` names the field, `code` is OpenAI's error code."""

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(RequestError):
    """It cannot be served now; the client may try again."""

    status = 503


class EngineFailed(RequestError):
    """The engine could not finish the request; nothing was wrong with it."""

    status = 500


def place(error: BaseException) -> str:
    """The type of an unexpected error and where it came from, for a log: its text may hold a
    prompt's."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" in {f.name}, line {f.lineno} of {Path(f.filename).name}" for f in frames)
    return type(error).__name__ + where
