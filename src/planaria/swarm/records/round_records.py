"""Conversion of a round's results to a peer's records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from planaria.swarm.checks.defence import Report
from planaria.swarm.completion_intake import EarlyRejection
from planaria.swarm.learning.advantages import Advantages
from planaria.swarm.learning.learner import UpdateResult
from planaria.swarm.records.lines import SCHEDULE, Agreed, Layered, RoundDone, SampleRecord, Serving
from planaria.swarm.records.measure import HitTally
from planaria.swarm.tasks.base import Task

NONE: Mapping[str, str] = {}


def sample_records(
    report: Report, lessons: Advantages, turned: Sequence[EarlyRejection], number: int
) -> list[SampleRecord]:
    """Return one line per completion received, with its origin and its fate."""
    advantages = {rollout.name: rollout.advantage for rollout in lessons.taken}
    lines = [
        SampleRecord(
            peer=rollout.peer,
            round=number,
            problem=rollout.problem.number,
            index=rollout.index,
            reward=rollout.reward,
            passed=list(rollout.passed),
            layer=rollout.layer,
            reason=rollout.reason,
            advantage=advantages.get(rollout.name),
        )
        for rollout in report.rollouts
    ]
    return lines + [
        SampleRecord(
            peer=entry.peer,
            round=number,
            problem=entry.problem,
            index=entry.index,
            reward=0.0,
            passed=[],
            layer=SCHEDULE,
            reason=entry.reason,
        )
        for entry in turned
    ]


def agreed(report: Report, task: Task) -> Agreed:
    """Summarize a round's votes. Where the task can score, each label is checked for the records; nothing is learned
    from it."""
    holders = {
        rollout.problem.number: rollout
        for rollout in report.rollouts
        if rollout.problem.number in report.labels and report.labels[rollout.problem.number].holds(rollout.behaviour)
    }
    known = [rollout for number, rollout in holders.items() if number not in task.unlabelled]
    return Agreed(
        groups=len({rollout.problem.number for rollout in report.rollouts}),
        labelled=len(report.labels),
        share=statistics.fmean(float(one.share) for one in report.labels.values()) if report.labels else 0.0,
        right=HitTally(hits=sum(task.solves(r.problem, r.text) for r in known), eligible=len(known)),
    )


def _layers(report: Report) -> dict[str, dict[str, Layered]]:
    return {
        layer: {peer: Layered(examined=n, refused=k) for peer, (n, k) in counts.items()}
        for layer, counts in report.refused.items()
    }


def round_record(
    number: int,
    seconds: Mapping[str, float],
    me: str,
    turned: Sequence[EarlyRejection],
    refused_messages: Mapping[str, str],
    missing: Sequence[str],
    report: Report,
    lessons: Advantages,
    learned: UpdateResult,
    weights: str,
    certified: Sequence[str] = (),
    votes: Agreed | None = None,
    serving: Serving | None = None,
    flawed: Mapping[str, str] = NONE,
) -> RoundDone:
    """Return the summary line of a round."""
    own = [rollout.reward for rollout in report.rollouts if rollout.peer == me]
    return RoundDone(
        round=number,
        seconds={phase: round(value, 4) for phase, value in seconds.items()},
        reward=statistics.fmean(own) if own else 0.0,
        sent=Counter(rollout.peer for rollout in report.rollouts),
        accepted=Counter(rollout.peer for rollout in report.accepted),
        turned={entry.peer: entry.reason for entry in reversed(turned)},
        flawed=dict(flawed),
        refused_messages=dict(refused_messages),
        missing=list(missing),
        certified=list(certified),
        layers=_layers(report),
        off=report.off,
        aside=report.aside,
        agreed=votes,
        lessons=len(lessons.taken),
        skipped=lessons.skipped,
        influence=dict(learned.influence),
        loss=learned.loss,
        grad_norm=learned.grad_norm,
        stats=learned.stats,
        weights=weights,
        serving=serving,
    )
