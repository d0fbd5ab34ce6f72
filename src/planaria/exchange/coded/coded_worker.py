"""A coded step in a worker: replicas compute redundant tasks in rounds, and stragglers are not needed.

A task's gradient is Σ w_j g_j over its microbatches j. The weight multiplies the loss before the backward pass, so that
every stage gets its part of the sum at no extra cost. A step's gradient is a sum of such gradients
(``exchange/coded/``). Both engines run the same tasks and sum in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.control.facts import events as e
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.coded.base import MiniTask
from planaria.exchange.coded.coded_facts import CloseRound, ResultsSent
from planaria.exchange.coded.coding import Coding, CountedReplicas, SentVector, make_coding
from planaria.pipeline.plan.actions import StepPlan
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.control_link import Superseded
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.plan_execution import execute_plan
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import StepData, StepInputs

T = TypeVar("T")


class NodeTask(NamedTuple):
    """One task of a replica's node."""

    number: int
    """number among all tasks that a replica may have in the step"""
    task: MiniTask
    plan: StepPlan
    """its passes, numbered from 0"""
    microbatches: list[int]
    """microbatch of the step for each pass"""
    weights: list[float]
    """weight of each pass"""


@dataclass(frozen=True)
class CodedSteps:
    """The coded steps of a run."""

    coding: Coding
    resolved: ResolvedRun
    microbatches: int
    """microbatches per step, over all replicas"""

    @property
    def rounds(self) -> int:
        """Rounds in a step."""
        return self.coding.rounds

    def plan(self, step: int, number: int) -> StepPlan:
        """Return the plan of a replica's first task of a step."""
        return next(self.tasks_of(step, (), number)).plan

    def run(
        self,
        messages: PeerMessages,
        runner: StageRunner,
        data: StepData,
        spans: list[e.Span],
        begun: Callable[[int], None],
    ) -> None:
        """Run a step (``StepWork.run``)."""
        CodedRounds(self, messages, runner, data, spans).run(begun)

    def tasks_of(self, step: int, counted: CountedReplicas, replica: int) -> Iterator[NodeTask]:
        """Yield ``replica``'s tasks in the round after those in ``counted``."""
        size, first = self.microbatches // self.coding.chunks, len(counted) * self.coding.scheme.slots()
        for number, assigned in enumerate(self.coding.tasks_of(counted, replica), first):
            passes = [(chunk * size + i, weight) for chunk, weight in assigned.chunks for i in range(size)]
            microbatches = [microbatch for microbatch, _ in passes]
            plan = self.resolved.plan_of_replica(step, replica, microbatches)
            yield NodeTask(number, assigned.task, plan, microbatches, [weight for _, weight in passes])

    def begin(self, runner: StageRunner, work: NodeTask, data: StepData) -> None:
        """Prepare ``runner`` for a task."""
        batch, masks = _reindex(data.batch, work.microbatches), _reindex(data.masks, work.microbatches)
        counts = None if data.target_counts is None else data.target_counts.renumbered(work.microbatches)
        lengths = _reindex(data.lengths, work.microbatches)
        runner.begin(StepInputs(batch, True, self.microbatches, masks, work.weights, counts, lengths))

    def part(self, sent: SentVector) -> int:
        """Return the number of a vector among all that a node may send in a step."""
        return (sent.round * self.coding.jobs + sent.job) * self.coding.scheme.vectors() + sent.vector

    def absorb(
        self, runner: StageRunner, data: StepData, counted: CountedReplicas, vector: Callable[[SentVector], Tensor]
    ) -> None:
        """Replace the node's gradient with the step's, after its last round.

        :param vector: returns a vector sent by all nodes of its stage (:meth:`StageRunner.gradient_sums`).
        """
        runner.begin(StepInputs(microbatches=self.microbatches, target_counts=data.target_counts))
        total = torch.zeros_like(runner.gradient_sums())
        for sent, coefficient in self.coding.decoding_terms(counted):
            total.add_(vector(sent), alpha=coefficient)
        runner.load_gradient_sums(total)


class PartialSums:
    """A node's partial sums of vectors to send; each is the sum of some tasks' gradients."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._new: dict[tuple[int, int], Tensor] = {}
        self.sent: dict[SentVector, Tensor] = {}

    def add(self, task: MiniTask, replica: int, round: int, share: Tensor) -> Tensor | None:
        """Add a task's gradient; return the vector to send now, if any."""
        key = task.job, task.vector
        before = self._new.get(key, self._kept.get(key))
        self._new[key] = total = share if before is None else before + share
        if not task.sent:
            return None
        self.sent[SentVector(replica, round, *key)] = total
        return total

    def close(self, counts: bool) -> None:
        """End the round; drop its work unless it ``counts``."""
        if counts:
            self._kept |= self._new
        self._new.clear()


