"""Features that replace a worker's training step: their interface and registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from planaria.control.events import Span
from planaria.exchange.coded.worker import coded_steps
from planaria.pipeline.plan.actions import StepPlan
from planaria.runtime.engine.resolved_config import ResolvedRun
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import StepData


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


def step_work(resolved: ResolvedRun) -> StepWork | None:
    """Return the feature that runs training steps, or None if a step is a single plan.

    :raises UserError: if settings conflict with the feature.
    """
    return coded_steps(resolved)
