"""How a worker carries out its part of a plan: always the most preferred action whose input is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from planaria.control.events import Span
from planaria.pipeline.plan.actions import Action, Key, Plan
from planaria.runtime.engine.mail import Awaited
from planaria.runtime.engine.post import Post
from planaria.runtime.engine.runner import StageRunner

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
        spans.append(_act(task, post, runner, passed))
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


def _act(task: Task, post: Post, runner: StageRunner, passed: Passed | None) -> Span:
    action = task.action
    post.desk.at(action.kind, post.here.step, action.microbatch, action.hop)
    post.desk.reading.newly()
    start = time.monotonic()
    work = runner.forward if action.kind == "forward" else runner.backward
    out = work(action.microbatch, action.hop, None if task.input is None else post.take(task.input))
    start += post.desk.reading.newly()  # a pass begins when its batch is there, as it does with its input
    post.desk.lag()  # before anybody has what it made
    if action.target is not None:
        assert out is not None
        post.send(action, out)
        if passed is not None:
            passed(action, out)
    return Span(action=action.kind, microbatch=action.microbatch, hop=action.hop, start=start, end=time.monotonic())
