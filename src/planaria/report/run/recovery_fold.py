"""Facts, and what workers did, folded into recoveries: of a log that is read, and of a run while it goes on. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.report.membership import Membership
from planaria.report.run.naming import Naming
from planaria.report.run.recovery_timing import SENT_AWAY, Outcome, RecoveryTiming


class Recoveries:
    """Folds facts, and what workers did, into recoveries: each is given when it is over, or another begins.

    What workers did may be told before all facts, if it is remembered, or as it happens, while a run goes on.
    """

    def __init__(self, remembers: bool = False) -> None:
        """``remembers``: keep what was done while no recovery was open, which a live run would gather for months."""
        self._known, self._remembers = _Known(), remembers
        self._done: list[RecoveryTiming] = []
        self._scans = [_Scan(self._known, 0, self._done)]

    @property
    def members(self) -> Membership:
        """Who stands where, by all that was taken in."""
        return self._known.members

    def take(self, t: float, fact: e.Event | d.Decision) -> list[RecoveryTiming]:
        """Takes in the next fact; the recoveries that are over with it."""
        left = self._known.take(t, fact)
        if isinstance(fact, e.RunStarted):
            self._close()
            self._scans = [_Scan(self._known, replica, self._done) for replica in range(fact.most_replicas)]
        for replica in _concerned(fact, left, self._known.members):
            self._scans[replica].take(t, fact, left)
        return self._over()

    def worked(self, work: e.Worked, replica: int) -> list[RecoveryTiming]:
        """Takes in what a worker of this replica did; the recoveries of which it was the end."""
        if not self._remembers and (replica >= len(self._scans) or not self._scans[replica].open):
            return []
        self._known.work(work, replica)
        if not self._remembers:
            self._scans[replica].look()
        return self._over()

    @property
    def latest(self) -> dict[int, RecoveryTiming]:
        """Replica → its latest recovery in this part of the run, as far as it has come."""
        found = {replica: scan.latest for replica, scan in enumerate(self._scans)}
        return {replica: timing for replica, timing in found.items() if timing is not None}

    def close(self) -> list[RecoveryTiming]:
        """Those that are still open, as they stand."""
        self._close()
        return self._over()

    def _close(self) -> None:
        for scan in self._scans:
            scan.close()

    def _over(self) -> list[RecoveryTiming]:
        if not self._done:
            return []
        over = list(self._done)
        self._done.clear()
        if not self._remembers and not any(scan.open for scan in self._scans):
            self._known.forget()
        return over


def _concerned(fact: e.Event | d.Decision, left: list[int], members: Membership) -> list[int]:
    """The replica that a fact is about, if it is about one; ``left``: the nodes that somebody has left with it."""
    if isinstance(fact, d.RunStep | d.Form | d.Cannot | d.Commit | d.Disband):
        return [fact.replica]
    if isinstance(fact, e.WorkerLost):
        return [members.replica(node) for node in left]
    return [members.replica(fact.node)] if isinstance(fact, e.EdgeBroken | e.Linked) else []


class _Known:
    """What all replicas' recoveries are told by: who stood where, who was struck when, and when work was through."""

    def __init__(self) -> None:
        self.members, self.naming = Membership(), Naming()
        self.struck: dict[str, float] = {}
        """worker → when chaos struck it"""
        self._ends: dict[tuple[int, int, str], list[float]] = defaultdict(list)

    def work(self, work: e.Worked, replica: int) -> None:
        """Microbatches of a replica were through."""
        for span in work.spans if work.stage == 0 else ():
            # A validation has no backward: there, the head's forward is a microbatch's last action.
            if (span.action == "backward" and span.hop == 0) or (span.action == "forward" and span.hop > 0):
                mode = "train" if span.action == "backward" else "evaluate"
                insort(self._ends[replica, work.generation, mode], span.end)

    def forget(self) -> None:
        """When work was through is of no use any more."""
        self._ends.clear()

    def take(self, t: float, fact: e.Event | d.Decision) -> list[int]:
        """The nodes that somebody has left with this fact."""
        if isinstance(fact, e.RunStarted):
            self.naming, self.struck = Naming(fact), {}
        elif isinstance(fact, e.FaultInjected):
            self.struck[fact.worker] = t
            if fact.signal == "SIGCONT":  # thawed in time: what this worker may die of later is something else
                del self.struck[fact.worker]
        elif isinstance(fact, e.WorkerJoined):
            self.struck.pop(fact.worker, None)
        return self.members.take(fact)

    def finished(self, t: float, replica: int, generation: int, mode: str) -> float | None:
        """When a generation's first microbatch after ``t`` was through."""
        ends = self._ends.get((replica, generation, mode), [])
        at = bisect_left(ends, t)
        return ends[at] if at < len(ends) else None


