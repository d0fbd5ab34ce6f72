"""The state of a run as the controller knows it: what ``apply`` folds and ``decide`` looks at."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from planaria.decisions import Fresh, Load, Source
from planaria.events import Replanned, RunStarted
from planaria.routing.arrangement import Arrangement, Pair

Phase = Literal["idle", "replan", "link", "run", "evaluate", "commit", "save", "over"]
Routes = list[list[int]]


@dataclass(frozen=True)
class WorkerState:
    """One worker identity in its latest incarnation."""

    incarnation: int
    status: Literal["starting", "spare", "member", "dead"]
    pid: int = 0


@dataclass(frozen=True)
class RunState:
    """Everything a decision depends on. ``step`` counts committed steps, so it is also the step to run next.

    Who, where and with whom goes by node: where every stage has one worker, that is the stage's number.
    """

    settings: RunStarted
    """what the run was started with"""
    phase: Phase = "idle"
    step: int = 0
    generation: int = 0
    formed: int = -1
    """``step`` when the present generation was formed"""
    workers: Mapping[str, WorkerState] = field(default_factory=lambda: MappingProxyType({}))
    holders: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """node → the living worker that stands there, or is about to"""
    origins: Mapping[int, Source] = field(default_factory=lambda: MappingProxyType({}))
    """nodes whose state does not exist in any worker yet and comes from the seed or from disk"""
    lost: frozenset[int] = frozenset()
    """nodes whose state died with their worker and is not rebuilt yet"""
    ages: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """node → commits of its present, or last, holder, through which it kept its copies of others up to date"""
    rested: frozenset[int] = frozenset()
    """nodes that were skipped since the last commit of the whole replica: their copies have missed steps"""
    skipped: frozenset[int] = frozenset()
    """nodes that the present generation does without"""
    detour: Replanned | None = None
    """the last plan for nodes that were left"""
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
        origins: dict[int, Source] = {}
        for node, stage in settings.stage_of.items():
            folder = settings.load.get(stage)
            origins[node] = Fresh() if folder is None else Load(folder=folder)
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

    @cached_property
    def arrangement(self) -> Arrangement:
        """All nodes of the run, whether anybody stands there or not."""
        settings = self.settings
        return (
            Arrangement(dict(enumerate(settings.arrangement)))
            if settings.arrangement
            else Arrangement.single(settings.stages)
        )

    @cached_property
    def held(self) -> Arrangement:
        """The nodes at which a worker stands."""
        return self.arrangement.of(self.holders)

    @cached_property
    def stateful(self) -> Arrangement:
        """The nodes whose worker has its stage's state."""
        return self.arrangement.of(self.holders.keys() - self.lost - self.origins.keys())

    def routes_over(self, present: Collection[int]) -> Routes | None:
        """The ways of microbatches when these nodes are there; None if they have to be planned yet."""
        missing = self.arrangement.stage.keys() - set(present)
        if not missing or not self.settings.arrangement:
            return [[node for node in route if node not in missing] for route in self.settings.routes]
        return self.detour.routes if self.detour and set(self.detour.nodes) == set(present) else None

    def pairs_of(self, present: Collection[int]) -> set[Pair]:
        """The edges of a replica that has these nodes only."""
        copies = {pair for pair in self.settings.pairs if set(pair) <= set(present)}
        there = self.arrangement.of(present)
        return copies | there.pairs(self.routes_over(present) or ()) if there.stages else copies

    @property
    def last_durable(self) -> tuple[int, Mapping[int, Source]]:
        """Where a rollback leads: the newest complete checkpoint, or where the run began."""
        if self.durable is None:
            return self.settings.first_step, RunState.start(self.settings).origins
        return self.durable_step, dict.fromkeys(self.arrangement.stage, self.durable)

    @property
    def vacant(self) -> tuple[int, ...]:
        """Nodes without a living worker."""
        return tuple(node for node in self.arrangement.stage if node not in self.holders)

    def with_status(self, status: str) -> tuple[str, ...]:
        """Identities of the workers in this status, in order of identity."""
        return tuple(sorted((w for w, s in self.workers.items() if s.status == status), key=identity_order))


def identity_order(worker: str) -> tuple[int, str]:
    """Sorts w2 before w10."""
    return (len(worker), worker)