def coded_steps(resolved: ResolvedRun) -> CodedSteps | None:
    """Return the coded steps of a run, or None if every step waits for all replicas.

    :raises UserError: for a setting that conflicts with a code.
    """
    config = resolved.config
    coding = make_coding(config.exchange)
    if coding is None:
        return None
    rule = resolved.exchange
    rounded = isinstance(rule, AggregatingExchange) and not rule.compression.exact
    reasons = (
        (not rule.exchanges_gradients, "needs an exchange of gradients in every step; set exchange.kind = 'allreduce'"),
        (rounded, "cannot be combined with exchange.compress or options.bits: coded messages are sums of gradients"),
        (bool(config.exchange.robust), "cannot be combined with exchange.robust: coded messages are sums of gradients"),
        (config.routing.mixed, "does not support routing.mixed; remove it"),
        (config.recovery.meanwhile == "skip", "needs all stages of a replica; set recovery.meanwhile = 'wait'"),
    )
    for wrong, why in reasons:
        if wrong:
            raise UserError(f"exchange.coded {why}")
    replicas, microbatches = config.exchange.replicas, config.pipeline.microbatches
    coding.coded.require(replicas, microbatches)
    return CodedSteps(coding, resolved, microbatches * replicas)


def _reindex(item_at: Callable[[int], T] | None, indices: Sequence[int]) -> Callable[[int], T] | None:
    """Return a function that maps i to the item at ``indices[i]``."""
    return None if item_at is None else lambda i: item_at(indices[i])


class CodedRounds:
    """A worker's part in the rounds of one coded step."""

    def __init__(
        self, steps: CodedSteps, messages: PeerMessages, runner: StageRunner, data: StepData, spans: list[e.Span]
    ) -> None:
        """Each action's span is appended to ``spans``."""
        self._steps = steps
        self._messages = messages
        self._runner = runner
        self._data = data
        self._spans = spans
        nodes = messages.assignment.present.peers(messages.assignment.node)
        self._others = {replica: node for replica, node in enumerate(nodes) if node != messages.assignment.node}
        self._counted: CountedReplicas = ()
        self._sums = PartialSums()

    def run(self, begun: Callable[[int], None]) -> None:
        """Run the tasks of all rounds until the controller ends each, then apply the step's gradient.

        :param begun: called with the number of each round.
        :raises Superseded: when the controller cancels the step.
        """
        assignment = self._messages.assignment
        while len(self._counted) < self._steps.coding.rounds:
            begun(len(self._counted))
            counted = frozenset(self._round().counted)
            self._sums.close(assignment.number in counted)
            self._counted = (*self._counted, counted)
        start = time.monotonic()
        self._messages.control_link.set_activity("exchange", assignment.step)
        self._steps.absorb(self._runner, self._data, self._counted, self._vector)
        self._spans.append(e.Span(action="exchange", start=start, end=time.monotonic()))

    def _round(self) -> CloseRound:
        """Work until the controller ends the round."""
        assignment = self._messages.assignment
        try:
            for work in self._steps.tasks_of(assignment.step, self._counted, assignment.number):
                self._messages.first_pass = work.number * self._steps.microbatches
                self._steps.begin(self._runner, work, self._data)
                execute_plan(work.plan, self._messages, self._runner, self._spans)
                round, share = len(self._counted), self._runner.gradient_sums()
                if (vector := self._sums.add(work.task, assignment.number, round, share)) is not None:
                    part = self._steps.part(SentVector(assignment.number, round, work.task.job, work.task.vector))
                    for node in self._others.values():
                        self._messages.send_share(node, vector, part)
            assignment.report(ResultsSent, round=len(self._counted))
            self._messages.control_link.set_activity("exchange", assignment.step)
            while True:
                self._messages.handle(self._messages.control_link.next())
        except Superseded as interrupted:
            order = interrupted.order
            if isinstance(order, CloseRound) and (order.generation, order.step) == (
                assignment.generation,
                assignment.step,
            ):
                return order
            raise

    def _vector(self, sent: SentVector) -> Tensor:
        """Return the vector of a node of this stage in a counted round, waiting for other nodes' vectors."""
        if sent.replica == self._messages.assignment.number:
            return self._sums.sent[sent]
        like, node = self._runner.gradient_sums(), self._others[sent.replica]
        return self._messages.take_shares([node], like, self._steps.part(sent))[0]
