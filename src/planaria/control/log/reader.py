"""Read a run's logs from its folder, as one record or while they grow.

``control/log/writer.py`` writes them. Also the run's identity, and the states on its surviving history.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from pydantic import BaseModel, RootModel, ValidationError

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Commit, Decision, Form
from planaria.control.facts.events import Event, Fact, FaultInjected, RunStarted, WorkReport
from planaria.control.facts.run_started import SnapshotLabel
from planaria.control.log.line_format import HistoryLine, head_of, notice_of, parse_line
from planaria.control.log.run_record import Metric, RunRecord, StreamedSequence, Timed
from planaria.control.log.segments import SEGMENT_BYTES, START, LogLine, end_of_log, read

ID = "run.id"
"""file that identifies a run across folders"""


def identity(folder: Path) -> str:
    """Return the run's unique 32 hexadecimal digits, drawn at first use and kept in the folder.

    :raises OSError: if they cannot be written.
    :raises UserError: if the file is invalid.
    """
    mark = folder / ID
    if not mark.exists():
        write_identity(folder)
    return documents.read_text(mark)


def write_identity(folder: Path, existing: bytes | None = None) -> None:
    """Write a new identity, or the ``existing`` one of the same run."""
    digests.write_files(folder, {ID: existing or secrets.token_hex(16).encode()})


StepBoundary = RunStarted | Form | Commit
"""events that start, continue or undo steps"""


@dataclass
class SurvivingSteps:
    """The steps of each generation that no later rollback or resumption has undone."""

    _reached: dict[tuple[str, int], int] = field(default_factory=dict)
    """(part of the run, generation) → its last surviving step"""
    _now: tuple[str, int] = ("", -1)

    @classmethod
    def of(cls, boundaries: Iterable[StepBoundary]) -> SurvivingSteps:
        """Fold a run's log, oldest event first; of several consecutive commits, the last suffices."""
        surviving = cls()
        for boundary in boundaries:
            surviving.take(boundary)
        return surviving

    def take(self, boundary: StepBoundary) -> None:
        """Fold the next event."""
        match boundary:
            case RunStarted():
                self._now = boundary.part, boundary.first_generation
                snapshot = boundary.recalled_from
                self._reached = {} if snapshot is None else {(snapshot.part, snapshot.generation): snapshot.step}
            case Form():
                self._reached = {state: min(step, boundary.step) for state, step in self._reached.items()}
                self._now = self._now[0], boundary.generation
                self._reached[self._now] = boundary.step
            case Commit():
                self._reached[self._now] = boundary.step + 1

    def has(self, label: SnapshotLabel) -> bool:
        """Return whether the snapshot with this label holds a state on the surviving history."""
        return label.step <= self._reached.get((label.part, label.generation), -1)


EVENTS, SPANS, METRICS, CHAOS, CONFIG = "events.jsonl", "spans.jsonl", "metrics.jsonl", "chaos.jsonl", "config.json"

IN_MEMORY = 4 << 20
"""log size in bytes up to which its contents are kept in memory, at ten times their size"""


Parsed = TypeVar("Parsed", bound=BaseModel)
Item = TypeVar("Item")


class _WorkedLine(Fact):
    t: float
    worked: WorkReport


class _MetricLine(RootModel[Metric]):
    pass


class _FaultLine(Fact):
    t: float
    event: FaultInjected


class _Entry(NamedTuple):
    """An event, parsed only for its order."""

    t: float
    kind: str
    line: LogLine
    fact: Event | Decision | None = None

    def timed(self) -> Timed:
        return self.t, self.fact or _parse_history(self.line).fact


def _entry(line: LogLine) -> _Entry:
    head = head_of(line.text)
    if head is not None:
        return _Entry(*head, line)
    parsed = _parse_history(line)
    return _Entry(parsed.t, parsed.fact.kind, line, parsed.fact)


def _fault(line: LogLine) -> _Entry:
    parsed = _parse(line, _FaultLine)
    return _Entry(parsed.t, parsed.event.kind, line, parsed.event)


def read_run(folder: Path) -> RunRecord:
    """Return the record of a run, finished or not, up to now. An incomplete last line is ignored.

    :raises UserError: if ``folder`` is not a run's, or naming file and line of a damaged line; in a long log, when
        iteration reaches that line.
    """
    config = _config(folder)
    record = RunRecord(
        folder,
        config,
        history_of(folder),
        _read_all(folder / SPANS, _WorkedLine, lambda line: (line.t, line.worked)),
        _read_all(folder / METRICS, _MetricLine, lambda line: line.root),
    )
    _require_beginning(folder / EVENTS, bool(record.worked or record.metrics))
    return record


def _require_beginning(path: Path, began: bool) -> None:
    """Raise UserError if a run that has started has no record of its start, which is required to interpret it."""
    first = next(map(_entry, read(path, end_of_log(path))), None)
    if first is None and began:
        raise UserError(f"{path} is missing or empty although the run has started; restore it")
    if first is not None and not isinstance(first.timed()[1], RunStarted):
        raise UserError(f"{path} does not begin with the start of the run; restore the removed lines")


