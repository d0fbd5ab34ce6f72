"""The ``inline`` engine: all stages in this process, a plan's actions in one fixed topological order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from planaria.config import RunConfig
from planaria.data.stream import Stream
from planaria.engine.batches import batches
from planaria.engine.keeping import Keeping
from planaria.engine.rebirth import workshop
from planaria.engine.runner import StageRunner
from planaria.model.packing import pack, unpack
from planaria.model.state import StageState
from planaria.plan.actions import Key, Plan
from planaria.plan.build import plan_for
from planaria.plan.order import topological_order
from planaria.recovery import recovery
from planaria.recovery.base import Moment
from planaria.recovery.chain import Plan as RecoveryPlan
from planaria.routing import full, routes, without


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
        self.keeping = {stage: Keeping(config, stage, StageRunner) for stage in self.runners}
        self.parcel_bytes = 0
        """bytes of all messages that keep copies, so far"""
        self.moved_bytes = 0
        """bytes that donors gave to lost stages, so far"""
        self.skipped: set[int] = set()
        """block stages that training does without until they are rebuilt"""
        self._ages = dict.fromkeys(self.runners, 0)
        self._rested: set[int] = set()
        self._train, self._validation = train, validation
        self._chain = recovery(config.recovery, config.pipeline.stages)

    def train_step(self) -> StepResult:
        """Run and commit one step."""
        pipeline = self.config.pipeline
        plan = plan_for(pipeline, without(routes(self.config, self.step), self.skipped))
        present = {stage: runner for stage, runner in self.runners.items() if stage not in self.skipped}
        self._deliver("before")
        loss = self._carry_out(plan, self._train, self.step * pipeline.samples, train=True)
        norms = {stage: runner.finish() or 0.0 for stage, runner in present.items()}
        self._deliver("after")
        for stage, runner in present.items():
            runner.commit(self.step)
            self.keeping[stage].commit(self.step)
        self._grow_older()
        result = StepResult(self.step, loss, norms)
        self.step += 1
        return result

    def evaluate(self) -> float:
        """Mean validation loss over the recipe's validation microbatches, in nats."""
        assert self._validation is not None, "the engine was made without a validation stream"
        pipeline, count = self.config.pipeline, self.config.train.eval_microbatches
        plan = plan_for(pipeline, without(full(pipeline.stages, count), self.skipped), backward=False)
        return self._carry_out(plan, self._validation, 0, train=False)

    def lose(self, stages: Sequence[int]) -> RecoveryPlan:
        """The state of ``stages`` is gone, with all that was kept there; rebuild them as the recipe's strategies say.

        Returns what was done. Where that is a rollback, or nothing can be done, the survivors are untouched.
        """
        plan = self._chain.plan(frozenset(stages), self._ages)
        rebuilt = {}
        for stage, (by, donors) in plan.rebuilt.items() if not plan.reason else ():
            given = {donor: self._given(by, stage, donor) for donor in donors}
            rebuilt[stage] = self._chain.rebuild(by, stage, given, workshop(self.config, stage, self.step))
        self.become(rebuilt)
        return plan

    def _given(self, by: str, stage: int, donor: int) -> StageState:
        """What ``donor`` gives to the lost ``stage``, as it would arrive there."""
        kept = self.keeping[donor].kept(by, stage)
        flat = pack(self._chain.give(by, stage, self.runners[donor].state(), kept))
        self.moved_bytes += flat.nbytes
        return unpack(flat)

    def become(self, states: Mapping[int, StageState]) -> None:
        """These stages get these states, and with them new holders, who keep nothing of others yet."""
        for stage, state in states.items():
            self.runners[stage].load(state)
            self.keeping[stage] = Keeping(self.config, stage, StageRunner)
            self._ages[stage] = 0
        self.skip(self.skipped - set(states), set(states))

    def skip(self, stages: Collection[int], reborn: Collection[int] = ()) -> None:
        """Train on without ``stages``, whose state is gone, until they :meth:`become` something."""
        self.skipped = set(stages)
        for keeping in self.keeping.values():
            keeping.formed(set(reborn), self.skipped)

    def _grow_older(self) -> None:
        """One commit more for whoever keeps copies; as in ``control.apply``, none while stages are skipped."""
        self._rested |= self.skipped
        if not self.skipped:
            copies = [slot.copy for slot in self._chain.slots]
            anew = {stage for copy in copies if self._rested & set(copy) for stage in copy}
            self._ages = {stage: 1 if stage in anew else age + 1 for stage, age in self._ages.items()}
            self._rested.clear()

    def _deliver(self, moment: Moment) -> None:
        """Hand over what is sent at this moment of the step."""
        for stage, keeping in self.keeping.items():
            if stage in self.skipped:
                continue
            send = keeping.before if moment == "before" else keeping.after
            for host, parcel, message in send(self.step, self.runners[stage]):
                self.parcel_bytes += message.nbytes
                self.keeping[host].take(self.step, parcel, message)

    def _carry_out(self, plan: Plan, stream: Stream, first_sample: int, train: bool) -> float:
        batch = batches(stream, first_sample, self.config.pipeline.microbatch_size)
        for stage, runner in self.runners.items():
            runner.begin(batch if stage == 0 else None, train, len(plan.routes))
        messages: dict[Key, Tensor] = {}
        for action in topological_order(plan):
            given = messages.pop(action.needs) if action.needs is not None else None
            runner = self.runners[action.node]
            out = getattr(runner, action.kind)(action.microbatch, action.hop, given)
            if action.target is not None:
                messages[action.key] = out
                if train:
                    self.keeping[action.node].passed(action, out)
        loss = self.runners[0].loss
        assert loss is not None
        return loss
