"""A layer of the defence: it looks at what other peers sent, before anything is learned from it.

Layers are pure: the same completions and the same readings give the same findings on every peer. Peers that hold equal
weights therefore refuse alike, and go on holding equal weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from planaria.swarm.policy.reading import Reading
from planaria.swarm.policy.rollout import Sample
from planaria.tasks.base import Problem


@dataclass(frozen=True)
class Case:
    """A completion before the layers."""

    sample: Sample
    problem: Problem
    reading: Reading


@dataclass(frozen=True)
class Findings:
    """What one layer says of one round's cases."""

    refused: Mapping[int, str] = field(default_factory=dict)
    """place of the case → why, in a few words"""
    off: str = ""
    """why the layer cannot work here; empty if it can"""


class Check(Protocol):
    name: str

    def examine(self, cases: Sequence[Case]) -> Findings:
        """Which of the cases this layer refuses. Those that an earlier layer refused are not among them."""
