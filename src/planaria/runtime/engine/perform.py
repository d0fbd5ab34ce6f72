"""A worker's part of a step: the actions of the plan, then one gradient with the other nodes of its stage.

The most preferred action whose input has arrived runs first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from planaria.config.schema import ModelConfig, RunConfig
from planaria.control import events as e
from planaria.control.events import Span
from planaria.exchange.base import Offer
from planaria.pipeline.plan.actions import Action, Key, Plan
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.runtime.engine.mail import Awaited
from planaria.runtime.engine.post import Post
from planaria.runtime.engine.runner import StageRunner, added

Passed = Callable[[Action, Tensor], None]
"""is told what each action hands on"""


class Task(NamedTuple):
    """An action, and the frame that it waits for; None if its input is local."""

    action: Action
    input: Awaited | None


def perform(plan: Plan, post: Post, runner: StageRunner, spans: list[Span], passed: Passed | None = None) -> None:
    """Carry out the actions of this worker's node; appends a span for each to ``spans`` as it ends.

    :raises Interrupted: when the controller wants something else meanwhile.
    """
    todo, done = [Task(a, post.input_of(a)) for a in plan.actions.get(post.here.node, ())], set[Key]()
    while todo:
        task = _first_ready(todo, done, post)
        _act(task, post, runner, spans, passed)
        done.add(task.action.key)
        todo.remove(task)


def _first_ready(todo: list[Task], done: set[Key], post: Post) -> Task:
    """The most preferred action that can begin, waiting for one if need be."""
    post.hear_all()
    found: list[Task] = []

    def late() -> list[int]:
        senders: list[int] = []
        for task in todo:
            if not done.issuperset(task.action.after):
                continue
            if task.input is None or task.input in post.mail:
                found.append(task)
                return []
            senders = senders or [task.input.sender]
        return senders

    first = todo[0].action
    post.wait_for(late, f"the {first.kind} of microbatch {first.microbatch} from {{}}")
    return found[0]


def _act(task: Task, post: Post, runner: StageRunner, spans: list[Span], passed: Passed | None) -> None:
    action, desk = task.action, post.desk
    desk.at(action.kind, post.here.step, action.microbatch, action.hop)
    desk.reading.newly()
    start = time.monotonic()
    work = runner.forward if action.kind == "forward" else runner.backward
    out = work(action.microbatch, action.hop, None if task.input is None else post.take(task.input))
    start += desk.reading.newly()  # a pass starts once its batch has been read
    desk.lag()  # before the output is sent
    if action.target is not None:
        assert out is not None
        post.send(action, out)
        if passed is not None:
            passed(action, out)
    if desk.reports_timings:
        end = time.monotonic()
        spans.append(Span(action=action.kind, microbatch=action.microbatch, hop=action.hop, start=start, end=end))


def agree(config: RunConfig, post: Post, runner: StageRunner, spans: list[e.Span]) -> None:
    """The nodes of a stage come to one gradient, where it has several; what that took is added to ``spans``."""
    nodes = adding(post.here.present, config.model, post.here.node)
    rule = post.circle.outer.exchange
    if len(nodes) == 1 or (config.exchange.replicas > 1 and rule.interval != 0):
        return
    post.desk.at("exchange", post.here.step)
    start = time.monotonic()
    if config.exchange.replicas > 1:
        exchange_gradients(post, runner)
    else:
        add_shards(post, runner, nodes)
    spans.append(e.Span(action="exchange", start=start, end=time.monotonic()))


def exchange_gradients(post: Post, runner: StageRunner) -> None:
    """Tell the other replicas what this one's gradient is, hear theirs, and take what the exchange makes of all.

    Report whose was of no use; the first replica's nodes, what each of the others counted.
    """
    outer, here = post.circle.outer, post.here
    replicas = dict(enumerate(here.present.peers(here.node)))
    me = next(replica for replica, node in replicas.items() if node == here.node)
    others = {replica: node for replica, node in replicas.items() if replica != me}
    own = outer.offer(runner, me)
    at = here.step, outer.settled.rounds
    said = outer.publisher.updates(own, outer.exchange.codec(outer.settled), at, me, others)
    for replica, node in others.items():
        post.send_share(node, _blocking(said[replica]))
    heard = [*zip(others, post.take_shares([*others.values()], None), strict=True)]
    post.desk.at("settle", here.step)
    verdict = outer.settle({me: said[me], **{replica: Offer(flat) for replica, flat in heard}}, me, runner)
    post.report(verdict, here.step, first=me == 0)


def _blocking(offer: Offer) -> Tensor:
    assert offer.blocking is not None
    return offer.blocking


def adding(there: Arrangement, model: ModelConfig, node: int) -> tuple[int, ...]:
    """The nodes that have the parameters of ``node``: those of its stage, or all where every stage has all of them."""
    return tuple(there.stage) if model.one_array else there.peers(node)


def add_shards(post: Post, runner: StageRunner, nodes: Sequence[int]) -> None:
    """``nodes`` with the same parameters add up what each has of a step: at the first, in their order."""
    first, *others = nodes
    own = runner.share()
    if post.here.node == first:
        own = added([own, *post.take_shares(others, own)])
        for node in others:
            post.send_share(node, own)
    else:
        post.send_share(first, own)
        (own,) = post.take_shares([first], own)
    runner.absorb(own)
