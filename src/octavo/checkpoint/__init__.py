"""Files on disk: metadata and lazy tensors, whatever the format."""

from octavo.checkpoint.base import Checkpoint, Stored, Tensor, TensorType, Transposed
from octavo.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "Stored", "Tensor", "TensorType", "Transposed", "open_checkpoint"]
