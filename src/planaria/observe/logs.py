"""A run's folder on disk: written line by line while it runs, read back as one record.

Every file is JSON lines. A line reaches the operating system in one write, so a killed controller leaves whole lines;
what a crash of the machine tears off is the last line, and both sides know to drop it.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from planaria.config import RunConfig
from planaria.decisions import Decision
from planaria.errors import UserError
from planaria.events import Event, Fact, FaultInjected, Worked

EVENTS, SPANS, METRICS, CHAOS, CONFIG = "events.jsonl", "spans.jsonl", "metrics.jsonl", "chaos.jsonl", "config.json"


_LONGEST_LINE = 16 << 20


class Metric(BaseModel):
    """What one step (``loss``) or one validation (``val_loss``) measured. Losses in nats per token."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    t: float
    step: int
    loss: float | None = None
    tokens_per_s: float | None = None
    grad_norm: dict[int, float | None] = {}
    """stage → L2 norm of its gradient before clipping; None where the stage did not tell"""
    val_loss: float | None = None
    losses: dict[int, float | None] = {}
    """of several replicas, of which ``loss`` is the mean: what each had"""
    val_losses: dict[int, float] = {}
    """the same for ``val_loss``"""


@dataclass(frozen=True)
class RunRecord:
    """Everything a run's folder tells. Times are seconds of the machine's monotonic clock."""

    folder: Path
    config: RunConfig
    history: list[tuple[float, Event | Decision]]
    """events and decisions in the controller's order, with the faults of other terminals merged in"""
    worked: list[tuple[float, Worked]]
    metrics: list[Metric]


class RunLog:
    """Writes a run's logs into ``folder`` (made if absent); appends when the run is resumed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._events = _append_to(folder / EVENTS)
        self._spans = _append_to(folder / SPANS)
        self._metrics = _append_to(folder / METRICS)

    def event(self, t: float, event: Event) -> None:
        _write(self._events, f'{{"t": {t!r}, "event": {event.model_dump_json()}}}')

    def decision(self, t: float, decision: Decision) -> None:
        _write(self._events, f'{{"t": {t!r}, "decision": {decision.model_dump_json()}}}')

    def worked(self, t: float, worked: Worked) -> None:
        _write(self._spans, f'{{"t": {t!r}, "worked": {worked.model_dump_json()}}}')

    def metric(self, t: float, values: Mapping[str, object]) -> None:
        _write(self._metrics, json.dumps({"t": t, **values}))

    def close(self) -> None:
        for file in (self._events, self._spans, self._metrics):
            file.close()


def _append_to(path: Path) -> FileIO:
    """The file, unbuffered and open at its end; a line that an earlier crash tore off is cut away first."""
    if path.exists():
        with path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - _LONGEST_LINE))
            file.truncate(start + file.read().rfind(b"\n") + 1)
    return path.open("ab", buffering=0)


def _write(file: FileIO, line: str) -> None:
    rest, begin = line.encode() + b"\n", os.fstat(file.fileno()).st_size
    try:
        while rest:  # a nearly full disk takes a part
            rest = rest[file.write(rest) :]
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(file.fileno(), begin)  # what comes after half a line would be lost with it
        raise UserError(
            f"{file.name}: cannot be written ({error.strerror}); free the disk, then resume the run"
        ) from error


class _HistoryLine(Fact):
    t: float
    event: Event | None = None
    decision: Decision | None = None

    @property
    def fact(self) -> Event | Decision:
        fact = self.event or self.decision
        assert fact is not None
        return fact

    def model_post_init(self, _: object) -> None:
        if (self.event is None) == (self.decision is None):
            raise ValueError("a line holds either an event or a decision")


class _WorkedLine(Fact):
    t: float
    worked: Worked


class _FaultLine(Fact):
    t: float
    event: FaultInjected


def read_run(folder: Path) -> RunRecord:
    """The record of a run, finished or not.

    A torn last line is left out. Raises UserError if ``folder`` is not a run's, or names file and line that are broken.
    """
    config = _config(folder)
    events = [(line.t, line.fact) for line in _lines(folder / EVENTS, _HistoryLine)]
    faults: list[tuple[float, Event | Decision]] = [(line.t, line.event) for line in _lines(folder / CHAOS, _FaultLine)]
    # A merge and not a sort: a resumed run may have a younger clock than its first part, and the file's order is true.
    history = list(heapq.merge(events, faults, key=lambda entry: entry[0]))
    worked = [(line.t, line.worked) for line in _lines(folder / SPANS, _WorkedLine)]
    return RunRecord(folder, config, history, worked, _lines(folder / METRICS, Metric))


def _config(folder: Path) -> RunConfig:
    path = folder / CONFIG
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a run, such as runs/NAME")
    if not path.is_file():
        raise UserError(f"{folder}: not a run's folder ({CONFIG} is missing); give one such as runs/NAME")
    try:
        return RunConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path}: {_reason(error)}; it must be as the run wrote it") from error


Line = TypeVar("Line", bound=BaseModel)


def _lines(path: Path, kind: type[Line]) -> list[Line]:
    """The file's whole lines; none if it does not exist."""
    if not path.is_file():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    parsed = []
    for number, line in enumerate(whole, 1):
        try:
            parsed.append(kind.model_validate_json(line))
        except ValidationError as error:
            raise UserError(f"{path}:{number}: broken line ({_reason(error)}); mend or remove it") from error
    return parsed


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
