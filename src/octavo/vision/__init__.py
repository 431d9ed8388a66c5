"""Images as encoders take them; what computes them is a program (`octavo.models.vision`)."""

from octavo.vision.image import ImageInput

__all__ = ["ImageInput"]
