"""Ablations and controls, with which strategies are compared.

Ablations rebuild a lost block stage as random weights, as the identity, or as a copy of a neighbour. A residual block
whose output projections are zero returns its input. It still learns, because the gradients of those projections are
not zero. The copy is one half of CheckFree's mean.

Controls restore a lost stage's own state, which is available only after a simulated loss, so the fleet rejects them.
They show how a run continues if less is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from planaria.models.state import StageState
from planaria.recovery.base import (
    ONLY_ENDS,
    Copy,
    DamagedReplica,
    RebuildInputs,
    Recovery,
    ScaledLearningRate,
    StrategyPlan,
    StrategyRequirements,
)

OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""output projections: the residual stream is linear in these weights"""


class Redraw(ScaledLearningRate):
    """Redraw the stage's weights at random."""

    pretrained_warning: ClassVar[str] = "a lost stage gets new random weights"
    caption: ClassVar[str] = "{stage} gets new random weights"

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        refused = {0: ONLY_ENDS} if 0 in lost else {}
        return StrategyPlan(dict.fromkeys(sorted(lost - {0}), ()), refused)

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        return StageState(self._initial_weights(inputs), lr_scale=self.lr_scale)

    def _initial_weights(self, inputs: RebuildInputs) -> dict[str, Tensor]:
        return dict(inputs.draw())


class IdentityStage(Redraw):
    """Start the stage as the identity: its output projections are zero."""

    requirements: ClassVar[StrategyRequirements] = StrategyRequirements(unshared=True)
    caption: ClassVar[str] = "{stage} is set to the identity"

    def _initial_weights(self, inputs: RebuildInputs) -> dict[str, Tensor]:
        weights = super()._initial_weights(inputs)
        return weights | {name: torch.zeros_like(w) for name, w in weights.items() if name.endswith(OUTPUTS)}


class CopyNeighbour(ScaledLearningRate):
    """Copy the previous stage, or the next one if the previous is lost or is stage 0."""

    requirements: ClassVar[StrategyRequirements] = StrategyRequirements(alike=True)
    pretrained_warning: ClassVar[str] = "a lost stage becomes its neighbour's copy"
    caption: ClassVar[str] = "{donors} sends its weights, which become the new {stage}"

    moments: Literal["fresh", "copy"] = "fresh"
    """optimizer moments of the rebuilt stage: zero, or the neighbour's"""

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        donors, refused = {}, {}
        for stage in sorted(lost):
            near = [s for s in (stage - 1, stage + 1) if 1 <= s <= replica.stages and s not in lost]
            if stage == 0:
                refused[stage] = ONLY_ENDS
            elif near:
                donors[stage] = (near[0],)
            else:
                refused[stage] = f"stage {stage} has no neighbour left to copy"
        return StrategyPlan(donors, refused)

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        return own.part(lambda name: True, self.moments == "copy")

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        (near,) = donated.values()
        return StageState(near.weights, near.moments, near.clocks, self.lr_scale)


class SimulatedRecovery(Recovery, ABC):
    """Rebuild every lost stage, without donors."""

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        return StrategyPlan(dict.fromkeys(sorted(lost), ()))

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        """Return the part of the stage's state that survives the simulated loss.

        :raises LookupError: after a real loss.
        """
        if inputs.before is None:
            raise LookupError(f"stage {stage}: the loss was not simulated, so none of its state is left")
        return self.surviving_part(inputs.before.trained)

    @abstractmethod
    def surviving_part(self, before: StageState) -> StageState:
        """Return the part of the stage's state ``before`` its loss that remains."""


class Oracle(SimulatedRecovery):
    """Control that loses nothing: every stage is restored as it was, and only its replacement takes time.

    Its hours are a lower bound for a comparison, unless losing state helps training.
    """

    control_description: ClassVar[str] = "restores all state that a death destroys"
    exact: ClassVar[bool] = True

    def surviving_part(self, before: StageState) -> StageState:
        return before


class Reset(SimulatedRecovery):
    """Control that loses a stage's optimizer moments and clocks, and nothing else.

    Strategies that rebuild weights alone leave the optimizer fresh. With m = v = 0 and its bias correction, AdamW's
    first update of each weight has the size of the learning rate, lr · g / (|g| + ε). That alone may speed a run up or
    slow it down, so such strategies are compared with this control.
    """

    control_description: ClassVar[str] = "restores the weights that a death destroys"

    def surviving_part(self, before: StageState) -> StageState:
        return before.part(lambda name: True, moments=False)
