"""Recoveries of a run, folded from the facts and work reports of a log or of a live run, and counts of its faults."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord, cached
from planaria.report.run.naming import Naming, naming_of
from planaria.report.run.recovery_timing import EXCLUDED, Outcome, RecoveryTiming
from planaria.report.worker_assignments import WorkerAssignments


class RecoveryFold:
    """Folds facts and work reports into recoveries; returns each when it ends or the next one begins.

    All work reports may precede the facts (``keep_reports``). In a live run, both come in order.
    """

    def __init__(self, keep_reports: bool = False) -> None:
        """:param keep_reports: keep work reports from outside recoveries; unbounded in a live run"""
        self._shared, self._keep_reports = _SharedState(), keep_reports
        self._done: list[RecoveryTiming] = []
        self._folds = [_ReplicaRecoveries(self._shared, 0, self._done)]

    @property
    def members(self) -> WorkerAssignments:
        """Current assignments."""
        return self._shared.members

    def apply(self, t: float, fact: e.Event | d.Decision) -> list[RecoveryTiming]:
        """Process a fact; return the recoveries it completes."""
        left = self._shared.apply(t, fact)
        if isinstance(fact, e.RunStarted):
            self._close()
            self._folds = [
                _ReplicaRecoveries(self._shared, replica, self._done) for replica in range(fact.max_replicas)
            ]
        for replica in _replicas_with_changed_recovery(fact, left, self._shared.members):
            self._folds[replica].apply(t, fact, left)
        return self._completed()

    def apply_work_report(self, work: e.WorkReport, replica: int) -> list[RecoveryTiming]:
        """Process a work report of a replica; return the recoveries it completes."""
        if not self._keep_reports and (replica >= len(self._folds) or not self._folds[replica].open):
            return []
        self._shared.apply_work_report(work, replica)
        if not self._keep_reports:
            self._folds[replica].close_if_finished()
        return self._completed()

    @property
    def latest(self) -> dict[int, RecoveryTiming]:
        """Replica → its latest recovery in this part of the run, complete or not."""
        timings = {replica: fold.latest for replica, fold in enumerate(self._folds)}
        return {replica: timing for replica, timing in timings.items() if timing is not None}

    def close(self) -> list[RecoveryTiming]:
        """Close and return the open recoveries."""
        self._close()
        return self._completed()

    def _close(self) -> None:
        for fold in self._folds:
            fold.close()

    def _completed(self) -> list[RecoveryTiming]:
        if not self._done:
            return []
        over = list(self._done)
        self._done.clear()
        if not self._keep_reports and not any(fold.open for fold in self._folds):
            self._shared.forget()
        return over


def _replicas_with_changed_recovery(
    fact: e.Event | d.Decision, left: list[int], members: WorkerAssignments
) -> list[int]:
    """Return the replicas whose recoveries a fact may change; ``left``: nodes that lost their holder."""
    if isinstance(fact, d.RunStep | d.Form | d.Unrecoverable | d.Commit | d.Disband):
        return [fact.replica]
    if isinstance(fact, e.WorkerLost):
        return [members.replica(node) for node in left]
    return [members.replica(fact.node)] if isinstance(fact, e.EdgeBroken | e.Linked) else []


class _SharedState:
    """State shared by all replicas' recoveries: assignments, injected faults and completed microbatches."""

    def __init__(self) -> None:
        self.members = WorkerAssignments()
        self.injected: dict[str, float] = {}
        """worker → time of its injected fault"""
        self._ends: dict[tuple[int, int, str], list[float]] = defaultdict(list)

    def apply_work_report(self, work: e.WorkReport, replica: int) -> None:
        """Record the microbatches that a replica completed."""
        for span in work.spans if work.stage == 0 else ():
            # In validations, the head's forward is a microbatch's last action.
            if (span.action == "backward" and span.hop == 0) or (span.action == "forward" and span.hop > 0):
                mode = "train" if span.action == "backward" else "evaluate"
                insort(self._ends[replica, work.generation, mode], span.end)

    def forget(self) -> None:
        self._ends.clear()

    def apply(self, t: float, fact: e.Event | d.Decision) -> list[int]:
        """Process a fact; return the nodes that lost their holder."""
        if isinstance(fact, e.RunStarted):
            self.injected = {}
        elif isinstance(fact, e.FaultInjected):
            self.injected[fact.worker] = t
            if fact.signal == "SIGCONT":  # resumed in time: a later death has another cause
                del self.injected[fact.worker]
        elif isinstance(fact, e.WorkerJoined):
            self.injected.pop(fact.worker, None)
        return self.members.apply(fact)

    def finished(self, t: float, replica: int, generation: int, mode: str) -> float | None:
        """Return when a generation completed its first microbatch after ``t``."""
        ends = self._ends.get((replica, generation, mode), [])
        index = bisect_left(ends, t)
        return ends[index] if index < len(ends) else None


