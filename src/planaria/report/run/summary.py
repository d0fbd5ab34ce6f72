"""Key metrics of a run, its summary for the terminal, and the verdict on its progress, failures and their cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan
from statistics import median

from planaria.control.facts.decisions import Finish
from planaria.control.facts.events import LeaderStarted, RunStarted
from planaria.control.log.run_record import RunRecord, StepMetric, ValidationMetric, cached
from planaria.exchange.compress import compression_report
from planaria.report.phrases import format_count, join_names
from planaria.report.run.checkpoint_times import saves
from planaria.report.run.diagnosis import summary_lines as diagnosis_lines
from planaria.report.run.exchange_options import exchange_lines, rounds_missing
from planaria.report.run.recoveries import FaultsSummary, faults_summary, recoveries
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.round_history import ExchangeTotals, settled_rounds, totals
from planaria.report.run.sample_ledger import prove_exactly_once, sample_ledger
from planaria.report.run.stage_peaks import summary_lines as memory_lines
from planaria.report.verdict import Verdict


@dataclass(frozen=True)
class RunMetrics:
    """Key metrics of a whole run."""

    loss: float | None = None
    """training loss of the last step; None if members of a group did not report it"""
    validation: ValidationMetric | None = None
    """last validation"""
    tokens_per_s: float | None = None
    """median over training steps"""
    steps: int = 0
    """number of distinct trained steps"""


@cached
def key_metrics(record: RunRecord) -> RunMetrics:
    """Return the key metrics of a run."""
    loss, validation = None, None
    speeds: list[float] = []
    steps: set[int] = set()
    for metric in record.metrics:
        if isinstance(metric, StepMetric):
            loss = None if isnan(metric.loss) else metric.loss
            steps.add(metric.step)
            if metric.tokens_per_s:
                speeds.append(metric.tokens_per_s)
        else:
            validation = metric
    return RunMetrics(loss, validation, median(speeds) if speeds else None, len(steps))


def summary(record: RunRecord) -> Iterator[str]:
    """Yield lines on final losses, exchange, compression, memory, slowness and faults."""
    last = key_metrics(record)
    if last.loss is not None:
        validated = last.validation and f" (validation {last.validation.val_loss:.4f})"
        yield f"final loss    {last.loss:.4f}{validated or ''}"
    for index, line in enumerate(exchange_lines(record)):
        yield f"{'' if index else 'exchange':<14}{line}"
    if record.config.exchange.coded:
        from planaria.exchange.coded import coded_report  # imports torch

        yield from coded_report.summary_lines(record)
    yield from compression_report.summary_lines(record)
    yield from memory_lines(record)
    if lost := [fact.leaderless_s for _, fact in record.landmarks if isinstance(fact, LeaderStarted)]:
        yield f"controllers   {len(lost)} lost; replaced after {median(lost):.2f} s (median; maximum {max(lost):.2f} s)"
    slow = list(diagnosis_lines(record))
    yield from slow
    timings = recoveries(record)
    if not timings and not slow:
        yield "faults        none"
    for timing in timings:
        yield f"fault         {_describe_recovery(timing)}"
        if timing.total is not None:
            yield f"              {_phase_times(timing)}"


def _describe_recovery(timing: RecoveryTiming) -> str:
    text = f"step {timing.step}: {timing.where} lost, {timing.outcome}" if timing.nodes else f"step {timing.step}"
    if timing.total is None:
        return text
    return f"{text} {timing.total:.2f} s after the {'fault' if timing.fault_t else 'notice'}"


def _phase_times(timing: RecoveryTiming) -> str:
    phases = timing.parts.items()
    return ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in phases if seconds is not None)


NO_END = "still running or killed"

OUTCOME_CLAUSES = {
    "recalled": "rolled back to a snapshot",
    "relinked": "replaced a broken edge",
    "skipping": "left a stage without a worker",
    "cannot": "failed",
    "disbanded": "ended with the replica",
}
"""outcome of a recovery → verb phrase, if it is not its name"""


@dataclass(frozen=True)
class RunFacts:
    """Inputs of a run's verdict: its end, its steps and samples, and the totals of its faults and exchange.

    Times are seconds, losses nats per token.
    """

    ended: str
    """"finished", NO_END, or the outcome and its reason"""
    steps: int
    planned: int
    wall_s: float
    problems: Sequence[str] = ()
    """lost or repeated samples"""
    counted: bool = True
    """whether the log shows which samples were used"""
    first_loss: float | None = None
    last: RunMetrics = field(default_factory=RunMetrics)
    faults: FaultsSummary = field(default_factory=FaultsSummary)
    exchange: ExchangeTotals = field(default_factory=ExchangeTotals)
    rounds_missing: str = ""
    """why replicas had no round of the exchange, if ``train.steps`` is too low for one"""
    recovery_s: Sequence[float] = ()
    redone: int = 0
    """steps repeated after rollbacks"""
    replicas: int = 1
    unequal: int = 0
    """checkpoints whose replicas should be equal but differ"""
    leaderless_s: Sequence[float] = ()
    """for each lost controller, the time until the next one led"""


def facts_of(record: RunRecord, wall_s: float) -> RunFacts:
    """Return the facts of a run."""
    last, timings, ledger = key_metrics(record), recoveries(record), sample_ledger(record)
    first = next(record.trained, None)
    return RunFacts(
        ended=outcome(record),
        steps=sum(line.samples for line in ledger) // record.config.samples or last.steps,
        planned=record.config.train.steps,
        wall_s=wall_s,
        problems=prove_exactly_once(record) if ledger else (),
        counted=bool(ledger),
        first_loss=first.loss if first and not isnan(first.loss) else None,
        last=last,
        faults=faults_summary(record),
        exchange=totals(settled_rounds(record)),
        rounds_missing=rounds_missing(record),
        recovery_s=[t.total for t in timings if t.total is not None],
        redone=sum(max(t.step - t.resumed_step, 0) for t in timings if t.resumed_step is not None),
        replicas=max((started.replicas for _, started in record.starts), default=record.config.exchange.replicas),
        unequal=saves(record).unequal,
        leaderless_s=[fact.leaderless_s for _, fact in record.landmarks if isinstance(fact, LeaderStarted)],
    )


def outcome(record: RunRecord) -> str:
    """Return the outcome of a run, with the reason if it did not finish."""
    ends = [fact for _, fact in record.landmarks if isinstance(fact, Finish | RunStarted)]
    if not ends or isinstance(ends[-1], RunStarted):
        return NO_END
    return ends[-1].outcome + (f": {ends[-1].reason}" if ends[-1].reason else "")


def verdict(facts: RunFacts) -> Verdict:
    """Return the verdict, good if all steps were trained and each sample was used once; None if the log has no end."""
    if facts.ended == NO_END:
        good, badge = None, NO_END
    else:
        good = facts.ended == "finished" and not facts.problems
        badge = "samples lost or repeated" if facts.problems and facts.ended == "finished" else facts.ended
    sentences = [
        _progress_sentence(facts),
        _failure_sentence(facts),
        _controller_sentence(facts),
        *_replica_sentences(facts),
        _unequal_sentence(facts),
        _sample_sentence(facts),
    ]
    return Verdict(
        good, badge, " ".join(filter(None, sentences)), list(_deciding_numbers(facts))[:2], _cost_sentence(facts)
    )


def _progress_sentence(facts: RunFacts) -> str:
    steps = f"{facts.steps:,} of {format_count(facts.planned, 'step')}"
    if facts.ended == "finished":
        return f"Trained {steps if facts.steps != facts.planned else 'all ' + format_count(facts.planned, 'step')}."
    if facts.ended != NO_END:
        return f"Stopped after {steps}: {facts.ended.removeprefix('stopped: ')}."
    return f"The log records no end: {steps} so far."


def _failure_sentence(facts: RunFacts) -> str:
    faults = facts.faults
    if not faults.outcomes:
        spares = f" except {format_count(faults.spares_lost, 'spare')}" if faults.spares_lost else ""
        return f"No worker was lost{spares}." if spares or facts.leaderless_s else "Nothing failed."
    died = [f"{format_count(faults.deaths, 'worker')} died"] if faults.deaths else []
    were = "was" if faults.excluded == 1 else "were"
    excluded = [f"{format_count(faults.excluded, 'worker')} {were} excluded"] if faults.excluded else []
    subject = join_names([*died, *excluded]) or "No worker died, but connections broke"
    outcomes = join_names([_outcome_clause(name, count) for name, count in faults.outcomes.items()])
    return f"{subject}; {outcomes}."


def _controller_sentence(facts: RunFacts) -> str:
    count = len(facts.leaderless_s)
    return f"{format_count(count, 'controller')} {'was' if count == 1 else 'were'} lost and replaced." if count else ""


def _outcome_clause(name: str, count: int) -> str:
    """Return '2 recoveries succeeded', '1 rolled back' and so on."""
    if name == "recovered":
        return f"{format_count(count, 'recovery', 'recoveries')} succeeded"
    return f"{count} {OUTCOME_CLAUSES.get(name, name)}"


def _replica_sentences(facts: RunFacts) -> list[str]:
    sums, missing = facts.exchange, facts.rounds_missing
    if facts.replicas == 1 or not sums.rounds:
        return [f"{missing[0].upper()}{missing[1:]}."] if missing else []
    alone = f", {sums.alone} of {format_count(sums.attended, 'time')} alone" if sums.alone else ""
    return [f"{format_count(facts.replicas, 'replica')} settled {format_count(sums.rounds, 'round')}{alone}."]


def _unequal_sentence(facts: RunFacts) -> str:
    where = format_count(facts.unequal, "checkpoint")
    return f"Replicas that should be equal had different weights in {where}." if facts.unequal else ""


def _sample_sentence(facts: RunFacts) -> str:
    if facts.problems:
        more = f" ({len(facts.problems) - 1} more)" if facts.problems[1:] else ""
        return f"Not every sample was used exactly once: {facts.problems[0]}{more}."
    return "Every sample was used exactly once." if facts.counted else ""


def _deciding_numbers(facts: RunFacts) -> list[tuple[str, str]]:
    numbers = []
    began = "" if facts.first_loss is None else f"; training started at {facts.first_loss:.3f}"
    last = facts.last
    if last.validation is not None:
        numbers.append((f"{last.validation.val_loss:.4f}", f"validation loss, nats per token{began}"))
    elif last.loss is not None:
        numbers.append((f"{last.loss:.4f}", f"training loss, nats per token{began}"))
    if facts.recovery_s:
        often = format_count(len(facts.recovery_s), "recovery", "recoveries")
        typical, longest = median(facts.recovery_s), max(facts.recovery_s)
        numbers.append((f"{typical:.2f} s", f"to recover, median of {often}; {longest:.2f} s at longest"))
    elif last.tokens_per_s is not None:
        numbers.append((f"{last.tokens_per_s:,.0f}", "tokens per second, median step"))
    return numbers


def _cost_sentence(facts: RunFacts) -> str:
    clauses = []
    if facts.redone:
        clauses.append(f"{format_count(facts.redone, 'step')} repeated after rollbacks")
    if facts.recovery_s:
        spent = sum(facts.recovery_s)
        of = f" ({spent / facts.wall_s:.1%} of the run)" if facts.wall_s and facts.replicas == 1 else ""
        clauses.append(f"{spent:.2f} s in recoveries{of}")
    if facts.leaderless_s:
        clauses.append(f"{sum(facts.leaderless_s):.2f} s without a controller")
    for count, noun, label in (
        (facts.faults.outcomes.get("cannot", 0), "recovery", "impossible"),
        (facts.faults.spares_lost, "spare", ""),
        (facts.exchange.rejected, "update", "rejected"),
    ):
        if count:
            clauses.append(f"{format_count(count, noun, 'recoveries' if noun == 'recovery' else '')} {label}".strip())
    return f"Lost: {'; '.join(clauses)}." if clauses else "Nothing was lost."