def history_of(folder: Path) -> Sequence[Timed]:
    """Return a run's events and decisions in the controller's order, as :func:`read_run`."""
    events, faults = end_of_log(folder / EVENTS), end_of_log(folder / CHAOS)

    def entries() -> Iterator[_Entry]:
        # Merge, do not sort: after a resumption the clock may be smaller, and the file's order is right.
        struck = map(_fault, read(folder / CHAOS, faults))
        return heapq.merge(map(_entry, read(folder / EVENTS, events)), struck, key=lambda entry: entry.t)

    sequence = StreamedSequence(entries, lambda entry: entry.kind, _Entry.timed)
    return list(sequence) if events.size <= IN_MEMORY else sequence


def step_boundaries(folder: Path) -> Iterator[StepBoundary]:
    """Yield a run's starts and generations in order, and the last commit before each of these and before the end.

    :raises UserError: naming file and line of a damaged line.
    """
    events, commit = folder / EVENTS, list[_Entry]()
    for entry in map(_entry, read(events, end_of_log(events))):
        if entry.kind == "commit":
            commit = [entry]
        elif entry.kind in ("run_started", "form"):
            yield from (cast(StepBoundary, line.timed()[1]) for line in (*commit, entry))
            commit = []
    yield from (cast(StepBoundary, line.timed()[1]) for line in commit)


def _read_all(path: Path, kind: type[Parsed], make_item: Callable[[Parsed], Item]) -> Sequence[Item]:
    """Return all items of a log with one kind of lines; empty if the log does not exist."""
    upto = end_of_log(path)
    sequence = StreamedSequence(lambda: read(path, upto), lambda _: "", lambda line: make_item(_parse(line, kind)))
    return list(sequence) if upto.size <= IN_MEMORY else sequence


LogItem = Event | Decision | WorkReport | Metric


class LogFollower:
    """Reads a growing run's folder incrementally in constant memory."""

    def __init__(self, folder: Path) -> None:
        """:raises UserError: if ``folder`` is not a run's."""
        self.folder, self.config = folder, _config(folder)
        self._places = dict.fromkeys((EVENTS, CHAOS, SPANS, METRICS), START)
        self.notice = 0
        """number of the supervisor's last notice in the current part of the run; 0: none"""

    @property
    def ahead(self) -> int:
        """Approximate bytes of unread events."""
        end, position = end_of_log(self.folder / EVENTS), self._places[EVENTS]
        return (end.segments - position.segments) * SEGMENT_BYTES + end.tail - position.tail

    def more(self, without: frozenset[str] = frozenset()) -> Iterator[tuple[float, LogItem]]:
        """Yield new items of all logs in order of time, except events of the kinds ``without``. An incomplete last line
        is left for later.

        :raises UserError: naming file and line of a damaged line, when reached.
        """
        worked = ((w.t, w.worked) for w in (_parse(line, _WorkedLine) for line in self._lines(SPANS)))
        measured = ((m.root.t, m.root) for m in (_parse(line, _MetricLine) for line in self._lines(METRICS)))
        yield from heapq.merge(self.history(without), worked, measured, key=lambda item: item[0])

    def history(self, without: frozenset[str] = frozenset()) -> Iterator[Timed]:
        """Yield new events and decisions only, as :meth:`more`."""
        entries = map(self._entry_of, map(_entry, self._lines(EVENTS)))
        facts = (entry.timed() for entry in entries if entry.kind not in without)
        faults = (_fault(line).timed() for line in self._lines(CHAOS))
        yield from heapq.merge(facts, faults, key=lambda item: item[0])

    def _entry_of(self, entry: _Entry) -> _Entry:
        """Note the number of the notice that reported an event."""
        if entry.kind == "run_started":
            self.notice = 0
        else:
            self.notice = max(self.notice, notice_of(entry.line.text))
        return entry

    def _lines(self, name: str) -> Iterator[LogLine]:
        path = self.folder / name
        for line in read(path, end_of_log(path), self._places[name]):
            self._places[name] = line.end
            yield line


def not_a_run(folder: Path) -> UserError:
    """Return the error for a folder without a run's files; it lists the runs next to that folder."""
    lacks = f"no {CONFIG}" if folder.is_dir() else "no such folder"
    runs = sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG}"))
    return UserError(
        f"{folder}: not a run ({lacks}); "
        + (f"runs in {folder.parent}: {', '.join(runs)}" if runs else "start one with `planaria train`")
    )


def _config(folder: Path) -> RunConfig:
    path = folder / CONFIG
    if not path.is_file():
        raise not_a_run(folder)
    try:
        return RunConfig.model_validate_json(documents.read_bytes(path))
    except ValidationError as error:
        raise UserError(f"{path}: {_reason(error)}; restore the file that the run wrote") from error


def _parse_history(line: LogLine) -> HistoryLine:
    with _naming(line):
        return parse_line(line.text)


def _parse(line: LogLine, kind: type[Parsed]) -> Parsed:
    with _naming(line):
        return kind.model_validate_json(line.text)


@contextmanager
def _naming(line: LogLine) -> Iterator[None]:
    """Name file and line in the error of a line that cannot be parsed."""
    try:
        yield
    except ValidationError as error:
        reason = _reason(error)
        raise UserError(f"{line.file}:{line.number}: broken line ({reason}); fix or remove it") from error


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), documents.error_reason(first))))
