"""Metrics of steps and validations, folded from a run's events."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import Metric, StepMetric, ValidationMetric

MAX_OPEN_STEPS = 10_000
"""steps of several replicas that are kept in memory until they are complete"""
MAX_OPEN_VALIDATIONS = 100
"""the same for validations"""


@dataclass(frozen=True)
class _Part:
    """One replica's block of a step."""

    loss: float
    norms: dict[int, float]
    """stage → gradient norm"""


class StepMetrics:
    """Combines reports into one record per committed step and per validation.

    ``tokens_per_s`` is the throughput since the previous committed step, faults included.

    With R replicas, a step of the run consists of R blocks of samples, trained by any replicas. Its record comes with
    the last of their commits; loss and norms are means over the blocks, and the throughput is that of the last R
    commits. A validation's record is the mean over the live replicas after the same number of their own steps. The last
    validation, once all samples are used, counts for the run's last step.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._started: e.RunStarted | None = None
        self._replicas = 1
        self._ready: dict[int, dict[tuple[int, str], e.StageReady]] = defaultdict(dict)
        """replica → (stage, worker) → report of the current step"""
        self._commits: deque[float] = deque(maxlen=2)
        """times of the last commits; initially the start of training"""
        self._parts: dict[int, dict[tuple[int, int], _Part]] = defaultdict(dict)
        """step of the run → (replica, its own step) → committed block"""
        self._validation_step: dict[int, int] = {}
        """replica → step of its current validation"""
        self._validated: dict[int, dict[int, float]] = defaultdict(dict)
        """step → replica → loss"""
        self._live: set[int] = {0}
        self._founded_later: set[int] = set()
        """replicas founded during training, which count steps from 0: only their last validation is compared"""
        self._blocks_left = 0
        """number of uncommitted blocks"""
        self._saved_before = 0
        """steps before this one are in the last checkpoint but one"""

    def apply(self, t: float, fact: e.Event | d.Decision) -> Metric | None:
        """Return the metric that an event or a decision completes, or None if it completes none."""
        match fact:
            case e.RunStarted() if fact.max_replicas > 1:
                self._start(fact)
            case e.SaveFailed() if fact.worker == e.CONTROLLER:
                self._saved_before = 0
            case e.StageReady():
                self._ready[fact.replica][fact.stage, fact.worker] = fact
                if fact.loss is not None and fact.mode == "evaluate":
                    return self._apply_validation(t, fact, fact.loss)
            case d.RunStep():
                self._begin(t, fact)
            case d.Commit():
                return self._step_metric(t, fact)
            case _ if self._started is not None:
                return self._apply_replica_decision(t, fact, self._started)
        return None

    def _apply_validation(self, t: float, report: e.StageReady, loss: float) -> ValidationMetric | None:
        """Return the metric of a validation if this is its last report."""
        if self._replicas == 1:
            return ValidationMetric(t=t, step=report.step, val_loss=loss)
        step = self._validation_step.get(report.replica, report.step)
        if report.replica in self._founded_later and step != self._last_step:
            return None
        self._validated[step][report.replica] = loss
        _drop_oldest(self._validated, MAX_OPEN_VALIDATIONS)
        return self._validation_metric(t, [step])

    def _begin(self, t: float, run: d.RunStep) -> None:
        self._ready[run.replica].clear()
        if not self._commits:
            self._commits.append(t)
        last = self._last_step if self._blocks_left <= 0 else None
        self._validation_step[run.replica] = run.step if last is None else last

    def _start(self, started: e.RunStarted) -> None:
        self._started, self._replicas = started, started.replicas
        floor, beyond = started.used
        self._live, self._blocks_left = set(range(started.replicas)), started.last_block - floor - len(beyond)
        self._commits = deque(maxlen=started.replicas + 1)

    def _apply_replica_decision(
        self, t: float, decision: e.Event | d.Decision, started: e.RunStarted
    ) -> ValidationMetric | None:
        """Process a decision about one of several replicas."""
        if isinstance(decision, d.Form) and decision.is_rollback:
            self._undo(decision)
        elif isinstance(decision, d.Seal) and not decision.partial:  # no rollback reaches further back
            for step in [step for step in self._parts if step < self._saved_before]:
                del self._parts[step]
            self._saved_before = started.progress(decision.first_block)  # confirmed by the next checkpoint
        elif isinstance(decision, d.ReplicaRestarted):
            self._live.add(decision.replica)
            self._founded_later.add(decision.replica)
        elif isinstance(decision, d.Disband):
            self._live.discard(decision.replica)
            return self._validation_metric(
                t, [s for s, losses in self._validated.items() if decision.replica not in losses]
            )
        elif isinstance(decision, d.Finish) and self._validated:
            return self._last_validation(t)
        return None

    def _undo(self, form: d.Form) -> None:
        for by_commit in self._parts.values():
            for key in [key for key in by_commit if key[0] == form.replica and key[1] >= form.step]:
                del by_commit[key]
                self._blocks_left += 1

    def _step_metric(self, t: float, commit: d.Commit) -> StepMetric | None:
        self._commits.append(t)
        first, intervals = self._commits[0], len(self._commits) - 1
        ready = self._ready[commit.replica].values()
        losses_here = [r.loss for r in ready if r.loss is not None]
        loss = fmean(losses_here) if losses_here else math.nan  # members of a group need not report it
        part = _Part(loss, {r.stage: r.grad_norm for r in ready if r.grad_norm is not None})
        step = commit.step
        parts = [part]
        losses = {}
        if self._started is not None:
            step = commit.progress
            self._blocks_left -= 1
            self._parts[step][commit.replica, commit.step] = part
            _drop_oldest(self._parts, MAX_OPEN_STEPS)
            if len(self._parts[step]) < self._blocks(self._started, step):
                return None
            parts = list(self._parts[step].values())
            losses = self._losses(step)
        tokens = self._tokens * intervals / self._replicas
        stages = sorted({stage for block in parts for stage in block.norms})
        return StepMetric(
            t=t,
            step=step,
            loss=fmean(block.loss for block in parts),
            tokens_per_s=tokens / (t - first) if t > first else 0.0,
            grad_norm={stage: fmean(block.norms[stage] for block in parts if stage in block.norms) for stage in stages},
            losses=losses,
        )

    def _losses(self, step: int) -> dict[int, float]:
        """Return losses by replica; the mean of several blocks of one replica."""
        parts = self._parts[step]
        by_replica = {replica: [part.loss for key, part in parts.items() if key[0] == replica] for replica, _ in parts}
        return {replica: fmean(losses) for replica, losses in sorted(by_replica.items())}

    @staticmethod
    def _blocks(started: e.RunStarted, step: int) -> int:
        """Return the number of a step's blocks that earlier parts of the run have not used."""
        floor, beyond = started.used
        first = started.blocks_before(step)
        return sum(block >= floor and block not in beyond for block in range(first, first + started.replicas))

    def _validation_metric(self, t: float, steps: Iterable[int]) -> ValidationMetric | None:
        """Return the newest of these validations that all live replicas, or all initial ones, have completed."""
        initial = self._live - self._founded_later
        awaited = {step: self._live if step == self._last_step else initial for step in steps}
        complete = [step for step, replicas in awaited.items() if replicas <= self._validated[step].keys()]
        if not complete:
            return None
        losses = dict(sorted(self._validated[max(complete)].items()))
        return ValidationMetric(t=t, step=max(complete), val_loss=fmean(losses.values()), val_losses=losses)

    @property
    def _last_step(self) -> int | None:
        return self._started.steps if self._started else None

    def _last_validation(self, t: float) -> ValidationMetric | None:
        """Return the final validation; reuse that of replicas validated after their last step."""
        last = max(self._validated)
        missing = self._live - self._validated[last].keys()
        for replica in missing:
            validated = [step for step, losses in self._validated.items() if replica in losses]
            if validated:
                self._validated[last][replica] = self._validated[max(validated)][replica]
        return self._validation_metric(t, [last]) if missing else None


def _drop_oldest(steps: dict[int, Any], limit: int) -> None:
    """Drop the oldest steps, which receive no more reports."""
    if len(steps) > limit:
        del steps[min(steps)]
