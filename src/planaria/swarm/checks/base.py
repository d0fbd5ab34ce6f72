"""A layer of the defence: it looks at what other peers sent, before anything is learned from it.

Layers are pure: the same completions and the same readings give the same findings on every peer. Peers that hold equal
weights therefore refuse alike, and go on holding equal weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from planaria.config.registry import Choice
from planaria.swarm.checks.votes import Label
from planaria.swarm.rollout import Rollout
from planaria.swarm.tasks.base import Task


@dataclass(frozen=True)
class Findings:
    """What one layer says of one round's completions."""

    refused: Mapping[int, str] = field(default_factory=dict)
    """place of the completion → why, in a few words"""
    off: str = ""
    """why the layer cannot work here; empty if it can"""
    rewards: Mapping[int, float | None] = field(default_factory=dict)
    """place → its reward by this layer, where it gives any; None: its group is to teach nothing"""
    labels: Mapping[int, Label] = field(default_factory=dict)
    """problem → what most do there, of a layer that asks for that"""
    unproven: Collection[int] = ()
    """places of what it did not look at, or does not vouch for: these may stay in their groups and are not rewarded"""


@dataclass(frozen=True)
class Context:
    """What a check may know of the run."""

    task: Task
    seed: int
    support: int
    """the likeliest tokens that sampling draws from"""
    vocab: int


class Check(Choice, ABC):
    """One layer of the defence; the fields of a subclass are its options."""

    name: ClassVar[str] = ""
    """of the layer, in records; the class's own unless given"""
    fallible: ClassVar[bool] = True
    """it rests on the peers' policies being alike, and is switched off where they are not"""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.name = cls.name or cls.__name__

    def warning(self, context: Context) -> str:
        """Why it will not work as one might think; empty if it will."""
        return ""

    @abstractmethod
    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        """Which of the completions this layer refuses. Those that an earlier layer refused are not among them."""
