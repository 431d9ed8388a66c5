"""Model families: from a checkpoint's metadata to a program."""

from octavo.models.registry import ARCHITECTURES, build_program

__all__ = ["ARCHITECTURES", "build_program"]
