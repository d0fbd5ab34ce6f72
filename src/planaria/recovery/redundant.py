"""Redundant computation (after Bamboo, arXiv 2204.12013): the previous stage's worker runs every stage a second time.

It holds a twin of its successor, with weights and optimizer. In every step it also computes the successor's forward
pass and receives the successor's gradient. The twin applies the same update in the same commit, so it equals the lost
stage bit for bit. Stage 0 holds the first block stage's twin; the last block stage holds stage 0's.

planaria replays the step in which a stage fails, so exactness needs the gradient only. Without ``forward`` the twin
costs memory and bytes, and no computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from planaria.models.packing import pack, unpack
from planaria.models.state import StageShapes, StageState
from planaria.pipeline.network.costs import FP32_BYTES
from planaria.recovery.base import Copy, CopyCost, Holder, Moment, Original, Sender, Twin, numel
from planaria.recovery.hosted import HostedCopy


class Redundant(HostedCopy):
    """Keep a twin of each stage at the previous stage."""

    exact: ClassVar[bool] = True
    label: ClassVar[str] = "twin"
    caption: ClassVar[str] = "{donors} has computed {stage} as well, and sends its copy"
    advised_variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}, ", gradients only": {"forward": False}}
    forward: bool = True
    """compute the successor's forward pass too, as published; not needed for exactness"""

    def host(self, stage: int, stages: int) -> int:
        return (stage - 1) % (stages + 1)

    def sender(self, copy: Copy, stage: int) -> Sender:
        return TwinSender()

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        ((stage, original),) = originals.items()
        return TwinHolder(original, self.forward and stage != 0)

    def cost(self, copy: Copy, shapes: Mapping[int, StageShapes]) -> CopyCost:
        ((stage, parameters),) = shapes.items()
        size = FP32_BYTES * numel(parameters)
        return CopyCost(size, 3 * size, forward=self.forward and stage != 0, module=True)


class TwinSender(Sender):
    """Sends the whole state once to a new twin, then each step's gradient."""

    def message_before_step(self, step: int, state: StageState) -> Tensor | None:
        return pack(state.trained) if self.restarted else None

    def message_after_gradient(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        return pack(gradients)


class TwinHolder(Holder):
    """Keeps the twin in step with its original."""

    def __init__(self, original: Original, forward: bool) -> None:
        self._original, self._forward = original, forward
        self._twin: Twin | None = None
        self._start: StageState | None = None
        self._gradients: StageState | None = None

    @property
    def nbytes(self) -> int:
        return self._twin.nbytes if self._twin else 0

    def expects(self, step: int) -> tuple[Moment, ...]:
        return ("before", "after") if self.restarted else ("after",)

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        if moment == "before":
            self._start = unpack(message)
        else:
            self._gradients = unpack(message)

    def on_forward_output(self, microbatch: int, x: Tensor) -> None:
        """Compute the original's forward pass, once the twin has a state."""
        if self._forward and self._twin is not None:
            self._twin.forward_copy(microbatch, x)

    def commit(self, step: int) -> None:
        """Apply the original's update to the twin."""
        assert self._gradients is not None
        if self._twin is None:
            self._twin = self._original.twin()
        if self._start is not None:
            self._twin.load(self._start)
        self._twin.apply(step, self._gradients)
        self.restarted = False
        self.drop()

    def drop(self) -> None:
        self._start = self._gradients = None
        if self._twin is not None:
            self._twin.drop()

    def state(self) -> StageState:
        assert self._twin is not None, "no twin before the first commit"
        return self._twin.state().trained
