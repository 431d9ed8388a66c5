"""Model families: from a checkpoint's metadata to a program."""

from octavo.models.registry import ARCHITECTURES, build_program
from octavo.models.wrapped import build_vision

__all__ = ["ARCHITECTURES", "build_program", "build_vision"]
