"""Default sampling parameters of a model."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.sampling import read_sampling
from octavo.engine.request import SamplingParams
from octavo.errors import CheckpointError, RequestError

GenerationConfig = Literal["auto", "none"]


def default_params(
    checkpoint: Checkpoint, known: dict[str, Any], source: GenerationConfig = "auto"
) -> SamplingParams:
    """The parameters in the model's files, overridden by `known`; with source "none", ours.

    Raises CheckpointError for values that no request could have.
    """
    if source == "none":
        return SamplingParams()
    try:
        params = msgspec.convert(read_sampling(checkpoint) | known, SamplingParams)
        params.check(1)
    except (msgspec.ValidationError, RequestError) as e:
        raise CheckpointError(
            f"{checkpoint.path.name} has sampling parameters that cannot be used: {e}",
            f"octavo serve {checkpoint.path} --generation-config none",
        ) from None
    return params
