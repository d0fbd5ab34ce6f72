"""Targets of a rollback: an earlier state that all stages of a run can return to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planaria.control.facts.decisions import Fresh, Load, Recall
from planaria.control.facts.events import ReplicaPosition
from planaria.control.facts.run_started import RunStarted
from planaria.pipeline.routing.arrangement import Arrangement

Origin = Fresh | Load | Recall
"""states that a worker can start from on its own"""


def first_origin(started: RunStarted, stage: int) -> Origin:
    """Return the state that the nodes of a stage start from when their run starts or resumes."""
    return Load(folder=started.checkpoint_of_stage[stage]) if stage in started.checkpoint_of_stage else Fresh()


@dataclass(frozen=True)
class RollbackPoint:
    """An earlier state of all stages; a newer one of the same kind replaces it."""

    sources: Mapping[int, Origin] = field(default_factory=dict)
    """stage → source of its nodes' state"""
    positions: Mapping[int, ReplicaPosition] = field(default_factory=dict)
    """positions of its replicas; others cannot return to it"""
    step: int = -1
    """the checkpoint's step; -1 if it is not a complete checkpoint"""

    @classmethod
    def begin(cls, started: RunStarted) -> RollbackPoint:
        """Return the rollback target at the start of a run: initial weights, or the loaded ones."""
        stages, folders = range(started.stages + 1), started.checkpoint_of_stage
        is_checkpoint = folders.keys() == set(stages) and len(set(folders.values())) == 1
        step, positions = started.durable_step, {n: started.position_of(n) for n in range(started.replicas)}
        if step is None:
            step = started.first_step
        else:  # it starts from memory, and its newest checkpoint is older
            positions = dict.fromkeys(positions, ReplicaPosition(step=step))
        sources = {stage: first_origin(started, stage) for stage in stages}
        return cls(sources, positions, step if is_checkpoint else -1)

    @property
    def folder(self) -> str:
        """The checkpoint's folder; empty if it is not a checkpoint."""
        return next((s.folder for s in self.sources.values() if isinstance(s, Load)), "") if self.step >= 0 else ""

    def origins(self, nodes: Arrangement) -> dict[int, Origin]:
        """Return the source of the state of each of ``nodes``."""
        return {node: self.sources[stage] for node, stage in nodes.stage.items()}
