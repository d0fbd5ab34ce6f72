"""One arm of a comparison with one seed, trained on the reference engine under the trace that all arms share.

Time is counted in *ticks*, executed steps. A rollback undoes steps, never ticks: the same failures occur in every arm
after the same amount of work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch

from planaria.common.documents import Record, former_names
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import PEER
from planaria.data.shards import Data
from planaria.data.stream import Stream
from planaria.lab.compare.rollback import PendingSave
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.state import StageState


class ValidationPoint(Record):
    """A validation: executed and committed steps so far, and the loss in nats."""

    tick: int
    step: int
    loss: float


class LossEvent(Record):
    """A loss of stages before a tick, and its recovery."""

    tick: int
    stages: list[int]
    """stages; with several replicas, numbers of their nodes"""
    outcome: str
    """recovery of each ('3: checkfree'; '3: peer', from another replica), or the step that all rolled back to"""
    moved_bytes: int
    """bytes sent by donors"""
    rolled_back: bool
    """whether training rolled back to a checkpoint"""
    steps_lost: int
    """steps undone by a rollback, to a checkpoint or to memory"""


class ArmCourse(Record):
    """The course of one arm with one seed."""

    _former = former_names(loss_events="met")
    points: list[ValidationPoint]
    loss_events: list[LossEvent]
    ticks: int
    saved: list[int]
    """ticks after which all stages were saved"""
    stopped: str = ""
    """why the arm stopped; empty if it reached its budget"""


class _Race:
    """The engine, its checkpoints in memory, and the record of its course."""

    def __init__(self, config: RunConfig, dataset: Data, behind: int) -> None:
        self.config = config
        self._pending_save = PendingSave(behind)
        train, validation = (
            Stream(dataset, split, config.model.context, config.seed) for split in ("train", "validation")
        )
        self.engine = ReferenceEngine(config, train, validation)
        self._kept: dict[int, Mapping[int, StageState]] = {0: self._states()}
        """committed steps → states, durable or being written"""
        self._durable = 0
        self.points: list[ValidationPoint] = []
        self.loss_events: list[LossEvent] = []
        self.saved: list[int] = []
        self.tick = 0

    def _states(self) -> dict[int, StageState]:
        replicas, runners = self.engine.replicas, self.engine.runners
        return {n: copy.deepcopy(replicas.state(n) if replicas else runner.state()) for n, runner in runners.items()}

    def lose(self, nodes: Sequence[int]) -> str:
        """Lose nodes and recover as the recipe specifies; return why that is impossible; empty if it is possible."""
        before, step_before = self.engine.moved_bytes, self.engine.step
        self._pending_save.abort()
        plan = self.engine.lose(nodes, self._durable)
        if plan.reason:
            return f"tick {self.tick}: {plan.reason}"
        recovered_by = {node: plan.rebuilt.get(self.engine.stage[node], (PEER, ()))[0] for node in nodes}
        outcome = ", ".join(f"{node}: {by}" for node, by in recovered_by.items())
        lost = 0
        if plan.rollback == "disk":
            self.engine.step = self._durable
            self.engine.load_states(self._kept[self._durable])
        if plan.rollback:
            lost, outcome = step_before - self.engine.step, f"all: step {self.engine.step}"
        rolled_back = plan.rollback == "disk"
        self.loss_events.append(
            LossEvent(
                tick=self.tick,
                stages=list(nodes),
                outcome=outcome,
                moved_bytes=self.engine.moved_bytes - before,
                rolled_back=rolled_back,
                steps_lost=lost,
            )
        )
        return ""

    def run_tick(self) -> None:
        """Train one step; validate and save when the number of committed steps requires it."""
        self.engine.train_step()
        self.tick += 1
        step, every, save = self.engine.step, self.config.train.eval_every, self.config.checkpoint.every
        if step % every == 0:
            self.points.append(ValidationPoint(tick=self.tick, step=step, loss=self.engine.evaluate()))
        assert save != "best", "to be resolved before the race"
        self._durable = self._pending_save.newest_durable(self.tick, self._durable)
        if save and self._pending_save.due(step, save, self._durable):
            self._kept[step] = self._states()
            self.saved.append(self.tick)
            self._durable = self._pending_save.begin(self.tick, step, self._durable)
        self._kept = {step: states for step, states in self._kept.items() if step >= self._durable}


def race(
    config: RunConfig,
    dataset: Data,
    faults: Mapping[int, Sequence[int]],
    report: Callable[[int, float | None], None],
    behind: int = 0,
) -> ArmCourse:
    """Train ``config`` for ``config.train.steps`` ticks; ``faults`` are the nodes lost before each tick.

    ``report`` gets every tick, with the loss if it was validated. Checkpoints are durable ``behind`` ticks after they
    were begun, if nothing is lost meanwhile. Losses before the first tick are skipped: every stage still has its
    initial weights.
    """
    torch.set_num_threads(1)
    run, stopped = _Race(config, dataset, behind), ""
    while run.tick < config.train.steps and not stopped:
        if run.tick and faults.get(run.tick):
            stopped = run.lose(sorted(set(faults[run.tick])))
        if not stopped:
            run.run_tick()
            last = run.points[-1] if run.points else None
            report(run.tick, last.loss if last and last.tick == run.tick else None)
    return ArmCourse(points=run.points, loss_events=run.loss_events, ticks=run.tick, saved=run.saved, stopped=stopped)