@dataclass
class _OpenRecovery:
    """A recovery in progress."""

    shared: _SharedState
    replica: int
    step: int
    lost_t: float
    naming: Naming
    fault_t: float | None = None
    nodes: set[int] = field(default_factory=set)
    lost: dict[str, tuple[str, int]] = field(default_factory=dict)
    """lost worker → cause, node"""
    forms: list[tuple[float, d.Form]] = field(default_factory=list)
    mode: str | None = None
    linked: list[tuple[float, e.Linked]] = field(default_factory=list)
    ended: Literal["cannot", "disbanded"] | None = None
    committed: bool = False

    @property
    def all_linked(self) -> bool:
        """Whether every member of the last formation has linked."""
        return bool(self.forms) and {k.node for _, k in self.linked} == {m.node for m in self.forms[-1][1].members}

    @property
    def outcome(self) -> Outcome:
        if self.ended:
            return self.ended
        outcome = self.forms[-1][1].outcome if self.all_linked else "started"
        return "unfinished" if outcome == "started" else outcome

    def add(self, worker: str, cause: str, node: int, fault_t: float | None) -> None:
        self.lost[worker] = cause, node
        self.nodes.add(node)
        if fault_t is not None and fault_t <= self.lost_t:
            self.fault_t = fault_t if self.fault_t is None else min(self.fault_t, fault_t)

    def form(self, t: float, form: d.Form) -> None:
        self.forms.append((t, form))
        self.linked = []
        self.mode = None
        self.committed = False

    @property
    def finished_t(self) -> float | None:
        if not self.forms:
            return None
        t, form = self.forms[-1]
        return self.shared.finished(t, self.replica, form.generation, self.mode or "train")

    def timing(self) -> RecoveryTiming:
        formed_t, form = self.forms[-1] if self.forms else (None, None)
        links = [link for _, link in self.linked]
        return RecoveryTiming(
            step=self.step,
            nodes=tuple(sorted(self.nodes)),
            where=self.naming.name(self.nodes),
            stages=tuple(self.naming.stage(node) for node in sorted(self.nodes)),
            workers=tuple(self.lost),
            stage_of_worker=tuple(self.naming.stage(node) for _, node in self.lost.values()),
            causes=tuple(cause for cause, _ in self.lost.values()),
            outcome=self.outcome,
            generation=form.generation if form else None,
            resumed_step=form.step if form else None,
            replica=self.replica,
            new_workers={n: worker for n, worker in form.holders.items() if n in self.nodes}
            if form and self.lost
            else {},
            attempts=len(self.forms),
            fault_t=self.fault_t,
            lost_t=self.lost_t,
            formed_t=formed_t,
            linked_t=max(t for t, _ in self.linked) if self.all_linked else None,
            finished_t=self.finished_t,
            relink=max((link.link_s for link in links), default=0.0),
            transfer=max((link.transfer_s for link in links), default=0.0),
            rebuild=max((link.rebuild_s for link in links), default=0.0),
            transfer_bytes=sum(link.transfer_bytes for link in links),
        )


