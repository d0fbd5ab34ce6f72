"""A plan: who does what in one step, as plain data.

Work is given to *nodes*. Where each stage has one worker, a node is its stage's number; where several nodes share a
stage, a plan knows nodes only. A node's list is in order of preference, not of time: it always takes the first action
whose inputs have arrived and whose ``after`` actions are done. The same lists drive ``simulate``, ``inline`` and
``fleet``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]


class Key(NamedTuple):
    """Names an action, and the message it sends: unique within one step."""

    kind: Kind
    microbatch: int
    hop: int


@dataclass(frozen=True)
class Action:
    """One unit of work: the forward or backward pass of one microbatch at one visit of its route.

    ``hop`` is the visit's place in the route: hop 0 embeds, the last hop is head and loss, both at the route's origin.
    ``source`` and ``target`` are the nodes the input comes from and the output goes to; None where the input is data
    or loss, and where nothing is sent on. ``after`` names actions of the same node that must be done before.
    """

    kind: Kind
    microbatch: int
    hop: int
    node: int
    source: int | None
    target: int | None
    after: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.kind, self.microbatch, self.hop)

    @property
    def returns(self) -> bool:
        """Is this the visit with which the route is back at its origin: head and loss?"""
        return (self.target if self.kind == "forward" else self.source) is None

    @property
    def needs(self) -> Key | None:
        """The message this action waits for; None if its input is local."""
        if self.source is None:
            return None
        return Key(self.kind, self.microbatch, self.hop - 1 if self.kind == "forward" else self.hop + 1)

    def __str__(self) -> str:
        source = "" if self.source is None else f"←{self.source}"
        target = "" if self.target is None else f"→{self.target}"
        return f"{self.kind[0].upper()}{self.microbatch}.{self.hop}{source}{target}"


Route = tuple[int, ...]
"""The nodes one microbatch visits, from its origin (an ends worker; 0 if there is only one) back to it."""


@dataclass(frozen=True)
class Plan:
    """Everything that is to be done in one step: the routes, and each node's actions in order of preference."""

    routes: tuple[Route, ...]
    slots: dict[int, int]
    """the most microbatches that are between their forward and their backward at a node; any number where not named"""
    actions: dict[int, tuple[Action, ...]]

    @property
    def edges(self) -> set[tuple[int, int]]:
        """Pairs (low, high) of nodes that exchange messages."""
        pairs = {(a, b) for route in self.routes for a, b in pairwise(route)}
        return {(min(p), max(p)) for p in pairs}
