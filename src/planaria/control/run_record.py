"""Everything a run's folder tells, as one record: what was measured, what happened, and what was decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from planaria.config.schema import RunConfig
from planaria.control.decisions import Decision
from planaria.control.events import Event, RunStarted, Worked

Told = tuple[float, Event | Decision]
"""a fact, and when the controller learned or decided it"""

REPORTS = frozenset(
    {
        "stage_ready", "stage_committed", "stage_copied", "stage_saved", "offer_heard", "offers_counted",
        "message_compressed", "round_made", "results_sent", "gauged",
    }
)  # fmt: skip
"""what every stage says again and again: the bulk of a log"""
ROUTINE = REPORTS | {"run_step", "commit", "close_round", "round_late", "offer_refused"}

Raw = TypeVar("Raw")
Item = TypeVar("Item")
Found = TypeVar("Found")


class _Measured(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    t: float
    step: int


class StepMetric(_Measured):
    """What a training step measured. Losses in nats per token."""

    kind: Literal["step"] = "step"
    loss: float
    tokens_per_s: float
    """since the step before"""
    grad_norm: dict[int, float]
    """stage → L2 norm of its gradient before clipping"""
    losses: dict[int, float] = {}
    """of several replicas, of which ``loss`` is the mean: what each had"""


class ValidationMetric(_Measured):
    """What a validation after ``step`` steps measured. Losses in nats per token."""

    kind: Literal["validation"] = "validation"
    val_loss: float
    val_losses: dict[int, float] = {}
    """of several replicas, of which ``val_loss`` is the mean: what each had"""


def _kind_of(line: Any) -> str | None:
    """The lines of an older planaria lack the word."""
    return str(line.get("kind", "validation" if "val_loss" in line else "step")) if isinstance(line, dict) else None


Metric = Annotated[
    Annotated[StepMetric, Tag("step")] | Annotated[ValidationMetric, Tag("validation")], Discriminator(_kind_of)
]
"""A line of ``metrics.jsonl``."""


class Streamed(Sequence[Item], Generic[Raw, Item]):
    """What a long file holds, read anew each time it is gone through: it takes no memory."""

    def __init__(
        self, raw: Callable[[], Iterator[Raw]], kind: Callable[[Raw], str], item: Callable[[Raw], Item]
    ) -> None:
        """``raw`` begins to read; ``kind`` tells of what is read whether it is worth making an ``item`` of it."""
        self._raw, self._kind, self._item = raw, kind, item

    def __iter__(self) -> Iterator[Item]:
        return map(self._item, self._raw())

    def without(self, kinds: frozenset[str]) -> Iterator[Item]:
        """As :func:`sparse`."""
        return map(self._item, sparse(self._raw(), self._kind, kinds))

    def __len__(self) -> int:
        return sum(1 for _ in self._raw())

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...
    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        if isinstance(place, slice) or place < 0:
            return list(self)[place]
        for item in islice(self, place, None):
            return item
        raise IndexError(place)


def sparse(facts: Iterable[Raw], kind: Callable[[Raw], str], kinds: frozenset[str]) -> Iterator[Raw]:
    """The facts of all other kinds; and the last one of each part of a run, which tells when that part ended."""
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
    """Everything a run's folder tells. Times are seconds of the machine's monotonic clock.

    Of a long run, ``history``, ``worked`` and ``metrics`` are read anew each time they are gone through.
    """

    folder: Path
    config: RunConfig
    history: Sequence[Told]
    """events and decisions in the controller's order, with the faults of other terminals merged in"""
    worked: Sequence[tuple[float, Worked]]
    metrics: Sequence[Metric]
    _known: dict[Callable[[RunRecord], Any], Any] = field(default_factory=dict, repr=False)

    @property
    def trained(self) -> Iterator[StepMetric]:
        """What training steps measured, those that were undone among them."""
        return (metric for metric in self.metrics if isinstance(metric, StepMetric))

    @property
    def validated(self) -> Iterator[ValidationMetric]:
        """What validations measured."""
        return (metric for metric in self.metrics if isinstance(metric, ValidationMetric))

    @property
    def turns(self) -> Iterator[Told]:
        """``history`` without what each stage says of its steps, but for the last fact of each part of the run."""
        if isinstance(self.history, Streamed):
            return self.history.without(REPORTS)
        return sparse(self.history, _kind, REPORTS)

    @cached_property
    def landmarks(self) -> list[Told]:
        """``history`` without what happens in every step, but for the last fact of each part of the run."""
        if isinstance(self.history, Streamed):
            return list(self.history.without(ROUTINE))
        return list(sparse(self.history, _kind, ROUTINE))

    @cached_property
    def starts(self) -> list[tuple[float, RunStarted]]:
        """How each part of the run began, and when: the first, and those that took it up."""
        return [(t, fact) for t, fact in self.landmarks if isinstance(fact, RunStarted)]

    def once(self, find: Callable[[RunRecord], Found]) -> Found:
        """What ``find`` makes of this record, looked for only once. Nobody may change it."""
        if find not in self._known:
            self._known[find] = find(self)
        return cast(Found, self._known[find])


def _kind(told: Told) -> str:
    return told[1].kind
