"""What controls have in common: they give a lost stage its own state back, which only a simulated loss leaves there.

No strategy could do that after a real death. So these are refused on the fleet, and are arms of comparisons only: what
a race would be like if less were lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from planaria.models.state import StageState
from planaria.recovery.base import Answer, Copy, Recovery, Replica, Workshop


class Simulated(Recovery, ABC):
    """Every loss is within its reach, and nobody gives anything."""

    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        return Answer(dict.fromkeys(sorted(lost), ()))

    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        raise LookupError("nobody gives anything")

    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        """:raises LookupError: after a real loss."""
        if at.before is None:
            raise LookupError(f"stage {stage} is lost in earnest: nothing of it is left")
        return self.left(at.before.trained)

    @abstractmethod
    def left(self, before: StageState) -> StageState:
        """What of the stage's state ``before`` its loss is there after it."""


class Oracle(Simulated):
    """The control that loses nothing: every stage comes back as it was, and only its replacement takes time.

    Its hours are the floor of a comparison. No strategy can take fewer under the same failures, unless losing something
    helps the training.
    """

    control: ClassVar[str] = "gives back all that a death destroys"
    exact: ClassVar[bool] = True

    def left(self, before: StageState) -> StageState:
        return before
