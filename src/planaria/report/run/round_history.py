"""Exchange rounds of replicas, folded from a fleet's log: members, waits and bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord, cached
from planaria.report.phrases import format_count
from planaria.report.worker_assignments import WorkerAssignments


@dataclass
class RoundHistory:
    """A round settled by a group of replicas, or by one alone."""

    part: int
    """number of resumptions before it"""
    round: int
    members: tuple[int, ...]
    contributors: tuple[int, ...]
    """replicas whose updates were combined: in a decoupled exchange, they may differ from the members"""
    drawn: tuple[int, ...]
    """live replicas of the drawn group"""
    missing: tuple[int, ...]
    """live replicas of the drawn group that had neither contributed nor settled the round"""
    rejected: dict[int, str]
    """missing replica with an invalid update → reason"""
    timed_out: bool
    """whether the wait for others timed out (``exchange.patience_s``)"""
    t: float
    steps: dict[int, int]
    """member → its number of committed steps"""
    waited_for_peers_s: dict[int, float]
    """member → seconds from its last work until the others joined"""
    waited_for_updates_s: dict[int, float]
    """member → seconds from then, or from its later work, until the round was settled"""
    blocking_bytes: dict[int, int] = field(default_factory=dict)
    """member → bytes sent by all its stages while another replica waited"""
    prefetched_bytes: dict[int, int] = field(default_factory=dict)
    """member → bytes sent by all its stages during inner steps"""
    spreads: list[float] = field(default_factory=list)
    """RMS distance from the mean before the round, per stage and member whose updates determine it; a stage without
    weights in the round's fragment has none"""

    @property
    def alone(self) -> bool:
        return len({*self.members, *self.contributors}) == 1


ROUNDS_KEPT = 1000
"""rounds kept; no replica lags further behind"""


class Rounds:
    """Folds facts into round histories; reports after a round was settled are added to its history."""

    def __init__(self, members: WorkerAssignments) -> None:
        """``members`` must process each fact first."""
        self._members = members
        self._part = -1
        self._groups: dict[int, list[list[int]]] = {}
        self._settled: dict[int, set[int]] = {}
        """round → replicas that have settled it"""
        self._late: set[tuple[int, int]] = set()
        """(round, replica whose wait timed out)"""
        self._rejected: dict[int, dict[int, str]] = {}
        """round → replica with a rejected update → reason"""
        self._worked: dict[int, float] = {}
        """replica → time of its last work"""
        self._stepping: set[int] = set()
        """replicas within a step; some exchanges begin rounds during it"""
        self._writing: set[str] = set()
        """workers that write a copy of their stage"""
        self._met: dict[int, tuple[int, float, float]] = {}
        """replica → its current round, since when, and how long it had waited before"""
        self._last: dict[int, RoundHistory] = {}
        self._t = 0.0
        """time of the present fact"""
        self._left: Collection[int] = ()
        """nodes that lost their holder by the present fact"""

    def apply(self, t: float, fact: e.Event | d.Decision, left: Collection[int]) -> RoundHistory | None:
        """Process a fact; return the round that it settles, if any. ``left``: nodes that lost their holder."""
        started = self._members.started
        if isinstance(fact, e.RunStarted):
            self._reset()
        elif started is not None and started.max_replicas > 1:
            self._t, self._left = t, left
            return self._apply(fact)
        return None

    def _reset(self) -> None:
        self._part += 1
        for table in (self._groups, self._settled, self._late, self._rejected, self._worked, self._met, self._last):
            table.clear()
        self._writing.clear()
        self._stepping.clear()

    def _apply(self, fact: e.Event | d.Decision) -> RoundHistory | None:
        """Apply a fact of a run with several replicas."""
        match fact:
            case d.Settle():
                return self._settle(self._t, fact)
            case e.RoundApplied():
                self._add_report(fact)
            case d.RunStep():
                self._stepping.add(fact.replica)
            case d.Commit() | d.Form():
                self._stepping.discard(fact.replica)
            case d.DrawGroups():
                self._groups[fact.round] = fact.groups
            case d.BeginRound():
                for replica in fact.members:
                    self._met[replica] = fact.round, self._t, self._idle(replica, self._t)
            case e.UpdateRejected():
                self._rejected.setdefault(fact.round, {}).setdefault(fact.replica, fact.reason)
            case e.RoundWaitExpired():
                self._late.add((fact.round, fact.replica))
            case e.StageSaved() if fact.worker in self._writing:  # it did not wait for the write
                self._writing.discard(fact.worker)
            case e.StageSaved() | e.StageCommitted() | e.StageReady() | e.Linked():
                self._on_work(fact.worker)
            case e.StageCopied():
                self._writing.add(fact.worker)
                self._on_work(fact.worker)
            case e.WorkerLost():
                self._writing.discard(fact.worker)
                self._drop_rounds()
            case d.Disband():
                self._drop_rounds()
        return None

    def _add_report(self, fact: e.RoundApplied) -> None:
        """Add a stage's report to the history of its round."""
        replica = self._members.replica(fact.node)
        history = self._last.get(replica)
        if history is None or history.round != fact.round:
            return
        self._worked[replica] = self._t
        history.blocking_bytes[replica] = history.blocking_bytes.get(replica, 0) + fact.blocking_bytes
        history.prefetched_bytes[replica] = history.prefetched_bytes.get(replica, 0) + fact.prefetched_bytes
        if fact.spread and not history.alone:
            history.spreads.append(fact.spread)

    def _on_work(self, worker: str) -> None:
        """Record that a worker has just finished work of its replica."""
        if worker in self._members.node_of:
            self._worked[self._members.replica(self._members.node_of[worker])] = self._t

    def _drop_rounds(self) -> None:
        """Forget the current rounds of replicas that lost a node."""
        for node in self._left:
            self._met.pop(self._members.replica(node), None)

    def _idle(self, replica: int, t: float) -> float:
        return 0.0 if replica in self._stepping else t - self._worked.get(replica, t)

    def _settle(self, t: float, fact: d.Settle) -> RoundHistory:
        groups = self._groups.get(fact.round, [sorted(self._members.live)])  # without a draw, all meet
        group = next((g for g in groups if fact.members[0] in g), fact.members)
        drawn = tuple(n for n in group if n in self._members.live)
        settled = self._settled.setdefault(fact.round, set())
        self._forget(fact.round - ROUNDS_KEPT)
        waited_for_peers_s, waited_for_updates_s = {}, {}
        for replica in fact.members:
            current, since, waited = self._met.pop(replica, (-1, 0.0, 0.0))
            met = current == fact.round
            idle = self._idle(replica, t)
            waited_for_peers_s[replica], waited_for_updates_s[replica] = (
                (waited, min(t - since, idle)) if met else (idle, 0.0)
            )
        contributors = tuple(fact.contributors or fact.members)
        present = {*drawn} if fact.contributors and settled else {*contributors, *fact.members, *settled}
        missing = tuple(n for n in drawn if n not in present)
        reasons = {**self._rejected.get(fact.round, {}), **fact.left_out}
        rejected = {n: why for n, why in reasons.items() if n in missing}
        history = RoundHistory(
            part=self._part,
            round=fact.round,
            members=tuple(fact.members),
            contributors=contributors,
            drawn=drawn,
            missing=missing,
            rejected=rejected,
            timed_out=any((fact.round, replica) in self._late for replica in fact.members),
            t=t,
            steps={replica: self._members.steps.get(replica, 0) for replica in fact.members},
            waited_for_peers_s=waited_for_peers_s,
            waited_for_updates_s=waited_for_updates_s,
        )
        settled |= set(fact.members)
        self._last |= dict.fromkeys(fact.members, history)
        return history

    def _forget(self, before: int) -> None:
        """Drop old rounds, which receive no more reports."""
        if len(self._settled) > 2 * ROUNDS_KEPT:
            self._groups = {number: groups for number, groups in self._groups.items() if number >= before}
            self._settled = {number: members for number, members in self._settled.items() if number >= before}
            self._late = {(number, members) for number, members in self._late if number >= before}


