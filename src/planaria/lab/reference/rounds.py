"""Rounds of coded steps in one process; each node computes what a worker does (``exchange/coded/coded_worker.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from planaria.exchange.coded.coded_worker import CodedSteps, PartialSums
from planaria.exchange.coded.coding import CountedReplicas
from planaria.pipeline.plan.actions import Action, Key, StepPlan, topological_order
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import StepData

Counts = Callable[[int, CountedReplicas], frozenset[int]]
"""(step, replicas counted in its rounds so far) → the replicas whose results count in the next round"""


class ReferenceRounds:
    """Runs the rounds of coded steps; ``counts`` determines which replicas are late."""

    def __init__(self, steps: CodedSteps, runners: Mapping[int, StageRunner]) -> None:
        self._steps, self._runners = steps, runners
        self.microbatches = steps.microbatches
        """in a step, over all replicas"""
        self.counts: Counts = lambda step, counted: frozenset(range(steps.coding.replicas))

    def run(self, step: int, samples_of: Callable[[int], StepData]) -> None:
        """Compute the gradient of ``step`` at every node; ``samples_of``: the required samples by stage."""
        arrangement, counted = self._steps.resolved.arrangement, CountedReplicas()
        sums = {node: PartialSums() for node in self._runners}
        while len(counted) < self._steps.coding.rounds:
            present = self.counts(step, counted)
            for replica in sorted(present):
                self._work(step, replica, counted, sums, samples_of)
            for own in sums.values():
                own.close(True)  # replicas that do not count have computed nothing here
            counted = (*counted, present)
        for stage in arrangement.stages:
            nodes = arrangement.nodes(stage)
            sent = {key: vector for node in nodes for key, vector in sums[node].sent.items()}
            for node in nodes:
                self._steps.absorb(self._runners[node], samples_of(stage), counted, sent.__getitem__)

    def _work(
        self,
        step: int,
        replica: int,
        counted: CountedReplicas,
        sums: Mapping[int, PartialSums],
        samples_of: Callable[[int], StepData],
    ) -> None:
        """Carry out one replica's tasks of a round."""
        arrangement = self._steps.resolved.arrangement
        column = {stage: arrangement.nodes(stage)[replica] for stage in arrangement.stages}
        for work in self._steps.tasks_of(step, counted, replica):
            for stage, node in column.items():
                self._steps.begin(self._runners[node], work, samples_of(stage))
            run_plan(work.plan, self._runners)
            for node in column.values():
                sums[node].add(work.task, replica, len(counted), self._runners[node].gradient_sums())


def run_plan(
    plan: StepPlan, runners: Mapping[int, StageRunner], on_message: Callable[[Action, Tensor], None] | None = None
) -> None:
    """Execute a plan with the ``runners`` of its nodes, already begun; ``on_message`` gets each message."""
    messages: dict[Key, Tensor] = {}
    for action in topological_order(plan):
        received = messages.pop(action.input_key) if action.input_key is not None else None
        out = getattr(runners[action.node], action.kind)(action.microbatch, action.hop, received)
        if action.target is not None:
            messages[action.key] = out
            if on_message is not None:
                on_message(action, out)
