"""A plan's actions by number, and who waits for whom: what simulating, ordering and bounding a plan have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planaria.common.errors import UserError
from planaria.pipeline.plan.actions import Action, Key, Plan

NAMED = 5
"""actions that an error names at most"""


@dataclass(frozen=True)
class Graph:
    """Numbered actions. Numbers run stage by stage in order of preference: at one worker, the smaller comes first."""

    actions: list[Action]
    places: list[int]
    """each action's place in its worker's list"""
    waits: list[int]
    """for how many messages and local actions each action waits (also for those that the plan does not hold)"""
    local: list[tuple[int, ...]]
    """the actions that name this one in ``after``"""
    receiver: list[int]
    """the action that this one's message is for, or -1"""

    def followers(self, n: int) -> tuple[int, ...]:
        """The actions that wait for action ``n``, at its own stage and at the next."""
        return self.local[n] if self.receiver[n] < 0 else (*self.local[n], self.receiver[n])


def graph(plan: Plan) -> Graph:
    """Numbers the actions of ``plan``, which may be one that can never finish.

    Raises UserError if it holds an action twice.
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
        if (message := action.needs) is not None:
            waits[n] += 1
            if (sender := numbers.get(message)) is not None:
                receiver[sender] = n
    places = [place for stage in sorted(plan.actions) for place in range(len(plan.actions[stage]))]
    return Graph(actions, places, waits, local, receiver)


def deadlock(numbered: Graph, done: Iterable[int]) -> UserError:
    """The error of a plan of which only the actions ``done`` can ever be done.

    It names a ring of actions that wait for each other, or one that waits for what the plan does not hold.
    """
    finished = {numbered.actions[n].key for n in done}
    stuck = {action.key: action for action in numbered.actions if action.key not in finished}
    chain: dict[Key, Action] = {}
    key = next(iter(stuck))
    while key in stuck and key not in chain:
        chain[key] = stuck[key]
        waits = (*stuck[key].after, stuck[key].needs)
        key = next(wanted for wanted in waits if wanted and wanted not in finished)
    seen = list(chain)
    ring = seen[seen.index(key) :] if key in chain else seen[-1:]
    named = " waits for ".join(f"{chain[link]} at stage {chain[link].node}" for link in ring[:NAMED])
    end = "…" if len(ring) > NAMED else str(chain[key]) if key in chain else f"{tuple(key)}, which is not in the plan"
    return UserError(f"the plan can never finish, {len(stuck)} of its actions wait for ever: {named} waits for {end}")
