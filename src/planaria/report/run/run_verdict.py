"""Verdict on a run: its progress, failures and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from planaria.control.facts.decisions import Finish
from planaria.control.facts.events import RunStarted
from planaria.control.log.run_record import RunRecord
from planaria.report.phrases import counted, listed
from planaria.report.run.checkpoint_times import saves
from planaria.report.run.ledger import prove_exactly_once, sample_ledger
from planaria.report.run.recovery_timeline import faults_summary, recoveries
from planaria.report.run.round_history import settled_rounds, totals
from planaria.report.run.summary import key_metrics
from planaria.report.verdict import Verdict

NO_END = "no end recorded"


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that its verdict depends on. Times are seconds, losses nats per token."""

    ended: str
    """"finished", NO_END, or how and why it stopped"""
    steps: int
    planned: int
    wall_s: float
    problems: Sequence[str] = ()
    """lost or repeated samples"""
    counted: bool = True
    """whether the log shows which samples were used"""
    first_loss: float | None = None
    loss: float | None = None
    validation: float | None = None
    tokens_per_s: float | None = None
    deaths: int = 0
    excluded: int = 0
    spares_lost: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """recoveries by outcome"""
    recovery_s: Sequence[float] = ()
    redone: int = 0
    """steps repeated after rollbacks"""
    replicas: int = 1
    rounds: int = 0
    alone: int = 0
    """rounds that a replica settled alone, of ``attended``"""
    attended: int = 0
    refused: int = 0
    """rejected updates"""
    unequal: int = 0
    """checkpoints whose replicas should be equal but differ"""


def facts_of(record: RunRecord, wall_s: float) -> RunFacts:
    """Return the facts of a run."""
    last = key_metrics(record)
    timings = recoveries(record)
    faults = faults_summary(record)
    ledger, sums = sample_ledger(record), totals(settled_rounds(record))
    first = next(record.trained, None)
    return RunFacts(
        ended=outcome(record),
        steps=sum(line.samples for line in ledger) // record.config.samples or last.steps,
        planned=record.config.train.steps,
        wall_s=wall_s,
        problems=prove_exactly_once(record) if ledger else (),
        counted=bool(ledger),
        first_loss=first.loss if first else None,
        loss=last.loss,
        validation=last.validation.val_loss if last.validation else None,
        tokens_per_s=last.tokens_per_s,
        deaths=faults.deaths,
        excluded=faults.excluded,
        spares_lost=faults.spares_lost,
        outcomes={str(name): count for name, count in faults.outcomes.items()},
        recovery_s=[t.total for t in timings if t.total is not None],
        redone=sum(max(t.step - t.resumed_step, 0) for t in timings if t.resumed_step is not None),
        replicas=max((started.replicas for _, started in record.starts), default=record.config.exchange.replicas),
        rounds=sums.rounds,
        alone=sums.alone,
        attended=sums.attended,
        refused=sums.refused,
        unequal=saves(record).unequal,
    )


def outcome(record: RunRecord) -> str:
    """Return how a run ended, with the reason if it did not finish."""
    ends = [fact for _, fact in record.landmarks if isinstance(fact, Finish | RunStarted)]
    if not ends or isinstance(ends[-1], RunStarted):
        return NO_END
    return ends[-1].outcome + (f": {ends[-1].reason}" if ends[-1].reason else "")


def verdict(facts: RunFacts) -> Verdict:
    """Return the verdict: good if all steps were trained and each sample was used once; open without an end."""
    if facts.ended == NO_END:
        good, badge = None, NO_END
    else:
        good = facts.ended == "finished" and not facts.problems
        badge = "samples lost or repeated" if facts.problems and facts.ended == "finished" else facts.ended
    sentences = [_course(facts), _failures(facts), *_together(facts), _unequal(facts), _samples(facts)]
    return Verdict(good, badge, " ".join(filter(None, sentences)), list(_numbers(facts))[:2], _lost(facts))


def _course(facts: RunFacts) -> str:
    steps = f"{facts.steps:,} of {counted(facts.planned, 'step')}"
    if facts.ended == "finished":
        return f"Trained {steps if facts.steps != facts.planned else 'all ' + counted(facts.planned, 'step')}."
    if facts.ended != NO_END:
        return f"Stopped after {steps}: {facts.ended.removeprefix('stopped: ')}."
    return f"The log has no end yet: {steps} so far."


def _failures(facts: RunFacts) -> str:
    if not facts.outcomes:
        spares = f" except {counted(facts.spares_lost, 'spare')}" if facts.spares_lost else ""
        return f"No worker was lost{spares}." if spares else "Nothing failed."
    died = [f"{counted(facts.deaths, 'worker')} died"] if facts.deaths else []
    were = "was" if facts.excluded == 1 else "were"
    excluded = [f"{counted(facts.excluded, 'worker')} {were} excluded"] if facts.excluded else []
    subject = listed([*died, *excluded]) or "No worker died, but connections broke"
    outcomes = listed([f"{count} {name}" for name, count in facts.outcomes.items()])
    return f"{subject}; outcome: {outcomes}."


def _together(facts: RunFacts) -> list[str]:
    if facts.replicas == 1 or not facts.rounds:
        return []
    alone = f", {facts.alone} of {counted(facts.attended, 'time')} alone" if facts.alone else ""
    return [f"{counted(facts.replicas, 'replica')} settled {counted(facts.rounds, 'round')}{alone}."]


def _unequal(facts: RunFacts) -> str:
    where = counted(facts.unequal, "checkpoint")
    return f"Replicas that should be equal had different weights in {where}." if facts.unequal else ""


def _samples(facts: RunFacts) -> str:
    if facts.problems:
        more = f" ({len(facts.problems) - 1} more)" if facts.problems[1:] else ""
        return f"Not every sample was used exactly once: {facts.problems[0]}{more}."
    return "Every sample was used exactly once." if facts.counted else ""


def _numbers(facts: RunFacts) -> list[tuple[str, str]]:
    numbers = []
    began = "" if facts.first_loss is None else f"; training started at {facts.first_loss:.3f}"
    if facts.validation is not None:
        numbers.append((f"{facts.validation:.4f}", f"validation loss, nats per token{began}"))
    elif facts.loss is not None:
        numbers.append((f"{facts.loss:.4f}", f"training loss, nats per token{began}"))
    if facts.recovery_s:
        often = counted(len(facts.recovery_s), "recovery", "recoveries")
        middle, most = median(facts.recovery_s), max(facts.recovery_s)
        numbers.append((f"{middle:.2f} s", f"to recover, median of {often}; {most:.2f} s at most"))
    elif facts.tokens_per_s is not None:
        numbers.append((f"{facts.tokens_per_s:,.0f}", "tokens per second, median step"))
    return numbers


def _lost(facts: RunFacts) -> str:
    clauses = []
    if facts.redone:
        clauses.append(f"{counted(facts.redone, 'step')} repeated after rollbacks")
    if facts.recovery_s:
        spent = sum(facts.recovery_s)
        of = f" ({spent / facts.wall_s:.1%} of the run)" if facts.wall_s and facts.replicas == 1 else ""
        clauses.append(f"{spent:.2f} s in recoveries{of}")
    for count, noun, label in (
        (facts.outcomes.get("cannot", 0), "recovery", "impossible"),
        (facts.spares_lost, "spare", ""),
        (facts.refused, "update", "rejected"),
    ):
        if count:
            clauses.append(f"{counted(count, noun, 'recoveries' if noun == 'recovery' else '')} {label}".strip())
    return f"Lost: {'; '.join(clauses)}." if clauses else "Nothing was lost."
