"""State and behaviour of one simulated worker of several replicas."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planaria.control.facts import decisions as d
from planaria.control.facts.events import ReplicaPosition
from planaria.exchange.base import StageOuterState
from planaria.exchange.robust.weighing import Weighing
from support.control.simulation import Worker


@dataclass(frozen=True)
class Content:
    """A stage's state: the blocks it was trained on, and the exchange rounds in its outer state."""

    blocks: tuple[Any, ...] = ()
    outer: tuple[Any, ...] = ()
    """each settled round with its members in order; or how the state was rebuilt"""

    @property
    def is_rebuilt(self) -> bool:
        """Was it ever lost and rebuilt from other stages?"""
        return any(isinstance(step, str) for step in self.outer)


class Part(NamedTuple):
    """A worker's part of a checkpoint; ``standing`` is None if the worker cannot know it."""

    order: d.Save
    stage: int
    content: Content
    step: int
    standing: ReplicaPosition | None


class Loan(NamedTuple):
    """A state that a worker was ordered to send to another replica or to its successor."""

    giver: str
    taker: str
    replica: int
    """of the taker"""
    generation: int


@dataclass
class ReplicaWorker(Worker):
    """A worker that knows its own state, step and rounds."""

    replica: int = -1
    step: int = 0
    rounds: int = 0
    inner: int | None = 0
    """None if it cannot know"""
    block: int = -1
    """of the current step"""
    content: Content | None = None
    forming: bool = False
    """it waits for its edges and for the states that it builds its own from"""
    wants: dict[int, str] = field(default_factory=dict)
    """donor node → link over which its state comes, until all have arrived"""
    owes: list[tuple[str, d.Form, d.Member]] = field(default_factory=list)
    """links over which it sends its state to rebuilding nodes, once it has it"""
    links: dict[int, str] = field(default_factory=dict)
    """neighbour → edge"""
    meeting: dict[int, str] = field(default_factory=dict)
    """the same stage of other replicas → edge, in the current round"""
    round: int = -1
    """current one, if its update is sent"""
    received: dict[int, str] = field(default_factory=dict)
    """replica → digest of its update"""
    updates: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """replica → its update, the own first, if updates are weighed over all stages"""
    writing: Part | None = None
    """what its thread is writing"""

    def drop_round(self) -> None:
        """Forget the current round."""
        self.meeting, self.round, self.received, self.updates = {}, -1, {}, {}

    def products(self, weighing: Weighing | None, replica: int, twisted: bool = False) -> dict[int, float]:
        """Return the products it reports for an update; ``twisted``: one that differs from what others receive."""
        if weighing is None:
            return {}
        self.updates[replica] = {"w": vector(replica, self.round, self.stage) * (3.0 if twisted else 1.0)}
        return dict(weighing.products(StageOuterState(), self.updates, self.replica, [replica])[replica])

    def join_formation(self, form: d.Form) -> d.Member:
        """Take the node that ``form`` assigns; the current round is dropped."""
        (worker,) = (m for m in form.members if m.worker == self.name)
        if isinstance(worker.source, d.Keep):
            assert (self.node, self.step, self.replica) == (worker.node, form.step, form.replica), "keeps another state"
            assert self.content is not None, "a worker keeps what it does not have"
        self.drop_round()
        self.node, self.stage, self.replica = worker.node, worker.stage, form.replica
        self.generation, self.step, self.rounds, self.inner = form.generation, form.step, form.rounds, form.inner
        self.forming = True
        self.wants = {donor: d.state_link(form.generation, donor, self.node) for donor in donors(worker.source)}
        if self.wants and not isinstance(worker.source, d.CatchUp):
            self.content = None
        lost = [m for m in form.members if isinstance(m.source, d.Rebuild) and self.node in m.source.donors]
        self.owes = [(d.state_link(form.generation, self.node, m.node), form, m) for m in lost]
        ends = [(link.low, link.high, link.id) for link in form.links if self.node in (link.low, link.high)]
        self.links = {high if low == self.node else low: link for low, high, link in ends}
        return worker

    def pay(self) -> dict[str, Content]:
        """Return, by link, the states it owes other workers."""
        assert self.content is not None, "a donor without a state"
        gifts = {
            link: self.content if member.source.by == d.PEER else rebuilt(self.content, form, member)  # type: ignore[union-attr]
            for link, form, member in self.owes
        }
        self.owes = []
        return gifts


def vector(replica: int, round: int, stage: int) -> Tensor:
    """Return a replica's update of a stage: far from the others at one stage in three."""
    far = 40.0 if (replica + round + stage) % 3 == 0 else 0.0
    return torch.tensor([1.0 + replica, far + round % 5, stage - 0.25 * replica])


def donors(source: d.Source) -> list[int]:
    """Return the nodes that send a member its state; ``PREDECESSOR`` for its node's previous holder."""
    if isinstance(source, d.Handover):
        return [d.PREDECESSOR]
    return source.donors if isinstance(source, d.Rebuild) else []


def rebuilt(content: Content, form: d.Form, member: d.Member) -> Content:
    """Return the state of a stage rebuilt from its neighbours; it starts a new outer state."""
    return replace(content, outer=(*content.outer, f"rebuilt in g{form.generation} for {member.node}"))


def lends(form: d.Form, link: str) -> bool:
    """Does a member of the formation get a state over this link?"""
    return any(d.state_link(form.generation, n, m.node) == link for m in form.members for n in donors(m.source))
