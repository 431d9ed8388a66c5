"""The ends of requests that get no further token."""

from __future__ import annotations

import logging

from octavo.engine.events import NOT_COMPUTED, Ended
from octavo.engine.sequence import Sequence
from octavo.errors import place

LOG = logging.getLogger(__name__)


def failed(sequence: Sequence, error: Exception) -> Ended:
    """The end of a request that cannot be computed. Why, only the log says: the error's text may
    hold a prompt's."""
    LOG.error("request %s could not be computed: %s", sequence.id, place(error))
    return Ended(sequence.id, "error", NOT_COMPUTED, sequence.cached, sequence.times)


def refused(sequence: Sequence, error: str, param: str | None, code: str | None = None) -> Ended:
    return Ended(
        sequence.id, "refused", error[:200], sequence.cached, sequence.times, param,
        code or "constraint_failed",
    )  # fmt: skip
