"""The ``inline`` engine: all stages in this process, a plan's actions in one fixed topological order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from planaria.config import RunConfig
from planaria.data.stream import Stream
from planaria.engine.batches import batches
from planaria.engine.runner import StageRunner
from planaria.plan.actions import Key, Plan
from planaria.plan.build import plan_for
from planaria.plan.order import topological_order
from planaria.recovery import recovery
from planaria.recovery.base import Unrecoverable
from planaria.routing import routing


@dataclass(frozen=True)
class StepResult:
    """One committed step: mean loss in nats, and every stage's gradient norm before clipping."""

    step: int
    loss: float
    grad_norms: dict[int, float]


class InlineEngine:
    """A replica in one process. ``step`` is the number of committed steps."""

    def __init__(self, config: RunConfig, train: Stream, validation: Stream | None = None) -> None:
        self.config = config
        self.step = 0
        self.runners = {stage: StageRunner(config, stage) for stage in range(config.pipeline.stages + 1)}
        self._train, self._validation = train, validation
        self._recovery = recovery(config.recovery)
        self._route = routing(config.pipeline.routing)

    def train_step(self) -> StepResult:
        """Run and commit one step."""
        pipeline = self.config.pipeline
        plan = plan_for(pipeline, self._route(pipeline.stages, pipeline.microbatches, self.step))
        loss = self._carry_out(plan, self._train, self.step * pipeline.samples, train=True)
        norms = {stage: runner.finish() or 0.0 for stage, runner in self.runners.items()}
        for runner in self.runners.values():
            runner.commit(self.step)
        result = StepResult(self.step, loss, norms)
        self.step += 1
        return result

    def evaluate(self) -> float:
        """Mean validation loss over the recipe's validation microbatches, in nats."""
        assert self._validation is not None, "the engine was made without a validation stream"
        pipeline, count = self.config.pipeline, self.config.train.eval_microbatches
        plan = plan_for(pipeline, routing("full")(pipeline.stages, count, self.step), backward=False)
        return self._carry_out(plan, self._validation, 0, train=False)

    def lose(self, stages: Sequence[int]) -> str:
        """The state of ``stages`` is gone; rebuild them from the survivors as the recipe's strategy says.

        Returns why the strategy cannot (the survivors are untouched then), or nothing.
        """
        donors = self._recovery.donors(frozenset(stages), self.config.pipeline.stages)
        if isinstance(donors, Unrecoverable):
            return donors.reason
        given = {d: self.runners[d].donor() for helpers in donors.values() for d in helpers}
        for stage, helpers in donors.items():
            weights = self._recovery.rebuild(stage, {d: given[d] for d in helpers})
            self.runners[stage].reborn(weights, self._recovery.lr_scale)
        return ""

    def _carry_out(self, plan: Plan, stream: Stream, first_sample: int, train: bool) -> float:
        batch = batches(stream, first_sample, self.config.pipeline.microbatch_size)
        for stage, runner in self.runners.items():
            runner.begin(batch if stage == 0 else None, train, len(plan.routes))
        messages: dict[Key, Tensor] = {}
        for action in topological_order(plan):
            given = messages.pop(action.needs) if action.needs is not None else None
            runner = self.runners[action.stage]
            out = getattr(runner, action.kind)(action.microbatch, action.hop, given)
            if action.target is not None:
                messages[action.key] = out
        loss = self.runners[0].loss
        assert loss is not None
        return loss
