"""Images as encoders take them, and how files become these. What computes them is a program
(`octavo.models.vision`)."""

from octavo.vision.image import ImageInput

__all__ = ["ImageInput"]
