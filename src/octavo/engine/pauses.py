"""Which calls look for drafts: all of them, until none was worth verifying for a while."""

from __future__ import annotations

STRETCH = 4  # steps without a draft, for each that then goes unseen before the next look
LONGEST = 8  # steps that may go unseen


class Pauses:
    """When an engine looks for drafts.

    Looking takes up to a percent of a step. Where nothing is worth verifying that is saved: after a
    stretch of steps without a draft nobody looks for a quarter as many, of `LONGEST` at most.
    """

    def __init__(self) -> None:
        self._steps = 0  # since a draft was verified
        self._until = 0  # of those, at which the next look is

    @property
    def over(self) -> bool:
        """True if the next call looks."""
        return self._steps >= self._until

    def looked(self, found: bool) -> None:
        """A call has looked for drafts. found: some are worth verifying."""
        self._steps = 0 if found else self._steps
        self._until = self._steps + 1 + min(LONGEST, self._steps // STRETCH)

    def took(self, steps: int) -> None:
        """A call has computed so many steps."""
        self._steps += steps

    def reset(self) -> None:
        """Forgets the stretch: something new has come."""
        self._steps = self._until = 0

    def end(self) -> None:
        """Ends the pause, if there is one: the next call looks. The stretch goes on."""
        self._until = 0
