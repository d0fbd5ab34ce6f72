"""A plan: the actions of each node in one step, as plain data, and their dependency graph.

Work is assigned to *nodes*; with one worker per stage, a node is its stage's number. A node's list is in order of
preference, not of time: the node takes the first action whose inputs have arrived and whose ``after`` actions are done.
``simulate``, ``inline`` and ``fleet`` execute the same lists. Simulation, ordering and bounds use the numbers of a
:class:`Graph`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from planaria.common.errors import UserError

PassKind = Literal["forward", "backward"]
NAMED = 5
"""maximum number of actions in an error"""


class Key(NamedTuple):
    """The name of an action, and of the message it sends; unique within one step."""

    kind: PassKind
    microbatch: int
    hop: int


@dataclass(frozen=True)
class Action:
    """The forward or backward pass of one microbatch at one visit of its route.

    ``hop`` is the visit's index in the route: hop 0 embeds, the last hop is head and loss, both at the route's origin.
    ``source`` and ``target`` are the nodes of input and output, or None if the input is data or loss, and if nothing is
    sent. ``after`` names actions of the same node that must be done before.
    """

    kind: PassKind
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
        """Whether the route is back at its origin: head and loss."""
        return (self.target if self.kind == "forward" else self.source) is None

    @property
    def input_key(self) -> Key | None:
        """The message that this action waits for, or None if its input is local."""
        if self.source is None:
            return None
        return Key(self.kind, self.microbatch, self.hop - 1 if self.kind == "forward" else self.hop + 1)

    def __str__(self) -> str:
        source = "" if self.source is None else f"←{self.source}"
        target = "" if self.target is None else f"→{self.target}"
        return f"{self.kind[0].upper()}{self.microbatch}.{self.hop}{source}{target}"


Route = tuple[int, ...]
"""the nodes that one microbatch visits, from its origin (a worker of stage 0) back to it"""


@dataclass(frozen=True)
class StepPlan:
    """The routes of one step, and each node's actions in order of preference."""

    routes: tuple[Route, ...]
    slots: dict[int, int]
    """node → maximum number of microbatches between forward and backward; unlimited if absent"""
    actions: dict[int, tuple[Action, ...]]

    @property
    def edges(self) -> set[tuple[int, int]]:
        """Pairs (low, high) of nodes that exchange messages."""
        pairs = {(a, b) for route in self.routes for a, b in pairwise(route)}
        return {(min(p), max(p)) for p in pairs}


@dataclass(frozen=True)
class Graph:
    """Numbered actions, stage by stage in order of preference: at one worker, smaller numbers are preferred."""

    actions: list[Action]
    positions: list[int]
    """each action's index in its worker's list"""
    waits: list[int]
    """number of messages and local actions for which each action waits, including those missing in the plan"""
    local: list[tuple[int, ...]]
    """actions that name this one in ``after``"""
    receiver: list[int]
    """the action that receives this one's message, or -1"""

    def followers(self, n: int) -> tuple[int, ...]:
        """Return the actions that wait for action ``n``, at its own stage and at the next."""
        return self.local[n] if self.receiver[n] < 0 else (*self.local[n], self.receiver[n])


def build_graph(plan: StepPlan) -> Graph:
    """Number the actions of ``plan``, which may be one that cannot finish.

    :raises UserError: if it has an action twice.
    """
    actions = [action for stage in sorted(plan.actions) for action in plan.actions[stage]]
    # Plain tuples of atoms, here and in `local`: the garbage collector does not follow them, and there are millions.
    numbers: dict[tuple[str, int, int], int] = {(a.kind, a.microbatch, a.hop): n for n, a in enumerate(actions)}
    if len(numbers) < len(actions):
        twice = next(a for n, a in enumerate(actions) if numbers[a.kind, a.microbatch, a.hop] != n)
        raise UserError(f"the plan holds {twice} at stage {twice.node} twice")
    waits, receiver = [0] * len(actions), [-1] * len(actions)
    local: list[tuple[int, ...]] = [()] * len(actions)
    for n, action in enumerate(actions):
        waits[n] = len(action.after)
        for key in action.after:
            if (earlier := numbers.get(key)) is not None:
                local[earlier] += (n,)
        if (message := action.input_key) is not None:
            waits[n] += 1
            if (sender := numbers.get(message)) is not None:
                receiver[sender] = n
    indices = [index for stage in sorted(plan.actions) for index in range(len(plan.actions[stage]))]
    return Graph(actions, indices, waits, local, receiver)


def deadlock_error(numbered: Graph, done: Iterable[int]) -> UserError:
    """Return the error for a plan of which only the actions ``done`` can finish.

    It names a cycle of actions, or one that waits for an action missing in the plan.
    """
    finished = {numbered.actions[n].key for n in done}
    stuck = {action.key: action for action in numbered.actions if action.key not in finished}
    chain: dict[Key, Action] = {}
    key = next(iter(stuck))
    while key in stuck and key not in chain:
        chain[key] = stuck[key]
        waits = (*stuck[key].after, stuck[key].input_key)
        key = next(wanted for wanted in waits if wanted and wanted not in finished)
    seen = list(chain)
    ring = seen[seen.index(key) :] if key in chain else seen[-1:]
    named = " waits for ".join(f"{chain[link]} at stage {chain[link].node}" for link in ring[:NAMED])
    end = "…" if len(ring) > NAMED else str(chain[key]) if key in chain else f"{tuple(key)}, which is not in the plan"
    return UserError(f"the plan deadlocks, {len(stuck)} of its actions can never start: {named} waits for {end}")


def topological_order(plan: StepPlan) -> list[Action]:
    """Return all actions in one deterministic order in which every action finds its inputs ready.

    Each stage takes the first ready action of its list, but a microbatch enters the pipeline only when nothing else can
    be done. So one process holds as few microbatches as possible, never more than ``plan.slots``.

    :raises UserError: naming actions, if no order exists.
    """
    numbered = build_graph(plan)
    order = feasible_actions(numbered)
    if len(order) < len(numbered.actions):
        raise deadlock_error(numbered, order)
    return [numbered.actions[n] for n in order]


def feasible_actions(numbered: Graph) -> list[int]:
    """Return the numbers of all actions that can finish, in the order of :func:`topological_order`."""

    def rank(n: int) -> tuple[bool, int, int]:
        action = numbered.actions[n]
        return (action.kind == "forward" and action.hop == 0, numbered.positions[n], n)

    waits = list(numbered.waits)
    ready = [rank(n) for n, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        *_, done = heapq.heappop(ready)
        order.append(done)
        for n in numbered.followers(done):
            waits[n] -= 1
            if not waits[n]:
                heapq.heappush(ready, rank(n))
    return order
