"""The state of a run as the controller knows it: what ``apply`` folds and ``decide`` looks at."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from planaria.decisions import Fresh, Load, Source
from planaria.events import RunStarted

Phase = Literal["idle", "link", "run", "evaluate", "commit", "save", "over"]
Pair = tuple[int, int]


@dataclass(frozen=True)
class WorkerState:
    """One worker identity in its latest incarnation."""

    incarnation: int
    status: Literal["starting", "spare", "member", "dead"]
    pid: int = 0


@dataclass(frozen=True)
class RunState:
    """Everything a decision depends on. ``step`` counts committed steps, so it is also the step to run next."""

    settings: RunStarted
    """what the run was started with"""
    phase: Phase = "idle"
    step: int = 0
    generation: int = 0
    formed: int = -1
    """``step`` when the present generation was formed"""
    workers: Mapping[str, WorkerState] = field(default_factory=lambda: MappingProxyType({}))
    holders: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """stage → the living worker that holds it, or is about to"""
    origins: Mapping[int, Source] = field(default_factory=lambda: MappingProxyType({}))
    """stages whose state does not exist in any worker yet and comes from the seed or from disk"""
    lost: frozenset[int] = frozenset()
    """stages whose state died with their worker and is not rebuilt yet"""
    ages: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """stage → commits of its present, or last, holder, through which it kept its copies of others up to date"""
    rested: frozenset[int] = frozenset()
    """stages that were skipped since the last commit of the whole replica: their copies have missed steps"""
    skipped: frozenset[int] = frozenset()
    """stages that the present generation does without"""
    links: Mapping[Pair, str] = field(default_factory=lambda: MappingProxyType({}))
    suspects: frozenset[Pair] = frozenset()
    """edges that broke in this generation"""
    waiting: frozenset[str] = frozenset()
    """workers that have not yet reported what the present phase waits for"""
    stillborn: int = 0
    """workers in a row that died before they had joined"""
    attempts: int = 0
    """generations formed since the last committed step"""
    save_every: int = 0
    evaluated: int = -1
    saved: int = -1
    durable: Load | None = None
    """the newest complete checkpoint of this run"""
    durable_step: int = -1
    cannot: str = ""
    """why the strategy cannot go on; survivors are being saved, then the run is over"""
    stopping: str = ""
    """why the run was asked to stop"""
    failed: str = ""
    """a worker's own error that ends the run"""

    @classmethod
    def start(cls, settings: RunStarted) -> RunState:
        """The state of a run that is just being started or resumed."""
        origins: dict[int, Source] = {s: Fresh() for s in range(settings.stages + 1)}
        origins |= {stage: Load(folder=folder) for stage, folder in settings.load.items()}
        folders = set(settings.load.values())
        whole = len(folders) == 1 and len(settings.load) == settings.stages + 1
        return cls(
            settings=settings,
            step=settings.first_step,
            generation=settings.first_generation,
            origins=MappingProxyType(origins),
            save_every=settings.save_every,
            evaluated=settings.first_step or -1,
            saved=settings.first_step if whole else -1,
            durable=Load(folder=folders.pop()) if whole else None,
            durable_step=settings.first_step if whole else -1,
        )

    def pairs_of(self, present: Collection[int]) -> set[Pair]:
        """The edges of a replica that has these stages only: routes lead past the others."""
        found = {pair for pair in self.settings.pairs if set(pair) <= set(present)}
        for route in self.settings.routes:
            walk = [stage for stage in route if stage in present]
            found |= {(min(a, b), max(a, b)) for a, b in pairwise(walk)}
        return found

    @property
    def last_durable(self) -> tuple[int, Mapping[int, Source]]:
        """Where a rollback leads: the newest complete checkpoint, or where the run began."""
        if self.durable is None:
            return self.settings.first_step, RunState.start(self.settings).origins
        return self.durable_step, dict.fromkeys(range(self.settings.stages + 1), self.durable)

    @property
    def vacant(self) -> tuple[int, ...]:
        """Stages without a living holder."""
        return tuple(s for s in range(self.settings.stages + 1) if s not in self.holders)

    def with_status(self, status: str) -> tuple[str, ...]:
        """Identities of the workers in this status, in order of identity."""
        return tuple(sorted((w for w, s in self.workers.items() if s.status == status), key=identity_order))


def identity_order(worker: str) -> tuple[int, str]:
    """Sorts w2 before w10."""
    return (len(worker), worker)
