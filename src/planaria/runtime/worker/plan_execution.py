"""Execution of a step's plan by one worker, and the sum of gradients over the nodes of its stage.

Among the actions whose inputs have arrived, the one earliest in the plan runs first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from planaria.config.schema import ModelConfig, RunConfig
from planaria.control.facts import events as e
from planaria.control.facts.events import Span
from planaria.exchange.base import Update
from planaria.pipeline.plan.actions import Action, Key, StepPlan
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.runtime.worker.gradient_sums import sum_shares
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.received_frames import FrameId
from planaria.runtime.worker.runner import StageRunner

OnOutput = Callable[[Action, Tensor], None]
"""called with each action whose output is sent, and the output"""


class ReadyAction(NamedTuple):
    """An action and the frame that it needs, or None if its input is local."""

    action: Action
    input: FrameId | None


def execute_plan(
    plan: StepPlan, messages: PeerMessages, runner: StageRunner, spans: list[Span], on_output: OnOutput | None = None
) -> None:
    """Run the actions of this worker's node, and append a span for each to ``spans``.

    :raises Superseded: if the controller sends another order.
    """
    todo = [ReadyAction(a, messages.input_of(a)) for a in plan.actions.get(messages.assignment.node, ())]
    done = set[Key]()
    while todo:
        task = _first_ready(todo, done, messages)
        _act(task, messages, runner, spans, on_output)
        done.add(task.action.key)
        todo.remove(task)


def _first_ready(todo: list[ReadyAction], done: set[Key], messages: PeerMessages) -> ReadyAction:
    """Return the first action that can start; wait for one if there is none."""
    messages.handle_pending()
    ready: list[ReadyAction] = []

    def late() -> list[int]:
        senders: list[int] = []
        for task in todo:
            if not done.issuperset(task.action.after):
                continue
            if task.input is None or task.input in messages.frames_in:
                ready.append(task)
                return []
            senders = senders or [task.input.sender]
        return senders

    first = todo[0].action
    messages.wait_for(late, f"the {first.kind} of microbatch {first.microbatch} from {{}}")
    return ready[0]


def _act(
    task: ReadyAction, messages: PeerMessages, runner: StageRunner, spans: list[Span], on_output: OnOutput | None
) -> None:
    action, control_link = task.action, messages.control_link
    control_link.set_activity(action.kind, messages.assignment.step, action.microbatch, action.hop)
    control_link.reading.pop_seconds()
    start = time.monotonic()
    work = runner.forward if action.kind == "forward" else runner.backward
    out = work(action.microbatch, action.hop, None if task.input is None else messages.take(task.input))
    start += control_link.reading.pop_seconds()  # exclude the time spent reading the batch
    control_link.delay_if_slow()  # delays the output too
    if action.target is not None:
        assert out is not None
        messages.send(action, out)
        if on_output is not None:
            on_output(action, out)
    if control_link.reports_timings:
        end = time.monotonic()
        spans.append(Span(action=action.kind, microbatch=action.microbatch, hop=action.hop, start=start, end=end))


def combine_gradients(config: RunConfig, messages: PeerMessages, runner: StageRunner, spans: list[e.Span]) -> None:
    """Combine the gradients of the nodes with the same parameters, and append a span for it to ``spans``."""
    nodes = nodes_sharing_parameters(messages.assignment.present, config.model, messages.assignment.node)
    rule = messages.round_member.outer.exchange
    if len(nodes) == 1 or (config.exchange.replicas > 1 and not rule.exchanges_gradients):
        return
    messages.control_link.set_activity("exchange", messages.assignment.step)
    start = time.monotonic()
    if config.exchange.replicas > 1:
        exchange_gradients(messages, runner)
    else:
        add_shares(messages, runner, nodes)
    spans.append(e.Span(action="exchange", start=start, end=time.monotonic()))


def exchange_gradients(messages: PeerMessages, runner: StageRunner) -> None:
    """Exchange gradients with the other replicas, and apply the result.

    Reports invalid updates; the first replica also reports the weights of all.
    """
    outer, assignment = messages.round_member.outer, messages.assignment
    replicas = dict(enumerate(assignment.present.peers(assignment.node)))
    me = next(replica for replica, node in replicas.items() if node == assignment.node)
    others = {replica: node for replica, node in replicas.items() if replica != me}
    update = outer.update(runner, me)
    at = assignment.step, outer.settled.rounds
    updates = outer.publisher.updates(update, outer.exchange.codec(outer.settled), at, me, others)
    for replica, node in others.items():
        gradient = updates[replica].blocking
        assert gradient is not None
        messages.send_share(node, gradient)
    received = [*zip(others, messages.take_shares([*others.values()], None), strict=True)]
    messages.control_link.set_activity("settle", assignment.step)
    report = outer.settle({me: updates[me], **{replica: Update(flat) for replica, flat in received}}, me, runner)
    messages.report(report, assignment.step, first=me == 0)


def nodes_sharing_parameters(present: Arrangement, model: ModelConfig, node: int) -> tuple[int, ...]:
    """Return the nodes with the parameters of ``node``: those of its stage, or all if every stage has all weights."""
    return tuple(present.stage) if model.one_array else present.peers(node)


def add_shares(messages: PeerMessages, runner: StageRunner, nodes: Sequence[int]) -> None:
    """Add up the shares of ``nodes``, in their order, at the first of them."""
    first, *others = nodes
    sums = runner.gradient_sums()
    if messages.assignment.node == first:
        sums = sum_shares([sums, *messages.take_shares(others, sums)])
        for node in others:
            messages.send_share(node, sums)
    else:
        messages.send_share(first, sums)
        (sums,) = messages.take_shares([first], sums)
    runner.load_gradient_sums(sums)
