"""The parameters of requests that name none."""

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
    """Those of the model's files, and over them what is `known` of it; "none": nobody's.

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
