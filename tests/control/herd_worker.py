"""What one worker of a herd of replicas has and does: the truth that the controller's books are held against."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planaria.control import decisions as d
from planaria.control.events import Standing
from planaria.exchange.base import Outer
from planaria.exchange.robust.weighing import Weighing


@dataclass(frozen=True)
class Content:
    """A stage's state: what it was trained on, and the rounds of the exchange that are in its outer state."""

    blocks: tuple[Any, ...] = ()
    outer: tuple[Any, ...] = ()
    """the round and who settled it together, one after the other; or how the state was made up"""

    @property
    def is_made_up(self) -> bool:
        """Was it lost at some time, and made of others?"""
        return any(isinstance(step, str) for step in self.outer)


class Part(NamedTuple):
    """What a worker has to write for a checkpoint, and where it stood then; None where it cannot know."""

    order: d.Save
    stage: int
    content: Content
    step: int
    standing: Standing | None


class Loan(NamedTuple):
    """A state that a worker was asked for, for one of another replica, or its successor."""

    giver: str
    taker: str
    replica: int
    """that of the taker"""
    generation: int


@dataclass
class HerdWorker:
    """One incarnation of a worker. Orders are obeyed one after the other, as a real worker's inbox gives them."""

    name: str
    incarnation: int
    host: str = ""
    """a machine that has joined; empty for the run's own"""
    joined: bool = False
    node: int = -1
    stage: int = -1
    replica: int = -1
    generation: int = 0
    step: int = 0
    rounds: int = 0
    inner: int | None = 0
    """None where it cannot know"""
    block: int = -1
    """of the step under way"""
    content: Content | None = None
    forming: bool = False
    """it waits for its edges and for what its state is to be made of"""
    wants: dict[int, str] = field(default_factory=dict)
    """donor node → the link over which its gift comes, until all gifts are there"""
    owes: list[tuple[str, d.Form, d.Member]] = field(default_factory=list)
    """links over which it is to give others what they rebuild a stage from, once it has its own"""
    links: dict[int, str] = field(default_factory=dict)
    """neighbour → edge"""
    meeting: dict[int, str] = field(default_factory=dict)
    """the same stage of other replicas → edge, in the round under way"""
    round: int = -1
    """under way, if its offer is made"""
    heard: dict[int, str] = field(default_factory=dict)
    """replica → digest of what it says"""
    said: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """replica → what its offer stands for, its own first, where offers are judged over all stages"""
    orders: deque[d.Order] = field(default_factory=deque)
    writing: Part | None = None
    """what it writes a copy of while it does other things"""

    def drop_round(self) -> None:
        """Nothing is left of the round under way."""
        self.meeting, self.round, self.heard, self.said = {}, -1, {}, {}

    def products(self, weighing: Weighing | None, replica: int, twisted: bool = False) -> dict[int, float]:
        """What it tells of an offer that it hears, or makes itself; ``twisted``: it is another than the others hear."""
        if weighing is None:
            return {}
        self.said[replica] = {"w": vector(replica, self.round, self.stage) * (3.0 if twisted else 1.0)}
        return dict(weighing.products(Outer(), self.said, self.replica, [replica])[replica])

    def stand(self, form: d.Form) -> d.Member:
        """Take the place that ``form`` gives it in its replica; what is under way is dropped."""
        (worker,) = (m for m in form.members if m.worker == self.name)
        if isinstance(worker.source, d.Keep):
            assert (self.node, self.step, self.replica) == (worker.node, form.step, form.replica), "keeps another state"
            assert self.content is not None, "a worker keeps what it does not have"
        self.drop_round()
        self.node, self.stage, self.replica = worker.node, worker.stage, form.replica
        self.generation, self.step, self.rounds, self.inner = form.generation, form.step, form.rounds, form.inner
        self.forming = True
        self.wants = {donor: d.state_link(form.generation, donor, self.node) for donor in donors(worker.source)}
        if self.wants:
            self.content = None
        lost = [m for m in form.members if isinstance(m.source, d.Rebuild) and self.node in m.source.donors]
        self.owes = [(d.state_link(form.generation, self.node, m.node), form, m) for m in lost]
        ends = [(link.low, link.high, link.id) for link in form.links if self.node in (link.low, link.high)]
        self.links = {high if low == self.node else low: link for low, high, link in ends}
        return worker

    def pay(self) -> dict[str, Content]:
        """Give others, by link, what it owes them."""
        assert self.content is not None, "a donor that has nothing itself"
        gifts = {
            link: self.content if member.source.by == d.PEER else made_up(self.content, form, member)  # type: ignore[union-attr]
            for link, form, member in self.owes
        }
        self.owes = []
        return gifts


def vector(replica: int, round: int, stage: int) -> Tensor:
    """What a replica says of a stage: far from the others at one stage in three."""
    far = 40.0 if (replica + round + stage) % 3 == 0 else 0.0
    return torch.tensor([1.0 + replica, far + round % 5, stage - 0.25 * replica])


def donors(source: d.Source) -> list[int]:
    """Nodes, or who stood at the member's own before, that send it a state."""
    if isinstance(source, d.Handover):
        return [d.BEFORE]
    return source.donors if isinstance(source, d.Rebuild) else []


def made_up(content: Content, form: d.Form, member: d.Member) -> Content:
    """A stage that is made of its neighbours begins an outer state of its own."""
    return replace(content, outer=(*content.outer, f"made up in g{form.generation} for {member.node}"))


def lends(form: d.Form, link: str) -> bool:
    """Does a member of the formation get a state over this link?"""
    return any(d.state_link(form.generation, n, m.node) == link for m in form.members for n in donors(m.source))
