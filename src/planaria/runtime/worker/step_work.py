"""Interfaces of what replaces a worker's training step: coded steps, and training loops of members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts.events import Span
from planaria.pipeline.plan.actions import StepPlan
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import Injected, StepData


class StepWork(Protocol):
    """A training step that does not wait for late replicas."""

    @property
    def rounds(self) -> int:
        """Rounds in a step."""

    def plan(self, step: int, number: int) -> StepPlan:
        """Return the plan with which the ``number``-th node of a stage starts a step."""

    def run(
        self,
        messages: PeerMessages,
        runner: StageRunner,
        data: StepData,
        spans: list[Span],
        begun: Callable[[int], None],
    ) -> None:
        """Run a step and leave its gradient in ``runner``; call ``begun`` with the number of each round.

        :raises Superseded: if the controller cancels the step.
        """


class OwnLoop(StepWork, Protocol):
    """Steps, samples and stage of a process whose owner runs the training loop (``planaria.group``)."""

    def samples_of(self, order: d.RunStep, stage: int, injected: Injected | None = None) -> StepData:
        """Return the samples of a step; as of :class:`~planaria.runtime.worker.step_samples.RunSamples`."""

    def make_runner(self, config: RunConfig, stage: int, initialise: bool) -> StageRunner:
        """Return the runner of the owner's model."""

    def compute_ahead(self, block: int) -> None:
        """Let the owner compute the gradient of a block whose step is not ordered yet."""