class _ReplicaRecoveries:
    """Broken edges and the open recovery of one replica."""

    def __init__(self, shared: _SharedState, replica: int, done: list[RecoveryTiming]) -> None:
        """:param done: receives completed recoveries"""
        self._done = done
        self._shared = shared
        self._replica = replica
        self._naming = shared.members.naming
        self._open: _OpenRecovery | None = None
        self._last: RecoveryTiming | None = None
        self._broken: list[tuple[float, e.EdgeBroken]] = []

    def apply(self, t: float, fact: e.Event | d.Decision, left: list[int]) -> None:
        match fact:
            case d.RunStep() if self._open and self._open.mode is None:
                self._open.mode = fact.mode
            case e.WorkerLost():
                self._on_worker_lost(t, fact, left[0])
            case e.EdgeBroken():
                self._broken.append((t, fact))
            case d.Form():
                self._on_form(t, fact)
            case e.Linked() if self._open and self._open.forms:
                if fact.generation == self._open.forms[-1][1].generation:
                    self._open.linked.append((t, fact))
            case d.Unrecoverable() | d.Disband():
                self._on_failure(t, fact)
            case d.Commit() if self._open:
                self._open.committed = bool(self._open.forms)

    def _on_failure(self, t: float, fact: d.Unrecoverable | d.Disband) -> None:
        """End the open recovery without success."""
        if isinstance(fact, d.Disband):
            self._close_if_over(t)
            self._broken = []
        if self._open:
            self._open.ended = "cannot" if isinstance(fact, d.Unrecoverable) else "disbanded"
        if isinstance(fact, d.Disband):
            self.close()

    @property
    def open(self) -> bool:
        """Whether a recovery is in progress."""
        return self._open is not None

    @property
    def latest(self) -> RecoveryTiming | None:
        """The current recovery, else the last one."""
        return self._open.timing() if self._open else self._last

    def close_if_finished(self) -> None:
        """Close the recovery if its first microbatch has completed."""
        if self._open and self._open.all_linked and self._open.finished_t is not None:
            self.close()

    def close(self) -> None:
        if self._open:
            self._last = self._open.timing()
            self._done.append(self._last)
        self._open = None

    def _on_worker_lost(self, t: float, fact: e.WorkerLost, node: int) -> None:
        self._close_if_over(t)
        self._open = self._open or self._open_recovery(t)
        fault_t = self._shared.injected.pop(fact.worker, None)
        if fact.worker in self._shared.members.released:  # training continued after its fault until now
            self._open.add(fact.worker, EXCLUDED, node, None)
        else:
            self._open.add(fact.worker, fact.cause, node, fault_t)

    def _open_recovery(self, t: float) -> _OpenRecovery:
        return _OpenRecovery(self._shared, self._replica, self._shared.members.own_step(self._replica), t, self._naming)

    def _on_form(self, t: float, form: d.Form) -> None:
        self._close_if_over(t)
        if self._open is None and form.outcome == "relinked" and self._broken:
            self._open = self._open_recovery(self._broken[0][0])
            self._open.nodes = {node for _, edge in self._broken for node in (edge.node, edge.peer)}
        self._broken = []
        if self._open:
            self._open.form(t, form)

    def _close_if_over(self, t: float) -> None:
        """Close a recovery before a loss or formation that follows its first completed microbatch."""
        finished = self._open.finished_t if self._open else None
        if self._open and (self._open.committed or (finished is not None and finished <= t)):
            self.close()


@cached
def recoveries(record: RunRecord) -> list[RecoveryTiming]:
    """Return the recoveries of all replicas, in order. The death of a spare needs none."""
    fold = RecoveryFold(keep_reports=True)
    naming = naming_of(record)
    for _, work in record.worked:
        fold.apply_work_report(work, naming.replica(work.node))
    done: list[RecoveryTiming] = []
    part: list[RecoveryTiming] = []
    for t, fact in record.turns:
        part += fold.apply(t, fact)
        if isinstance(fact, e.RunStarted):
            done, part = done + sorted(part, key=attrgetter("lost_t")), []
    return done + sorted([*part, *fold.close()], key=attrgetter("lost_t"))


@dataclass(frozen=True)
class FaultsSummary:
    """Counts of faults and recoveries."""

    injected: int = 0
    """injected faults, harmless ones included"""
    deaths: int = 0
    """members that died"""
    excluded: int = 0
    """members excluded because their replica's updates were invalid"""
    spares_lost: int = 0
    zombies: int = 0
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    """recoveries by outcome"""


def faults_summary(record: RunRecord) -> FaultsSummary:
    """Count the faults of a run and the outcomes of its recoveries."""
    facts = Counter(type(fact) for _, fact in record.landmarks)
    timings = recoveries(record)
    deaths, missing = sum(timing.deaths for timing in timings), sum(len(timing.workers) for timing in timings)
    return FaultsSummary(
        injected=facts[e.FaultInjected],
        deaths=deaths,
        excluded=missing - deaths,
        spares_lost=facts[e.WorkerLost] - missing,
        zombies=facts[e.ZombieIgnored],
        outcomes=Counter(timing.outcome for timing in timings),
    )
