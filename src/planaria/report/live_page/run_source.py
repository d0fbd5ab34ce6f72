"""A run as a page shows it: its log, read on, and folded into a story."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planaria.control.events import RunStarted
from planaria.control.logs import EVENTS, IN_MEMORY, Followed, News
from planaria.control.run_record import REPORTS
from planaria.report.live.tally import Tally
from planaria.report.live_page.frames import Frame, Json
from planaria.report.live_page.source import age_s
from planaria.report.live_page.story import Story


class RunSource:
    """One run's log."""

    def __init__(self, folder: Path) -> None:
        """:raises UserError: when ``folder`` is not a run's."""
        self._folder, self._log = folder, Followed(folder)
        self._story = Story(self._log.config)
        self.tally: Tally | None = self._story.tally
        self.began = False
        self._reading: Iterator[tuple[float, News]] | None = None
        """what is new in the log, as far as it is not folded yet"""

    @property
    def state(self) -> Json:
        return self._story.state

    @property
    def age_s(self) -> float:
        return age_s([self._folder / EVENTS])

    def opening(self) -> Frame:
        return self._story.opening()

    def read(self, most: int) -> Iterator[Frame | None]:
        """What every stage says of every step is left out of a log that is far ahead: a long one opens in seconds."""
        if self._reading is None:
            self._reading = self._log.more(REPORTS if self._log.ahead > IN_MEMORY else frozenset())
        for _ in range(most):
            if (news := next(self._reading, None)) is None:
                self._reading = None
                return
            self.began = self.began or isinstance(news[1], RunStarted)
            yield self._story.take(*news)
