"""What a run has come to by now, in numbers: what trackers are told, and what ``/metrics`` answers. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.run_record import Metric, RunRecord, ValidationMetric
from planaria.report.run.naming import Naming, naming_of
from planaria.report.run.recovery_fold import Recoveries
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.standing import Verdicts

RECOVERY_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""seconds by which recoveries are sorted: from processes of one machine to machines that are started anew"""


@dataclass
class Durations:
    """How many took how long, seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(RECOVERY_S) + 1))
    """up to each of ``RECOVERY_S`` and above the one before; beyond the last"""
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(RECOVERY_S, seconds)] += 1
        self.total += seconds


class Tally:
    """Takes in what is told of a run, in order; in between, it answers. It grows with workers, never with steps.

    A run that is resumed counts on, where its earlier parts are taken in as well; who is there is told anew.
    """

    def __init__(self, naming: Naming | None = None) -> None:
        """``naming``: of all parts of a log that is read, where what workers did is told before all facts."""
        self._naming, self._fold = naming, Recoveries(remembers=naming is not None)
        self.members = self._fold.members
        self.loss: float | None = None
        """of the last step, nats per token"""
        self.tokens_per_s: float | None = None
        self.validation_loss: float | None = None
        """the newest"""
        self.recoveries: Counter[str] = Counter()
        """by outcome"""
        self.recovery_s = Durations()
        """of recoveries whose end is known"""
        self.lost: Counter[str] = Counter()
        """workers by the cause of their loss"""
        self.rounds = 0
        """how often a group of replicas has settled a round of their exchange"""
        self.sent = Counter(stages=0, replicas=0)
        """payload bytes: between stages of one replica, and between replicas"""
        self.checkpoint: int | None = None
        """step of the last one sealed"""
        self.outcome = ""
        """how the run ended"""
        self.committed_at: float | None = None
        """when the last step was, seconds since 1970"""
        self.verdicts = Verdicts()
        """who is slow"""
        self._starting: set[str] = set()
        self._epoch = 0.0
        """seconds since 1970 when the monotonic clock was 0"""

    def take(self, t: float, fact: e.Event | d.Decision) -> list[RecoveryTiming]:
        """An event or a decision, at ``t`` monotonic seconds; the recoveries that are over with it."""
        over = self._fold.take(t, fact)
        self.verdicts.take(fact)
        match fact:
            case e.RunStarted():
                self._epoch, self.outcome, self._starting = fact.wall_time - t, "", set()
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
            case e.RoundMade():
                self.sent["replicas"] += fact.blocking_bytes + fact.prefetched_bytes
            case d.Seal():
                self.checkpoint = fact.step
            case d.Finish():
                self.outcome = fact.outcome
                over += self._fold.close()
        return self._counted(over)

    def measured(self, metric: Metric) -> None:
        """A committed step, or a validation."""
        if isinstance(metric, ValidationMetric):
            self.validation_loss = metric.val_loss
        else:
            self.loss, self.tokens_per_s = metric.loss, metric.tokens_per_s

    def worked(self, work: e.Worked) -> list[RecoveryTiming]:
        """What a worker did; the recoveries that are over with it."""
        replica = self._naming.replica if self._naming else self.members.replica
        for peer, sent in work.sent_bytes.items():
            self.sent["stages" if replica(peer) == replica(work.node) else "replicas"] += sent
        return self._counted(self._fold.worked(work, replica(work.node)))

    @property
    def steps(self) -> int:
        """Committed steps of the run; fewer after a rollback."""
        return self.members.progress

    @property
    def workers(self) -> dict[str, int]:
        """Living workers by state."""
        members = len(self.members.node_of)
        return {"starting": len(self._starting), "spare": self.members.spares, "member": members}

    @property
    def generations(self) -> dict[int, int]:
        """Replica → its present generation."""
        return dict(sorted(self.members.generation.items()))

    @property
    def latest(self) -> dict[int, RecoveryTiming]:
        """Replica → its latest recovery, as far as it has come."""
        return self._fold.latest

    @property
    def counts(self) -> dict[str, float]:
        """What has been counted so far, by the name of its curve."""
        return {
            "steps": float(self.steps),
            "generation": float(max(self.members.generation.values(), default=0)),
            "rounds": float(self.rounds),
            "sent_bytes": float(self.sent.total()),
            "recoveries": float(self.recoveries.total()),
            "workers_lost": float(self.lost.total()),
        }

    def _counted(self, over: Iterable[RecoveryTiming]) -> list[RecoveryTiming]:
        for timing in (over := list(over)):
            self.recoveries[timing.outcome] += 1
            if timing.total is not None:
                self.recovery_s.add(timing.total)
        return over


def tally_of(record: RunRecord) -> Tally:
    """What a record comes to, gone through once."""
    tally = Tally(naming_of(record))
    for _, work in record.worked:
        tally.worked(work)
    for t, fact in record.history:
        tally.take(t, fact)
    for metric in record.metrics:
        tally.measured(metric)
    return tally
