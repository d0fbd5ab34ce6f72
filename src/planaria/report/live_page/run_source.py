"""The live page's source of a run, and the choice of a folder's source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planaria.config.folders import folder_kinds
from planaria.control.facts.events import RunStarted
from planaria.control.log.reader import EVENTS, IN_MEMORY, LogFollower, LogItem
from planaria.control.log.run_record import REPORTS
from planaria.report.live_page.frames import StateChange
from planaria.report.live_page.log_fold import LogFold
from planaria.report.live_page.page_source import PageSource


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
