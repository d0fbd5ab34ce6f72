"""Targets of a rollback: an earlier state that all stages of a run can return to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from planaria.control.facts.decisions import Fresh, Load, Recall
from planaria.control.facts.events import ReplicaPosition
from planaria.control.facts.run_started import RunStarted
from planaria.pipeline.routing.arrangement import Arrangement

Origin = Fresh | Load | Recall
"""states that a worker can start from on its own"""


def first_origin(settings: RunStarted, stage: int) -> Origin:
    """Return the state that the nodes of a stage start from when their run starts or resumes."""
    return Load(folder=settings.checkpoint_of_stage[stage]) if stage in settings.checkpoint_of_stage else Fresh()


def _durable_step(settings: RunStarted) -> int:
    """Return the step of the checkpoint that a run starts from, or of its newest one if it starts from memory."""
    return settings.first_step if settings.durable_step is None else settings.durable_step


def _durable_position(settings: RunStarted, replica: int) -> ReplicaPosition:
    if settings.durable_step is None:
        return settings.position_of(replica)
    return ReplicaPosition(step=settings.durable_step)


@dataclass(frozen=True)
class RollbackPoint:
    """An earlier state of all stages; a newer one of the same kind replaces it."""

    sources: Mapping[int, Origin] = field(default_factory=lambda: MappingProxyType({}))
    """stage → source of its nodes' state"""
    positions: Mapping[int, ReplicaPosition] = field(default_factory=lambda: MappingProxyType({}))
    """positions of its replicas; others cannot return to it"""
    step: int = -1
    """the checkpoint's step; -1 if it is not a complete checkpoint"""

    @classmethod
    def begin(cls, settings: RunStarted) -> RollbackPoint:
        """Return the rollback target at the start of a run: initial weights, or the loaded ones."""
        stages = range(settings.stages + 1)
        whole = (
            settings.checkpoint_of_stage.keys() == set(stages) and len(set(settings.checkpoint_of_stage.values())) == 1
        )
        return cls(
            {stage: first_origin(settings, stage) for stage in stages},
            {number: _durable_position(settings, number) for number in range(settings.replicas)},
            _durable_step(settings) if whole else -1,
        )

    @property
    def folder(self) -> str:
        """The checkpoint's folder; empty if it is not a checkpoint."""
        return next((s.folder for s in self.sources.values() if isinstance(s, Load)), "") if self.step >= 0 else ""

    def origins(self, nodes: Arrangement) -> dict[int, Origin]:
        """Return the source of the state of each of ``nodes``."""
        return {node: self.sources[stage] for node, stage in nodes.stage.items()}