@cached
def settled_rounds(record: RunRecord) -> list[RoundHistory]:
    """Return the settled rounds of a run, in order; empty for inline runs and single replicas."""
    if all(started.max_replicas == 1 for _, started in record.starts):
        return []
    members = WorkerAssignments()
    rounds = Rounds(members)
    histories = (rounds.apply(t, fact, members.apply(fact)) for t, fact in record.history)
    return [history for history in histories if history is not None]


@dataclass(frozen=True)
class ExchangeTotals:
    """Totals of an exchange over a run and all replicas."""

    rounds: int = 0
    attended: int = 0
    """attendances of replicas"""
    alone: int = 0
    """attendances without another replica"""
    by_draw: int = 0
    """attendances of replicas that were drawn alone"""
    waited_for_peers_s: float = 0.0
    """seconds waited for others to join"""
    waited_for_updates_s: float = 0.0
    """seconds waited for their updates"""
    blocking_bytes: int = 0
    prefetched_bytes: int = 0
    rejected: int = 0
    """rejected updates"""


def totals(histories: list[RoundHistory]) -> ExchangeTotals:
    """Return the sums over rounds."""
    alone = [history for history in histories if history.alone]
    return ExchangeTotals(
        rounds=len({(history.part, history.round) for history in histories}),
        attended=sum(len(history.members) for history in histories),
        alone=len(alone),
        by_draw=sum(len(history.drawn) == 1 for history in alone),
        waited_for_peers_s=sum(sum(history.waited_for_peers_s.values()) for history in histories),
        waited_for_updates_s=sum(sum(history.waited_for_updates_s.values()) for history in histories),
        blocking_bytes=sum(sum(history.blocking_bytes.values()) for history in histories),
        prefetched_bytes=sum(sum(history.prefetched_bytes.values()) for history in histories),
        rejected=sum(len(history.rejected) for history in histories),
    )


def totals_lines(sums: ExchangeTotals) -> Iterator[str]:
    """Yield the totals in words."""
    alone = f"alone {sums.alone} of {format_count(sums.attended, 'time')}, {sums.by_draw} by the draw"
    yield f"{format_count(sums.rounds, 'round')}; {alone}"
    yield (
        f"{_format_mb(sums.prefetched_bytes)} sent during inner steps, {_format_mb(sums.blocking_bytes)} while others "
        "waited"
    )
    yield (
        f"{sums.waited_for_peers_s + sums.waited_for_updates_s:.2f} s waited, sum over replicas: "
        f"{sums.waited_for_peers_s:.2f} s for others to join, {sums.waited_for_updates_s:.2f} s for their updates"
    )
    if sums.rejected:
        yield f"{format_count(sums.rejected, 'update')} rejected"


def _format_mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
