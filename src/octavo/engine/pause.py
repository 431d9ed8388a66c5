"""When a sequence is looked at for drafts: always, until none was worth verifying for a while."""

from __future__ import annotations

import math

STRETCH = 4  # steps without a draft, for each that then goes unseen before the next look
LONGEST = 8  # steps that may go unseen, of a sequence alone


class Pause:
    """Until when nobody looks for drafts of a sequence, by the steps that its engine has computed.

    Looking takes up to a percent of a step. Where nothing is worth verifying that is saved: after a
    stretch of steps without a draft nobody looks for a quarter as many, of `LONGEST` at most. What
    a draft of one of n streams wins is an nth of a step, and looking takes as long as ever: if both
    are to be as much, pauses grow as the root of n. Looks come at multiples of their distance, so
    that sequences are looked at together: what they may win together pays where what one may win
    does not.
    """

    __slots__ = ("_since", "_until")

    def __init__(self, step: int) -> None:
        self._since = step  # when a draft was verified last, at first when it came
        self._until = step  # of the next look

    def over(self, step: int) -> bool:
        """True if the call that begins at this step looks."""
        return step >= self._until

    def looked(self, step: int, found: bool, streams: int) -> None:
        """Sets the next look, after one at this step. found: a draft is verified, so that there is
        no pause. streams: sequences of the step."""
        if found:
            self._since = step
        period = 1 + min(LONGEST, (step - self._since) // STRETCH) * math.isqrt(streams)
        self._until = (step // period + 1) * period

    def end(self) -> None:
        """The next call looks. The stretch goes on."""
        self._until = self._since
