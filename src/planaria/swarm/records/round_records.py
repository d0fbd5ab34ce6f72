"""Conversion of a round's results to a peer's records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planaria.swarm.checks.defence import DefenceReport
from planaria.swarm.learning.advantages import Advantages
from planaria.swarm.learning.learner import UpdateResult
from planaria.swarm.peer.completion_intake import EarlyRejection
from planaria.swarm.records.lines import STALE, LayerCounts, RoundDone, SampleRecord, Serving, VoteSummary
from planaria.swarm.records.measure import HitTally
from planaria.swarm.tasks.base import Task


def sample_records(
    report: DefenceReport, advantages: Advantages, rejections: Sequence[EarlyRejection], number: int
) -> list[SampleRecord]:
    """Return one line per completion received, with its origin and its fate."""
    advantage = {rollout.name: rollout.advantage for rollout in advantages.rollouts}
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
            advantage=advantage.get(rollout.name),
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
            layer=entry.layer,
            reason=entry.reason,
        )
        for entry in rejections
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


def _layer_counts(report: DefenceReport) -> dict[str, dict[str, LayerCounts]]:
    return {
        layer: {peer: LayerCounts(examined=n, rejected=k) for peer, (n, k) in counts.items()}
        for layer, counts in report.rejected.items()
    }


@dataclass(frozen=True)
class RoundResult:
    """Everything that a peer records of a round."""

    number: int
    seconds: Mapping[str, float]
    """seconds of each phase"""
    peer: str
    """the recording peer"""
    report: DefenceReport
    advantages: Advantages
    update: UpdateResult
    weights: str
    """fingerprint after the update"""
    early_rejections: Sequence[EarlyRejection] = ()
    rejected_messages: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    certified: Sequence[str] = ()
    ahead: int = 0
    """rounds that are drawn ahead"""
    votes: VoteSummary | None = None
    serving: Serving | None = None
    flawed: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> RoundDone:
        """Return the summary line of the round."""
        report, update = self.report, self.update
        own = [rollout.reward for rollout in report.rollouts if rollout.peer == self.peer]
        return RoundDone(
            round=self.number,
            seconds={phase: round(value, 4) for phase, value in self.seconds.items()},
            reward=statistics.fmean(own) if own else 0.0,
            sent=Counter(rollout.peer for rollout in report.rollouts),
            accepted=Counter(rollout.peer for rollout in report.accepted),
            staleness=Counter(self.number - rollout.version for rollout in report.rollouts) if self.ahead else {},
            stale=Counter(entry.peer for entry in self.early_rejections if entry.layer == STALE),
            rejected_unread={entry.peer: entry.reason for entry in reversed(self.early_rejections)},
            flawed=dict(self.flawed),
            rejected_messages=dict(self.rejected_messages),
            missing=list(self.missing),
            certified=list(self.certified),
            layers=_layer_counts(report),
            off=report.off,
            quarantined=report.quarantined,
            agreed=self.votes,
            training_groups=len(self.advantages.rollouts),
            skipped=self.advantages.skipped,
            influence=dict(update.influence),
            loss=update.loss,
            grad_norm=update.grad_norm,
            stats=update.stats,
            weights=self.weights,
            serving=self.serving,
        )
