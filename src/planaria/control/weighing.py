"""What offers count that are judged over all stages of a replica, when a round is settled. Pure.

Each node tells the inner products of what it hears with the event by which it says that it has heard it. What counts
for a replica follows from what its own nodes have told, so that a liar misleads nobody but itself; members that must
stay alike have heard the same, and told the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from planaria.exchange.base import Counted
from planaria.record.offers import rounded
from planaria.record.state import RunState

Coefficients = dict[int, dict[int, float]]
Rivals = dict[str, dict[int, float]]


def counted(run: RunState, round: int, party: Sequence[int]) -> tuple[Coefficients, Rivals]:
    """What is in :class:`~planaria.record.meetings.Settle` of a ``round`` that this ``party`` settles together."""
    weighing = run.rule.weighing
    if weighing is None or len(party) < 2:
        return {}, {}
    members, coefficients, first = sorted(party), Coefficients(), Counted()
    for me in members:
        meeting, arrangement = run.replicas[me].meeting, run.replicas[me].arrangement
        assert meeting is not None
        stages = [meeting.told(arrangement.nodes(stage)[0]) for stage in arrangement.stages]
        if (found := weighing.counted(stages, members, me, round)) is None:  # they are too few
            return {}, {}
        first = first if coefficients else found
        coefficients[me] = dict(found.coefficients)
    return coefficients, {rule: rounded(of) for rule, of in first.rivals().items()}
