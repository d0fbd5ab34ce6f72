"""Conversion of a round's results to a peer's records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from planaria.swarm.checks.defence import DefenceReport
from planaria.swarm.learning.advantages import Advantages
from planaria.swarm.learning.learner import UpdateResult
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.lines import STALE, LayerCounts, RoundDone, SampleRecord, VoteSummary
from planaria.swarm.tasks.base import Task


def sample_records(report: DefenceReport, advantages: Advantages, round_number: int) -> list[SampleRecord]:
    """Return the record of each completion that the defence examined."""
    advantage = {rollout.name: rollout.advantage for rollout in advantages.rollouts}
    return [
        SampleRecord(
            peer=rollout.peer,
            round=round_number,
            problem=rollout.problem.number,
            index=rollout.index,
            reward=rollout.reward,
            passed=list(rollout.passed),
            layer=rollout.layer,
            reason=rollout.reason,
            advantage=advantage.get(rollout.name),
        )
        for rollout in report.rollouts
    ]


def summarize_votes(report: DefenceReport, task: Task) -> VoteSummary:
    """Summarize a round's votes. Where the task can score, each label is checked for the records; nothing is learned
    from it."""
    holders = {
        rollout.problem.number: rollout
        for rollout in report.rollouts
        if rollout.problem.number in report.labels and report.labels[rollout.problem.number].matches(rollout.behaviour)
    }
    scored = [rollout for number, rollout in holders.items() if number not in task.unlabelled]
    return VoteSummary(
        groups=len({rollout.problem.number for rollout in report.rollouts}),
        labelled=len(report.labels),
        share=statistics.fmean(float(label.share) for label in report.labels.values()) if report.labels else 0.0,
        right=HitTally(hits=sum(task.solves(r.problem, r.text) for r in scored), eligible=len(scored)),
    )


def round_record(
    round_number: int,
    peer: str,
    report: DefenceReport,
    advantages: Advantages,
    update: UpdateResult,
    early_rejections: Sequence[SampleRecord] = (),
    **fields: Any,
) -> RoundDone:
    """Return the summary record of a round.

    :param peer: the recording peer
    :param fields: the record's other fields
    """
    own = [rollout.reward for rollout in report.rollouts if rollout.peer == peer]
    return RoundDone(
        round=round_number,
        reward=statistics.fmean(own) if own else 0.0,
        sent=Counter(rollout.peer for rollout in report.rollouts),
        accepted=Counter(rollout.peer for rollout in report.accepted),
        stale=Counter(entry.peer for entry in early_rejections if entry.layer == STALE),
        rejected_unread={entry.peer: entry.reason for entry in reversed(early_rejections)},
        layers={
            layer: {name: LayerCounts(examined=n, rejected=k) for name, (n, k) in counts.items()}
            for layer, counts in report.rejected.items()
        },
        off=report.off,
        quarantined=report.quarantined,
        training_completions=len(advantages.rollouts),
        skipped=advantages.skipped,
        influence=dict(update.influence),
        loss=update.loss,
        grad_norm=update.grad_norm,
        stats=update.stats,
        **fields,
    )
