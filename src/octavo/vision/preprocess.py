"""What makes encoder inputs of pictures, and the text that a prompt has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from octavo.errors import InvalidValue, RequestError
from octavo.vision.image import ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image

Detail = Literal["auto", "low", "high"]
DETAILS = ("auto", "low", "high")


@dataclass(frozen=True)
class Processed:
    """A picture for a model. text: what its placeholder in a rendered conversation becomes; there,
    each of `images` has as many image tokens as it fills."""

    text: str
    images: tuple[ImageInput, ...]


class Preprocessor(Protocol):
    """How a family takes pictures.

    placeholder: what its chat template writes for a picture. token: the id of image tokens.
    details: levels of detail that it tells apart, none if it has one resolution.
    """

    @property
    def placeholder(self) -> str: ...

    @property
    def token(self) -> int: ...

    @property
    def details(self) -> tuple[Detail, ...]: ...

    def __call__(self, image: Image, detail: Detail, at: str) -> Processed:
        """image: in RGB. Raises RequestError naming `at`."""
        ...


def read_detail(given: Any, preprocessor: Preprocessor, at: str) -> Detail:
    """A part's `detail`; None is "auto". Raises RequestError."""
    detail = "auto" if given is None else given
    if detail not in DETAILS:
        raise InvalidValue(f"{at}.detail is not {', '.join(DETAILS)}", f"{at}.detail")
    if detail != "auto" and detail not in preprocessor.details:
        raise RequestError(
            f"{at}.detail is {detail!r}; this model has one resolution, auto", f"{at}.detail",
            "unsupported_parameter",
        )  # fmt: skip
    return detail  # type: ignore[no-any-return]
