"""Interface of a layer of the defence, which examines completions before they are learned from.

Layers are pure: equal completions and readings have equal findings, so peers with equal weights keep equal weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from planaria.config.registry import Choice
from planaria.swarm.checks.votes import MajorityLabel
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.tasks.base import Task


@dataclass(frozen=True)
class LayerFindings:
    """Findings of one layer on one round's completions."""

    rejected: Mapping[int, str] = field(default_factory=dict)
    """index of a completion → short reason"""
    off: str = ""
    """why the layer cannot work here; empty if it can"""
    rewards: Mapping[int, float | None] = field(default_factory=dict)
    """index → reward given by this layer, if any; None if its group teaches nothing"""
    labels: Mapping[int, MajorityLabel] = field(default_factory=dict)
    """problem → label by consensus, if the layer votes"""
    unproven: Collection[int] = ()
    """indices of completions not examined or not confirmed; they stay in their groups but are not rewarded"""


@dataclass(frozen=True)
class Context:
    """Run data available to checks."""

    task: Task
    seed: int
    support: int
    """number of most likely tokens that sampling draws from"""
    vocab: int


class Check(Choice, ABC):
    """One layer of the defence; the fields of a subclass are its options."""

    name: ClassVar[str] = ""
    """the layer's name in records; the class name by default"""
    fallible: ClassVar[bool] = True
    """the layer assumes that peers have similar policies, and is disabled if they do not"""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.name = cls.name or cls.__name__

    def warning(self, context: Context) -> str:
        """Return why the layer will not work as expected, or an empty string if it will."""
        return ""

    @abstractmethod
    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        """Examine completions that no earlier layer rejected."""