@dataclass
class _Open:
    """A recovery that is still going on."""

    known: _Known
    replica: int
    step: int
    lost_t: float
    naming: Naming
    fault_t: float | None = None
    nodes: set[int] = field(default_factory=set)
    lost: dict[str, tuple[str, int]] = field(default_factory=dict)
    """lost worker → cause, and the node where it stood"""
    forms: list[tuple[float, d.Form]] = field(default_factory=list)
    mode: str | None = None
    linked: list[tuple[float, e.Linked]] = field(default_factory=list)
    ended: Literal["cannot", "disbanded"] | None = None
    committed: bool = False

    @property
    def whole(self) -> bool:
        """Every member of the last formation has linked."""
        return bool(self.forms) and {k.node for _, k in self.linked} == {m.node for m in self.forms[-1][1].members}

    @property
    def outcome(self) -> Outcome:
        if self.ended:
            return self.ended
        outcome = self.forms[-1][1].outcome if self.whole else "started"
        return "unfinished" if outcome == "started" else outcome

    def add(self, worker: str, cause: str, node: int, fault_t: float | None) -> None:
        self.lost[worker] = cause, node
        self.nodes.add(node)
        if fault_t is not None and fault_t <= self.lost_t:
            self.fault_t = fault_t if self.fault_t is None else min(self.fault_t, fault_t)

    def form(self, t: float, form: d.Form) -> None:
        self.forms.append((t, form))
        self.linked, self.mode, self.committed = [], None, False

    @property
    def finished_t(self) -> float | None:
        if not self.forms:
            return None
        t, form = self.forms[-1]
        return self.known.finished(t, self.replica, form.generation, self.mode or "train")

    def timing(self) -> RecoveryTiming:
        formed_t, form = self.forms[-1] if self.forms else (None, None)
        links = [link for _, link in self.linked]
        return RecoveryTiming(
            step=self.step,
            nodes=tuple(sorted(self.nodes)),
            where=self.naming.name(self.nodes),
            stages=tuple(self.naming.stage(node) for node in sorted(self.nodes)),
            workers=tuple(self.lost),
            posts=tuple(self.naming.stage(node) for _, node in self.lost.values()),
            causes=tuple(cause for cause, _ in self.lost.values()),
            outcome=self.outcome,
            generation=form.generation if form else None,
            resumed_step=form.step if form else None,
            replica=self.replica,
            heirs={n: worker for n, worker in form.holders.items() if n in self.nodes} if form and self.lost else {},
            attempts=len(self.forms),
            fault_t=self.fault_t,
            lost_t=self.lost_t,
            formed_t=formed_t,
            linked_t=max(t for t, _ in self.linked) if self.whole else None,
            finished_t=self.finished_t,
            relink=max((link.link_s for link in links), default=0.0),
            transfer=max((link.transfer_s for link in links), default=0.0),
            rebuild=max((link.rebuild_s for link in links), default=0.0),
            transfer_bytes=sum(link.transfer_bytes for link in links),
        )


class _Scan:
    """One pass over what concerns a replica: the edges that broke, and the recovery that is open."""

    def __init__(self, known: _Known, replica: int, done: list[RecoveryTiming]) -> None:
        """``done`` takes what is over."""
        self._done = done
        self._known, self._replica, self._naming = known, replica, known.naming
        self._open: _Open | None = None
        self._last: RecoveryTiming | None = None
        self._broken: list[tuple[float, e.EdgeBroken]] = []

    def take(self, t: float, fact: e.Event | d.Decision, left: list[int]) -> None:
        if isinstance(fact, d.RunStep):
            if self._open and self._open.mode is None:
                self._open.mode = fact.mode
        elif isinstance(fact, e.WorkerLost):
            self._lost(t, fact, left[0])
        elif isinstance(fact, e.EdgeBroken):
            self._broken.append((t, fact))
        elif isinstance(fact, d.Form):
            self._form(t, fact)
        elif isinstance(fact, e.Linked):
            if self._open and self._open.forms and fact.generation == self._open.forms[-1][1].generation:
                self._open.linked.append((t, fact))
        elif isinstance(fact, d.Cannot | d.Disband):
            self._end(t, fact)
        elif self._open and isinstance(fact, d.Commit):
            self._open.committed = bool(self._open.forms)

    def _end(self, t: float, fact: d.Cannot | d.Disband) -> None:
        """There will be no recovery."""
        if isinstance(fact, d.Disband):
            self._close_if_over(t)
            self._broken = []
        if self._open:
            self._open.ended = "cannot" if isinstance(fact, d.Cannot) else "disbanded"
        if isinstance(fact, d.Disband):
            self.close()

    @property
    def open(self) -> bool:
        """Is a recovery going on?"""
        return self._open is not None

    @property
    def latest(self) -> RecoveryTiming | None:
        """The recovery that is going on, or else the last one."""
        return self._open.timing() if self._open else self._last

    def look(self) -> None:
        """Its first microbatch may be through by now."""
        if self._open and self._open.whole and self._open.finished_t is not None:
            self.close()

    def close(self) -> None:
        if self._open:
            self._last = self._open.timing()
            self._done.append(self._last)
        self._open = None

    def _lost(self, t: float, fact: e.WorkerLost, node: int) -> None:
        self._close_if_over(t)
        self._open = self._open or self._begin(t)
        struck = self._known.struck.pop(fact.worker, None)
        if fact.worker in self._known.members.released:  # training went on from what it was struck by until now
            self._open.add(fact.worker, SENT_AWAY, node, None)
        else:
            self._open.add(fact.worker, fact.cause, node, struck)

    def _begin(self, t: float) -> _Open:
        return _Open(self._known, self._replica, self._known.members.own_step(self._replica), t, self._naming)

    def _form(self, t: float, form: d.Form) -> None:
        self._close_if_over(t)
        if self._open is None and form.outcome == "relinked" and self._broken:
            self._open = self._begin(self._broken[0][0])
            self._open.nodes = {node for _, edge in self._broken for node in (edge.node, edge.peer)}
        self._broken = []
        if self._open:
            self._open.form(t, form)

    def _close_if_over(self, t: float) -> None:
        """A loss or formation after the first finished microbatch is another recovery's."""
        finished = self._open.finished_t if self._open else None
        if self._open and (self._open.committed or (finished is not None and finished <= t)):
            self.close()
