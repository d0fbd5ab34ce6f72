"""Everything in a run's folder as one record: measurements, events and decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event, RunStarted, WorkReport

Timed = tuple[float, Event | Decision]
"""an event or decision, and the time at which the controller learned or made it"""

REPORTS = frozenset(
    {
        "stage_ready", "stage_committed", "stage_copied", "stage_saved", "update_received", "updates_weighted",
        "message_compressed", "round_applied", "results_sent", "worker_measurements",
    }
)  # fmt: skip
"""reports that every stage repeats each step: the bulk of a log"""
ROUTINE = REPORTS | {"run_step", "commit", "close_round", "round_late", "update_rejected"}

Raw = TypeVar("Raw")
Item = TypeVar("Item")
Found = TypeVar("Found")


class _Measured(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    t: float
    step: int


class StepMetric(_Measured):
    """Measurements of a training step. Losses in nats per token."""

    kind: Literal["step"] = "step"
    loss: float
    tokens_per_s: float
    """since the previous step"""
    grad_norm: dict[int, float]
    """stage → L2 norm of its gradient before clipping"""
    losses: dict[int, float] = {}
    """losses of several replicas, of which ``loss`` is the mean"""


class ValidationMetric(_Measured):
    """Measurements of a validation after ``step`` steps. Losses in nats per token."""

    kind: Literal["validation"] = "validation"
    val_loss: float
    val_losses: dict[int, float] = {}
    """losses of several replicas, of which ``val_loss`` is the mean"""


def _kind_of(line: Any) -> str | None:
    """Return the kind of a line; logs of older versions lack the field."""
    return str(line.get("kind", "validation" if "val_loss" in line else "step")) if isinstance(line, dict) else None


Metric = Annotated[
    Annotated[StepMetric, Tag("step")] | Annotated[ValidationMetric, Tag("validation")], Discriminator(_kind_of)
]
"""a line of ``metrics.jsonl``"""


class StreamedSequence(Sequence[Item], Generic[Raw, Item]):
    """A sequence read from a long file at each iteration, in constant memory."""

    def __init__(
        self, raw: Callable[[], Iterator[Raw]], kind: Callable[[Raw], str], item: Callable[[Raw], Item]
    ) -> None:
        """:param raw: starts reading.
        :param kind: returns the kind of a raw item, so that unneeded ones are not parsed by ``item``.
        """
        self._raw, self._kind, self._item = raw, kind, item

    def __iter__(self) -> Iterator[Item]:
        return map(self._item, self._raw())

    def without(self, kinds: frozenset[str]) -> Iterator[Item]:
        """Yield the record without facts of these kinds."""
        return map(self._item, without_kinds(self._raw(), self._kind, kinds))

    def __len__(self) -> int:
        return sum(1 for _ in self._raw())

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...
    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        if isinstance(place, slice) or place < 0:
            return list(self)[place]
        for item in islice(self, place, None):
            return item
        raise IndexError(place)


def without_kinds(facts: Iterable[Raw], kind: Callable[[Raw], str], kinds: frozenset[str]) -> Iterator[Raw]:
    """Yield the events of all other kinds, and the last one of each part of a run, which dates that part's end."""
    last: Raw | None = None
    for fact in facts:
        own = kind(fact)
        if own in kinds:
            last = fact
            continue
        if own == "run_started" and last is not None:
            yield last
        last = None
        yield fact
    if last is not None:
        yield last


@dataclass(frozen=True, eq=False)
class RunRecord:
    """Everything in a run's folder. Times are seconds of the machine's monotonic clock.

    ``history``, ``worked`` and ``metrics`` of a long run are read from disk at each iteration.
    """

    folder: Path
    config: RunConfig
    history: Sequence[Timed]
    """events and decisions in the controller's order, with faults from other terminals merged in"""
    worked: Sequence[tuple[float, WorkReport]]
    metrics: Sequence[Metric]
    _known: dict[Callable[[RunRecord], Any], Any] = field(default_factory=dict, repr=False)

    @property
    def trained(self) -> Iterator[StepMetric]:
        """Yield the measurements of training steps, including undone ones."""
        return (metric for metric in self.metrics if isinstance(metric, StepMetric))

    @property
    def validated(self) -> Iterator[ValidationMetric]:
        """Yield the measurements of validations."""
        return (metric for metric in self.metrics if isinstance(metric, ValidationMetric))

    @property
    def turns(self) -> Iterator[Timed]:
        """Yield ``history`` without per-step reports of stages, except the last event of each part of the run."""
        return self._history_without(REPORTS)

    @cached_property
    def landmarks(self) -> list[Timed]:
        """``history`` without per-step events, except the last event of each part of the run."""
        return list(self._history_without(ROUTINE))

    @cached_property
    def starts(self) -> list[tuple[float, RunStarted]]:
        """Start events of all parts of the run with their times."""
        return [(t, fact) for t, fact in self.landmarks if isinstance(fact, RunStarted)]

    def _history_without(self, kinds: frozenset[str]) -> Iterator[Timed]:
        if isinstance(self.history, StreamedSequence):
            return self.history.without(kinds)
        return without_kinds(self.history, lambda timed: timed[1].kind, kinds)


def cached(fold: Callable[[RunRecord], Found]) -> Callable[[RunRecord], Found]:
    """Decorate a function of a record, which then runs once per record. Its result must not be modified."""

    @wraps(fold)
    def once(record: RunRecord) -> Found:
        if fold not in record._known:
            record._known[fold] = fold(record)
        return cast(Found, record._known[fold])

    return once
