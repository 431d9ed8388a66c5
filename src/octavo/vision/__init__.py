"""Images as encoders take them. How files become these is `preprocess` here; what computes them is a
program (`octavo.models.vision`)."""

from octavo.vision.image import ImageInput

__all__ = ["ImageInput"]
