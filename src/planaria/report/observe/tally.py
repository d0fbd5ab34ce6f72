"""Running totals of a run, for trackers and ``/metrics``."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import Metric, ValidationMetric
from planaria.report.run.recoveries import RecoveryFold
from planaria.report.run.recovery_timing import RecoveryTiming

RECOVERY_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""histogram bounds of recovery times, seconds"""


@dataclass
class Durations:
    """Histogram of durations, seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(RECOVERY_S) + 1))
    """recoveries in each bucket up to each of ``RECOVERY_S``, and above the last"""
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(RECOVERY_S, seconds)] += 1
        self.total += seconds


Key = tuple[str, tuple[int, ...]]
"""fault class, nodes"""


@dataclass(frozen=True)
class SlowVerdict:
    """A current verdict of slowness."""

    blamed: d.SlowPartFound
    action: d.HandOverSlowStage | d.Reroute | None = None
    """latest action against it"""

    @property
    def times(self) -> float:
        """Slowdown compared with its peers, or with its own start if it has none; 0 if neither is known."""
        reference_s = self.blamed.peer_median_s or self.blamed.initial_s
        return self.blamed.seconds / reference_s if reference_s > 0 else 0.0


class SlowVerdicts:
    """Current verdicts of slowness, updated with each fact in order."""

    def __init__(self) -> None:
        self.current: dict[Key, SlowVerdict] = {}
        """current verdicts"""
        self.blamed: Counter[str] = Counter()
        """number of verdicts by class"""
        self.actions: Counter[str] = Counter()
        """number of actions by kind: hand_over_slow_stage, reroute"""

    def apply(self, fact: e.Event | d.Decision) -> None:
        """Process a fact; the start of a run or of its resumption clears all verdicts."""
        match fact:
            case e.RunStarted():
                self.current = {}
            case d.SlowPartFound():
                self.current[_verdict_key(fact)] = SlowVerdict(fact)
                self.blamed[fact.fault] += 1
            case d.Cleared():
                self.current.pop(_verdict_key(fact), None)
            case d.HandOverSlowStage():
                self._record_action(fact, [key for key in self.current if "link" not in key[0] and fact.node in key[1]])
            case d.Reroute():
                self._record_action(fact, [key for key in self.current if key[0] == "slow link"])

    def _record_action(self, action: d.HandOverSlowStage | d.Reroute, keys: list[Key]) -> None:
        self.actions[action.kind] += 1
        for key in keys:
            self.current[key] = replace(self.current[key], action=action)


def _verdict_key(fact: d.SlowPartFound | d.Cleared) -> Key:
    return fact.fault, tuple(fact.nodes)


class RunTally:
    """Totals of a run, updated in order; memory grows with workers, not with steps.

    A resumed run continues the counts of its earlier parts, if these are processed as well.
    """

    def __init__(self) -> None:
        self._fold = RecoveryFold()
        self.members = self._fold.members
        self.loss: float | None = None
        """loss of the last step, nats per token"""
        self.tokens_per_s: float | None = None
        self.validation_loss: float | None = None
        """loss of the newest validation"""
        self.recoveries: Counter[str] = Counter()
        """completed recoveries by outcome"""
        self.recovery_s = Durations()
        """durations of recoveries whose end is known"""
        self.lost: Counter[str] = Counter()
        """lost workers by cause"""
        self.term = 0
        """term of the controller that leads; 0 before the run starts"""
        self.lost_controllers: Counter[str] = Counter()
        """lost controllers by cause"""
        self.rounds = 0
        """number of rounds settled by groups of replicas"""
        self.sent = Counter(stages=0, replicas=0)
        """payload bytes between stages of one replica, and between replicas"""
        self.checkpoint: int | None = None
        """step of the newest sealed checkpoint"""
        self.outcome = ""
        """outcome of the run; empty before its end"""
        self.committed_at: float | None = None
        """Unix time of the last commit"""
        self.verdicts = SlowVerdicts()
        self._starting: set[str] = set()
        self._epoch = 0.0
        """Unix time at which the monotonic clock was 0"""

    def apply(self, t: float, fact: e.Event | d.Decision) -> list[RecoveryTiming]:
        """Process an event or decision at monotonic time ``t``; return the recoveries it completes."""
        over = self._fold.apply(t, fact)
        self.verdicts.apply(fact)
        match fact:
            case e.RunStarted():
                self._epoch = fact.wall_time - t
                self.outcome = ""
                self._starting = set()
                self.term = 1
            case e.LeaderStarted():
                self.term = fact.term
                self.lost_controllers[fact.cause] += 1
            case d.Spawn():
                self._starting.add(fact.worker)
            case e.WorkerJoined():
                self._starting.discard(fact.worker)
            case e.WorkerLost():
                self._starting.discard(fact.worker)
                self.lost[fact.cause] += fact.worker not in self.members.unstarted
            case d.Commit():
                self.committed_at = self._epoch + t
            case d.Settle():
                self.rounds += 1
            case e.RoundApplied():
                self.sent["replicas"] += fact.blocking_bytes + fact.prefetched_bytes
            case d.Seal():
                self.checkpoint = fact.step
            case d.Finish():
                self.outcome = fact.outcome
                over += self._fold.close()
        return self._count_recoveries(over)

    def apply_metric(self, metric: Metric) -> None:
        """Process the metrics of a committed step or a validation."""
        if isinstance(metric, ValidationMetric):
            self.validation_loss = metric.val_loss
        else:
            self.loss, self.tokens_per_s = metric.loss, metric.tokens_per_s

    def apply_work_report(self, work: e.WorkReport) -> list[RecoveryTiming]:
        """Process a work report; return the recoveries it completes."""
        replica = self.members.replica
        for peer, sent in work.sent_bytes.items():
            self.sent["stages" if replica(peer) == replica(work.node) else "replicas"] += sent
        return self._count_recoveries(self._fold.apply_work_report(work, replica(work.node)))

    @property
    def steps(self) -> int:
        """Committed steps of the run; decreases after a rollback."""
        return self.members.progress

    @property
    def workers(self) -> dict[str, int]:
        """Number of living workers by state."""
        counts = {"starting": len(self._starting), "spare": self.members.spares, "member": len(self.members.node_of)}
        return dict.fromkeys(counts, 0) if self.outcome else counts

    @property
    def generations(self) -> dict[int, int]:
        """Replica → current generation."""
        return dict(sorted(self.members.generation.items()))

    @property
    def latest(self) -> dict[int, RecoveryTiming]:
        """Replica → its latest recovery, complete or not."""
        return self._fold.latest

    @property
    def counts(self) -> dict[str, float]:
        """Counters by the name of their curve."""
        return {
            "steps": float(self.steps),
            "generation": float(max(self.members.generation.values(), default=0)),
            "rounds": float(self.rounds),
            "sent_bytes": float(self.sent.total()),
            "recoveries": float(self.recoveries.total()),
            "workers_lost": float(self.lost.total()),
        }

    def _count_recoveries(self, over: Iterable[RecoveryTiming]) -> list[RecoveryTiming]:
        for timing in (over := list(over)):
            self.recoveries[timing.outcome] += 1
            if timing.total is not None:
                self.recovery_s.add(timing.total)
        return over
