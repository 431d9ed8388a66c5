"""Files on disk: metadata and lazy tensors, whatever the format."""

from octavo.checkpoint.base import Checkpoint, Computed, Stored, Tensor, TensorType
from octavo.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "Computed", "Stored", "Tensor", "TensorType", "open_checkpoint"]
