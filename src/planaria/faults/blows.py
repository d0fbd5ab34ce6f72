"""What is lost in one blow: a stage, two neighbours, all stages of a machine, all of a region. Pure.

Stages fail one by one in CheckFree's model. Machines that hold several stages, and regions that lose power, take
neighbours together, and with them copies and their originals. Rates are such that a stage is lost about as often
whatever the blow: there are fewer blows then, and each takes more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal, cast, get_args

from planaria.common.errors import UserError, nearest

Lost = Literal["stage", "adjacent", "machine", "region"]
"""what a blow takes: one stage; a stage and the next one; ``machine`` stages in a row, which share a machine; half of
all, which share a region"""


def lost_of(name: str | None) -> Lost | None:
    """What ``name`` says, None for nothing.

    :raises UserError: when there is no such kind.
    """
    if name is not None and name not in get_args(Lost):
        raise UserError(f"--lost {name}: no such kind of failure; {nearest(name, get_args(Lost))}")
    return cast(Lost | None, name)


def blows(lost: Lost, struck: Collection[int], stages: int, machine: int) -> list[tuple[int, ...]]:
    """The sets of stages that are lost together, of those that can be ``struck``, of block stages 1..``stages`` and
    the ends 0; ``machine`` stages in a row share a machine. Of each set, those that never fail are left out.

    >>> blows("machine", {1, 2, 3, 4, 5}, 5, 2)
    [(1, 2), (3, 4), (5,)]
    """
    ring = [*range(1, stages + 1), *([0] if 0 in struck else [])]
    if lost == "adjacent":
        sets: Sequence[Sequence[int]] = list(pairwise([*ring, 1] if 0 in struck else ring))
    else:
        size = {"stage": 1, "machine": machine, "region": -(-len(ring) // 2)}[lost]
        sets = [ring[n : n + size] for n in range(0, len(ring), size)]
    found = (tuple(stage for stage in one if stage in struck) for one in sets)
    return [one for one in found if one]


def share(lost: Lost) -> float:
    """A blow's probability over that of losing a stage: an inner stage is in two pairs of neighbours, each of which is
    struck half as often."""
    return 0.5 if lost == "adjacent" else 1.0
