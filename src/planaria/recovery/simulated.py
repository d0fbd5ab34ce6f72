"""Control arms: restore a lost stage's own state, which is available only after a simulated loss.

No strategy can do so after a real failure, so the fleet refuses them. Comparisons use them to show
how a run would continue if less were lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from planaria.models.state import StageState
from planaria.recovery.base import Copy, DamagedReplica, RebuildInputs, RebuildPlan, Recovery


class SimulatedRecovery(Recovery, ABC):
    """Rebuild every lost stage, without donors."""

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> RebuildPlan:
        return RebuildPlan(dict.fromkeys(sorted(lost), ()))

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        raise LookupError("a simulated loss needs no donor")

    def rebuild(self, stage: int, donated: Mapping[int, StageState], at: RebuildInputs) -> StageState:
        """Return the part of the stage's state that survives the simulated loss.

        :raises LookupError: after a real loss.
        """
        if at.before is None:
            raise LookupError(f"stage {stage} was really lost; none of its state is left")
        return self.left(at.before.trained)

    @abstractmethod
    def left(self, before: StageState) -> StageState:
        """Return the part of the stage's state ``before`` its loss that remains."""


class Oracle(SimulatedRecovery):
    """Control that loses nothing: every stage is restored as it was, and only its replacement takes time.

    Its hours are a lower bound for a comparison, unless losing state helps training.
    """

    control: ClassVar[str] = "restores all state that a death destroys"
    exact: ClassVar[bool] = True

    def left(self, before: StageState) -> StageState:
        return before


class Reset(SimulatedRecovery):
    """Control that loses a stage's optimizer moments and clocks, and nothing else.

    Strategies that rebuild weights alone leave the optimizer fresh. With m = v = 0 and its bias correction, AdamW's
    first update of each weight has the size of the learning rate, lr · g / (|g| + ε). That alone may speed a run up or
    slow it down, so such strategies are compared with this control.
    """

    control: ClassVar[str] = "restores the weights that a death destroys"

    def left(self, before: StageState) -> StageState:
        return before.part(lambda name: True, moments=False)
