"""Failure groups: the stages that one failure destroys: one, two neighbours, a machine's, or a region's. Pure.

CheckFree's model has stages fail independently. Machines with several stages, and regions, lose neighbours together,
and with them copies and originals. Rates keep the loss rate of a stage equal for every kind: larger failures are rarer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal, cast, get_args

from planaria.common.errors import UserError, suggestion

FailureDomain = Literal["stage", "adjacent", "machine", "region"]
"""one stage; a stage and the next ("adjacent"); ``machine`` consecutive stages; or half of all stages ("region")"""


def failure_domain_of(name: str | None) -> FailureDomain | None:
    """Return ``name`` as a kind of failure, or None for None.

    :raises UserError: if it is unknown.
    """
    if name is not None and name not in get_args(FailureDomain):
        raise UserError(
            f"--failure-domain {name}: no such kind of failure; {suggestion(name, get_args(FailureDomain))}"
        )
    return cast(FailureDomain | None, name)


def failure_groups(
    domain: FailureDomain, eligible: Collection[int], stages: int, machine: int
) -> list[tuple[int, ...]]:
    """Return the sets of stages that fail together, restricted to ``eligible``, of block stages 1..``stages`` and stage
    0.

    A machine has ``machine`` consecutive stages.

    >>> failure_groups("machine", {1, 2, 3, 4, 5}, 5, 2)
    [(1, 2), (3, 4), (5,)]
    """
    ring = [*range(1, stages + 1), *([0] if 0 in eligible else [])]
    if domain == "adjacent":
        sets: Sequence[Sequence[int]] = list(pairwise([*ring, 1] if 0 in eligible else ring))
    else:
        size = {"stage": 1, "machine": machine, "region": -(-len(ring) // 2)}[domain]
        sets = [ring[n : n + size] for n in range(0, len(ring), size)]
    groups = (tuple(stage for stage in members if stage in eligible) for members in sets)
    return [members for members in groups if members]


def relative_probability(domain: FailureDomain) -> float:
    """Return a failure's probability relative to a stage's loss rate: an inner stage is in two pairs of neighbours."""
    return 0.5 if domain == "adjacent" else 1.0
