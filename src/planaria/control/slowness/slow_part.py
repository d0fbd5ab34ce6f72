"""A slow part of a run, and the thresholds of parts that are already blamed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from planaria.control.facts.slowness import SlownessKind

HYSTERESIS_FACTOR = 0.7
"""factor on thresholds of parts already blamed, for hysteresis"""

Blamed = frozenset[tuple[str, tuple[int, ...]]]
"""(fault, nodes) already blamed"""


class SlowPart(NamedTuple):
    """A slow part; fields as in :class:`planaria.control.facts.slowness.SlowPartFound`."""

    fault: SlownessKind
    nodes: tuple[int, ...]
    seconds: float
    initial_s: float
    peer_median_s: float


def threshold_factor(known_faults: Blamed, fault: SlownessKind, nodes: Iterable[int]) -> float:
    """Return the factor on a threshold: less than 1 if these nodes are already blamed for ``fault``."""
    blamed = any(kind == fault and set(nodes) <= {*of} for kind, of in known_faults)
    return HYSTERESIS_FACTOR if blamed else 1.0
