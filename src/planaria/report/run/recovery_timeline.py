"""All recoveries of a run, and counts of its faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.report.run.naming import naming_of
from planaria.report.run.recovery_fold import Recoveries
from planaria.report.run.recovery_timing import Outcome, RecoveryTiming


def recoveries(record: RunRecord) -> list[RecoveryTiming]:
    """Return the recoveries of all replicas, in order. The death of a spare needs none."""
    return list(record.cached(_recoveries))


def _recoveries(record: RunRecord) -> list[RecoveryTiming]:
    fold = Recoveries(remembers=True)
    naming = naming_of(record)
    for _, work in record.worked:
        fold.take_work_report(work, naming.replica(work.node))
    done: list[RecoveryTiming] = []
    part: list[RecoveryTiming] = []
    for t, fact in record.turns:
        part += fold.take(t, fact)
        if isinstance(fact, e.RunStarted):
            done, part = done + sorted(part, key=attrgetter("lost_t")), []
    return done + sorted([*part, *fold.close()], key=attrgetter("lost_t"))


@dataclass(frozen=True)
class FaultsSummary:
    """Counts of faults and recoveries."""

    injected: int
    """injected faults, harmless ones included"""
    deaths: int
    """members that died"""
    excluded: int
    """members excluded because their replica's updates were invalid"""
    spares_lost: int
    zombies: int
    outcomes: Mapping[Outcome, int]
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
