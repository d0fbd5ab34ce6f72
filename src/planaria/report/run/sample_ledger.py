"""Ledger of the samples that trained the model, and the check that each was used exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from planaria.common.errors import LedgerError
from planaria.control.facts.decisions import Commit, Decision, Disband, Finish, Form, RunStep, Seal
from planaria.control.facts.events import CONTROLLER, Event, ReplicaPosition, RunStarted, SaveFailed
from planaria.control.log.run_record import RunRecord, cached

MAX_SHOWN = 3
"""maximum problems in an error message"""
SampleRange = tuple[int, int]
"""half-open range of samples"""


class LedgerLine(NamedTuple):
    """A committed step and its samples ``first .. first + samples - 1`` of the run's sample stream."""

    step: int
    """the replica's own number of the step"""
    first: int
    samples: int
    replica: int = 0

    @property
    def span(self) -> SampleRange:
        return self.first, self.first + self.samples


def sample_ledger(record: RunRecord) -> list[LedgerLine]:
    """Return the committed steps in order of commit, without undone ones.

    A step counts once its commit is ordered, with the block of samples it started with. A rollback to step k undoes the
    replica's steps from k on; a resumption undoes those that its checkpoint lacks.
    """
    return _fold_ledger(record).lines


def prove_exactly_once(record: RunRecord) -> list[str]:
    """Return the ledger's problems, one sentence each; empty if each sample was used exactly once.

    The check covers the run's first step to its last commit, or to its last step if the run finished. Gaps between
    several replicas are allowed before the end. The used samples recorded in checkpoints must match the commits.
    """
    ledger = _fold_ledger(record)
    first, last = ledger.first, ledger.started
    if first is None or last is None:
        return ["the run never started"]
    finished = any(isinstance(fact, Finish) and fact.outcome == "finished" for _, fact in record.landmarks)
    spans = [line.span for line in ledger.lines]
    if finished:
        end = last.samples_before(last.steps)
        spans.append((end, end))
    covered = _leading_samples(first)
    missing, repeated = [], []
    for begin, end in sorted([*spans, *_further_ranges(first)]):
        if begin > covered:
            missing.append((begin, f"samples {covered} to {begin - 1} are missing"))
        elif begin < min(covered, end):
            repeated.append((begin, f"samples {begin} to {min(covered, end) - 1} were used twice"))
        covered = max(covered, end)
    problems = sorted([*repeated, *(missing if finished or not ledger.several else ())])
    return [*ledger.close(), *(text for _, text in problems)]


def require_exactly_once(record: RunRecord) -> None:
    """Check the ledger of a run that has committed steps.

    :raises LedgerError: if samples are missing or were used twice; the message is one line.
    """
    if sample_ledger(record) and (problems := prove_exactly_once(record)):
        more = f"; {len(problems) - MAX_SHOWN} more in the report" if len(problems) > MAX_SHOWN else ""
        raise LedgerError(
            f"{record.folder}: not every sample was used exactly once: {'; '.join(problems[:MAX_SHOWN])}{more}"
        )


class _Sealed(NamedTuple):
    """A checkpoint, with the number of ledger lines when it was sealed."""

    fact: Seal
    written: int
    began: int
    """number of lines from earlier parts of the run"""


