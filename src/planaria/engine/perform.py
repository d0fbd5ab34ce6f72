"""How a worker carries out its part of a plan: always the most preferred action whose input is there."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from planaria.engine.post import Post
from planaria.engine.runner import StageRunner
from planaria.plan.actions import Action, Key, Plan
from planaria.record.events import Span

Passed = Callable[[Action, Tensor], None]
"""is told what each action hands on"""


def perform(plan: Plan, post: Post, runner: StageRunner, spans: list[Span], passed: Passed | None = None) -> None:
    """Carry out the actions of ``post.node``; appends a span for each to ``spans`` as it ends.

    :raises Interrupted: when the controller wants something else meanwhile.
    """
    todo, done = list(plan.actions.get(post.node, ())), set[Key]()
    while todo:
        action = _first_ready(todo, done, post)
        spans.append(_act(action, post, runner, passed))
        done.add(action.key)
        todo.remove(action)


def _first_ready(todo: list[Action], done: set[Key], post: Post) -> Action:
    """The most preferred action that can begin, waiting for one if need be."""
    post.hear_all()
    found: list[Action] = []

    def ready() -> bool:
        found[:] = [a for a in todo if post.mail.has(a) and done.issuperset(a.after)][:1]
        return bool(found)

    def late() -> list[int]:
        return [a.source for a in todo if a.source is not None and done.issuperset(a.after)][:1]

    first = todo[0]
    post.wait_for(ready, f"the {first.kind} of microbatch {first.microbatch} from {{}}", late)
    return found[0]


def _act(action: Action, post: Post, runner: StageRunner, passed: Passed | None) -> Span:
    post.desk.at(action.kind, post.step, action.microbatch, action.hop)
    start = time.monotonic()
    work = runner.forward if action.kind == "forward" else runner.backward
    out = work(action.microbatch, action.hop, post.mail.take(action))
    if action.target is not None:
        assert out is not None
        post.send(action, out.cpu())
        if passed is not None:
            passed(action, out)
    return Span(action=action.kind, microbatch=action.microbatch, hop=action.hop, start=start, end=time.monotonic())
