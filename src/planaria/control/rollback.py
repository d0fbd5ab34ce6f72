"""Where a rollback leads: a state of the past that all stages of a run can go back to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from planaria.control.decisions import Fresh, Load, Recall
from planaria.control.events import Standing
from planaria.control.started import RunStarted
from planaria.pipeline.routing.arrangement import Arrangement

Origin = Fresh | Load | Recall
"""what a worker can begin from by itself"""


def first_origin(settings: RunStarted, stage: int) -> Origin:
    """What the nodes of a stage begin from when their run is started or resumed."""
    return Load(folder=settings.load[stage]) if stage in settings.load else Fresh()


def _durable_step(settings: RunStarted) -> int:
    """That of the checkpoint that a run begins from, or of the newest that it has when it begins from memory."""
    return settings.first_step if settings.durable_step is None else settings.durable_step


def _durable_standing(settings: RunStarted, replica: int) -> Standing:
    if settings.durable_step is None:
        return settings.standing(replica)
    return Standing(step=settings.durable_step)


@dataclass(frozen=True)
class RollbackPoint:
    """One such state. Those of a kind follow one another; the newest is what counts."""

    sources: Mapping[int, Origin] = field(default_factory=lambda: MappingProxyType({}))
    """stage → where its nodes get it from"""
    standings: Mapping[int, Standing] = field(default_factory=lambda: MappingProxyType({}))
    """where its replicas were then; a replica that is not among them cannot go back"""
    step: int = -1
    """its name; -1 where no checkpoint of all stages is"""

    @classmethod
    def begin(cls, settings: RunStarted) -> RollbackPoint:
        """Where a run is started or resumed: at the seed's weights, or what it loads."""
        stages = range(settings.stages + 1)
        whole = settings.load.keys() == set(stages) and len(set(settings.load.values())) == 1
        return cls(
            {stage: first_origin(settings, stage) for stage in stages},
            {number: _durable_standing(settings, number) for number in range(settings.replicas)},
            _durable_step(settings) if whole else -1,
        )

    @property
    def folder(self) -> str:
        """The checkpoint that it is; empty where it is none."""
        return next((s.folder for s in self.sources.values() if isinstance(s, Load)), "") if self.step >= 0 else ""

    def origins(self, nodes: Arrangement) -> dict[int, Origin]:
        """Where each of ``nodes`` gets its state from."""
        return {node: self.sources[stage] for node, stage in nodes.stage.items()}