class _Ledger:
    """Folds facts into ledger lines, independently of the controller's and checkpoints' own records."""

    def __init__(self) -> None:
        self.first: RunStarted | None = None
        self.started: RunStarted | None = None
        self.several = False
        """whether the run ever had several replicas"""
        self._problems: list[str] = []
        self._written: list[LedgerLine | None] = []
        """None for undone steps"""
        self._part = 0
        """number of lines from earlier parts of the run"""
        self._started_steps: dict[int, RunStep] = {}
        self._sealed: dict[str, _Sealed] = {}
        self._newest: _Sealed | None = None

    @property
    def lines(self) -> list[LedgerLine]:
        return [line for line in self._written if line is not None]

    def apply(self, fact: Event | Decision) -> None:
        if isinstance(fact, RunStarted):
            self._start(fact)
        elif isinstance(fact, RunStep) and fact.mode == "train":
            self._started_steps[fact.replica] = fact
        elif isinstance(fact, Form | Disband):
            self._started_steps.pop(fact.replica, None)  # the current step is dropped
            if isinstance(fact, Form) and fact.is_rollback:
                self._roll_back(fact)
        elif isinstance(fact, Commit):
            self._commit(fact)
        elif isinstance(fact, Seal):
            self._newest = self._sealed[fact.folder] = _Sealed(fact, len(self._written), self._part)
        elif isinstance(fact, SaveFailed) and fact.worker == CONTROLLER and self._newest is not None:
            del self._sealed[self._newest.fact.folder]  # sealing failed
            self._newest = None

    def close(self) -> list[str]:
        """Return all problems, after the last fact."""
        if self._newest is not None:
            self._check(self._newest)
        return list(dict.fromkeys(self._problems))

    def _start(self, fact: RunStarted) -> None:
        """Undo the lines that a resumed run does not have, by its checkpoint if that is known."""
        candidates = (self._sealed[folder] for folder in fact.checkpoint_of_stage.values() if folder in self._sealed)
        loaded = next((sealed for sealed in candidates if sealed.fact.step == fact.first_step), None)
        if self.first is None:
            self.first = fact
        elif loaded is not None:
            self._check(loaded)
            self._keep(self._indices_of(loaded))
        elif fact.max_replicas > 1 or self.several:
            spans = [(0, _leading_samples(fact)), *_further_ranges(fact)]
            self._keep({i for i, line in enumerate(self._written) if line and not _difference([line.span], spans)})
        else:
            self._keep({i for i, line in enumerate(self._written) if line and line.step < fact.first_step})
        self.started, self.several = fact, self.several or fact.max_replicas > 1
        self._part, self._newest = len(self._written), None
        self._started_steps.clear()

    def _keep(self, kept: set[int]) -> None:
        self._written = [line if index in kept else None for index, line in enumerate(self._written)]

    def _indices_of(self, sealed: _Sealed) -> set[int]:
        """Return the indices of a checkpoint's lines, including all lines of replicas that were disbanded before it."""
        where, indices = sealed.fact.positions, set(range(sealed.began))
        if not where:  # one replica, which may have trained until its files were written
            where = {0: ReplicaPosition(step=sealed.fact.step)}
        for index in range(sealed.began, sealed.written):
            line = self._written[index]
            if line is not None and (line.replica not in where or line.step < where[line.replica].step):
                indices.add(index)
        return indices

    def _roll_back(self, form: Form) -> None:
        assert self.started is not None
        # Earlier parts with another number of replicas counted other steps.
        inside = form.step >= self.started.position_of(form.replica).step
        for index in range(self._part if inside else 0, len(self._written)):
            line = self._written[index]
            if line is not None and line.replica == form.replica and line.step >= form.step:
                self._written[index] = None

    def _commit(self, fact: Commit) -> None:
        assert self.started is not None
        settings, begun = self.started, self._started_steps.pop(fact.replica, None)
        if settings.max_replicas == 1:  # older inline runs do not number blocks
            block = begun.block if begun is not None else 0
            first = settings.first_of(block) if block else settings.samples_before(fact.step)
        elif begun is None or (begun.generation, begun.step) != (fact.generation, fact.step):
            self._problems.append(f"replica {fact.replica} committed step {fact.step} without starting it")
            return
        else:
            first = settings.first_of(begun.block)
        self._written.append(LedgerLine(fact.step, first, settings.block_samples, fact.replica))

    def _check(self, sealed: _Sealed) -> None:
        """Compare a checkpoint's own record of used samples with the ledger (several replicas only)."""
        seal, settings = sealed.fact, self.started
        if settings is None or self.first is None or settings.max_replicas == 1:
            return
        recorded = [(0, settings.first_of(seal.first_block)), *_block_ranges(settings, seal.blocks_ahead)]
        lines = (self._written[index] for index in sorted(self._indices_of(sealed)))
        used = [
            (0, _leading_samples(self.first)),
            *_further_ranges(self.first),
            *(line.span for line in lines if line is not None),
        ]
        for first, last in _difference(recorded, used):
            self._problems.append(f"{seal.folder} records samples {first} to {last - 1} as used; they were not")
        for first, last in _difference(used, recorded):
            self._problems.append(f"{seal.folder} does not record samples {first} to {last - 1} as used")


@cached
def _fold_ledger(record: RunRecord) -> _Ledger:
    ledger = _Ledger()
    for _, fact in record.turns:
        ledger.apply(fact)
    return ledger


def _leading_samples(started: RunStarted) -> int:
    """Return the number of leading samples used by earlier parts."""
    if started.first_block is None:
        return started.samples_before(started.first_step)
    return started.first_of(started.first_block)


def _further_ranges(started: RunStarted) -> list[SampleRange]:
    """Return further samples used by earlier parts."""
    return _block_ranges(started, started.blocks_ahead)


def _block_ranges(started: RunStarted, blocks: Iterable[int]) -> list[SampleRange]:
    return [(started.first_of(block), started.first_of(block + 1)) for block in blocks]


def _difference(spans: Iterable[SampleRange], removed: Iterable[SampleRange]) -> list[SampleRange]:
    """Return the set difference of ``spans`` and ``removed`` as sorted, maximal ranges."""
    left: list[SampleRange] = []
    holes = sorted(removed)
    first = 0
    for begin, end in _merge(spans):
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        index = first
        while begin < end:
            hole = holes[index] if index < len(holes) else (end, end)
            if begin < min(hole[0], end):
                left.append((begin, min(hole[0], end)))
            begin, index = max(begin, hole[1]), index + 1
    return left


def _merge(spans: Iterable[SampleRange]) -> list[SampleRange]:
    merged: list[SampleRange] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif begin < end:
            merged.append((begin, end))
    return merged
