"""What a verdict is, and how much easier it is to keep than to come by. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from planaria.record.verdicts import Fault

EASE = 0.7
"""thresholds are lower by this once something is blamed, or it would be cleared and blamed in turn"""

Known = frozenset[tuple[str, tuple[int, ...]]]
"""(fault, nodes) of what is blamed already"""


class Verdict(NamedTuple):
    """What is slow; the fields are those of :class:`planaria.record.verdicts.Blamed`."""

    fault: Fault
    nodes: tuple[int, ...]
    seconds: float
    past: float
    usual: float


def ease(known: Known, fault: Fault, nodes: Iterable[int]) -> float:
    """What thresholds are multiplied by."""
    blamed = any(kind == fault and set(nodes) <= {*of} for kind, of in known)
    return EASE if blamed else 1.0
