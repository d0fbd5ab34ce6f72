"""Sources of live pages: of runs, and of other folders."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from planaria.config.folders import folder_kinds
from planaria.control.facts.events import RunStarted
from planaria.control.log.reader import EVENTS, IN_MEMORY, LogFollower, LogItem
from planaria.control.log.run_record import REPORTS
from planaria.report.live_page.frames import SCHEMA, Json, StateChange, difference
from planaria.report.live_page.log_fold import LogFold
from planaria.report.observe.tally import RunTally


class PageSource(ABC):
    """Reads files as they grow; finished ones work the same way."""

    state: Json
    """state shown after everything that was read"""
    began = False
    """whether there is something to show"""
    tally: RunTally | None = None
    """totals of a run for ``/metrics``, or None for others"""

    @abstractmethod
    def _files(self) -> list[Path]:
        """Return the files that grow."""

    @property
    def age_s(self) -> float:
        """Seconds since the last write to any of the files; infinite without any."""
        times = []
        for file in self._files():
            try:
                times.append(file.stat().st_mtime)
            except OSError:
                continue
        return max(0.0, time.time() - max(times)) if times else float("inf")

    def initial_frame(self) -> StateChange:
        """Return the initial frame."""
        return StateChange(0, 0.0, self.state, routine=False)

    @abstractmethod
    def read(self, limit: int) -> Iterator[StateChange | None]:
        """Yield a frame for each of the next ``limit`` facts, None if it changes nothing; end when there are no more.

        :raises UserError: if the files cannot be read.
        """


class FolderSource(PageSource):
    """Base of the sources of folders that hold no run: their state and frames."""

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        self._folder = folder
        self.state = {"schema": SCHEMA, "run": {"kind": kind, "name": name}}
        self._number = 0
        self._origin: float | None = None

    def _update(
        self, when: float, updates: Mapping[str, object], line: tuple[int, str, str] | None = None
    ) -> StateChange | None:
        """Set these parts of the state at Unix time ``when``; return the frame, or None if nothing changed.

        ``line``: step, tone and text of a line to show.
        """
        self._origin = when if self._origin is None else self._origin
        change = difference({name: self.state[name] for name in updates if name in self.state}, updates)
        if not change and line is None:
            return None
        self.state = {**self.state, **updates}
        self._number += 1
        shown = None if line is None else dict(zip(("step", "tone", "text"), line, strict=True))
        return StateChange(self._number, max(0.0, when - self._origin), change, shown, routine=line is None)


def source_of(folder: Path) -> PageSource:
    """Return the source of the live page of ``folder``.

    :raises UserError: if the folder is of a known kind without a page.
    """
    if not (folder / EVENTS).exists():
        for kind in sorted(folder_kinds(), key=lambda kind: not kind.matches(folder)):
            source: PageSource | None = kind.page_source(folder)
            if source is not None:
                return source
    return RunSource(folder)


class RunSource(PageSource):
    """Reads a run's log and folds it into the state of the live page."""

    def __init__(self, folder: Path) -> None:
        """:raises UserError: if ``folder`` is not a run's."""
        self._folder, self._log = folder, LogFollower(folder)
        self._fold = LogFold(self._log.config)
        self.tally, self.state = self._fold.tally, self._fold.state
        self._reading: Iterator[tuple[float, LogItem]] | None = None
        """new facts of the log that have not been folded"""

    def _files(self) -> list[Path]:
        return [self._folder / EVENTS]

    def read(self, limit: int) -> Iterator[StateChange | None]:
        """Yield frames; per-stage reports are skipped while the log is far ahead, so that long ones open in seconds."""
        if self._reading is None:
            self._reading = self._log.more(REPORTS if self._log.ahead > IN_MEMORY else frozenset())
        for _ in range(limit):
            if (entry := next(self._reading, None)) is None:
                self._reading = None
                return
            self.began = self.began or isinstance(entry[1], RunStarted)
            frame = self._fold.apply(*entry)
            self.state = self._fold.state
            yield frame
