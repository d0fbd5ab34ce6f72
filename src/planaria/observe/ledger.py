"""Which samples trained the model: the proof that deaths lost none and repeated none."""

from __future__ import annotations

from typing import NamedTuple

from planaria.decisions import Commit, Finish, Form
from planaria.events import RunStarted
from planaria.observe.logs import RunRecord


class LedgerLine(NamedTuple):
    """A committed step and its samples ``first .. first + samples - 1`` of the run's sample stream."""

    step: int
    first: int
    samples: int


def sample_ledger(record: RunRecord) -> list[LedgerLine]:
    """Committed steps in the order of their commits, without those that were undone.

    Step k trains on the ``samples_per_step`` samples after those of the steps before, and counts when the order to
    commit it was given. Rolling back to step k, and resuming at step k, undo steps k and later.
    """
    lines: list[LedgerLine] = []
    for _, fact in record.history:
        if isinstance(fact, RunStarted):
            started = fact
            lines = [line for line in lines if line.step < fact.first_step]
        elif isinstance(fact, Form) and fact.outcome == "rolled back":
            lines = [line for line in lines if line.step < fact.step]
        elif isinstance(fact, Commit):
            lines.append(LedgerLine(fact.step, started.samples_before(fact.step), started.samples_per_step))
    return lines


def prove_exactly_once(record: RunRecord) -> list[str]:
    """Everything that is wrong with the ledger, one sentence each; empty when each sample was used exactly once.

    Samples count from the run's first step to its last commit, or to its last step if the run says it finished.
    """
    starts = [fact for _, fact in record.history if isinstance(fact, RunStarted)]
    if not starts:
        return ["the run never started"]
    spans = sorted((line.first, line.first + line.samples) for line in sample_ledger(record))
    if any(isinstance(fact, Finish) and fact.outcome == "finished" for _, fact in record.history):
        end = starts[-1].samples_before(starts[-1].steps)
        spans.append((end, end))
    problems = []
    covered = starts[0].samples_before(starts[0].first_step)
    for first, last in spans:
        if first > covered:
            problems.append(f"samples {covered} to {first - 1} are missing")
        elif first < min(covered, last):
            problems.append(f"samples {first} to {min(covered, last) - 1} were used twice")
        covered = max(covered, last)
    return problems
