"""Follow a folder for the live page: choose its source, read it in a thread, and pass new frames to watchers.

A folder holds a run (:class:`RunSource`), a comparison or a swarm. Reading takes place outside the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from pkgutil import resolve_name

from planaria.common.errors import UserError
from planaria.control.facts.events import RunStarted
from planaria.control.log.logs import EVENTS, IN_MEMORY, LogFollower, LogItem
from planaria.control.log.run_record import REPORTS
from planaria.report.live_page.frames import Frames, Json, StateChange
from planaria.report.live_page.limits import BATCH, POLL_S, QUIET_S, READY_S
from planaria.report.live_page.log_fold import LogFold
from planaria.report.live_page.source import LogSource, age_s
from planaria.report.observe.tally import RunTally

AT_ONCE = 2_000
"""facts folded before watchers are notified"""
OF_PARTS = (
    "planaria.swarm.report.swarm_source:SwarmSource",
    "planaria.lab.report.comparison_source:ComparisonSource",
)
"""sources of other parts, imported only for folders without a run"""
OTHERS = {"drill.json": "a drill's", "experts.json": "an ensemble's"}
"""file → kind of folder without a live page"""


class FolderFollower:
    """A run, comparison or swarm on the page: its source, frames and watchers."""

    def __init__(self, folder: Path, name: str) -> None:
        """:raises UserError: if ``folder`` holds nothing that has a page."""
        self.folder, self.name = folder, name
        self.source: LogSource = source_of(folder)
        self.frames = Frames()
        self.frames.add(self.source.opening())
        self.caught_up = False
        """everything that existed at the start has been read"""
        self.trouble = ""
        """reason for which reading stopped"""
        self.closing = False
        """the server is stopping"""
        self.over = False
        """no more frames will come"""
        self._news = asyncio.Condition()
        self._version = 0
        """number of changes"""
        self._message = (-1, -1), b""

    async def follow(self) -> None:
        """Read until the log is broken, or the server stops and everything has been read."""
        while not self.trouble:
            closing = self.closing
            grew, more = await asyncio.to_thread(self._read)
            if grew or self.caught_up is more:
                self.caught_up = self.caught_up or not more
                await self.notify()
            if closing and not more:
                break
            if not more:
                await asyncio.sleep(POLL_S)
        self.over = True
        await self.notify()

    def _read(self) -> tuple[bool, bool]:
        """Fold at most :data:`AT_ONCE` facts; return whether there were any, and whether there are more."""
        folded = 0
        try:
            for frame in self.source.read(AT_ONCE):
                folded += 1
                if frame is not None:
                    self.frames.add(frame)
        except (UserError, OSError) as error:
            self.trouble = str(error)
            return True, False
        return folded > 0, folded == AT_ONCE

    def gave_up(self, following: asyncio.Task[None]) -> None:
        """Show watchers the internal error that ended ``following``, the reading of the log."""
        error = None if following.cancelled() else following.exception()
        if error is not None:
            self.trouble = f"this page cannot follow it ({type(error).__name__}: {error})"
            self._version += 1

    async def notify(self) -> None:
        """Wake all watchers."""
        self._version += 1
        async with self._news:
            self._news.notify_all()

    async def since(self, number: int) -> AsyncIterator[list[StateChange]]:
        """Yield the frames after ``number`` in batches as they come; an empty batch marks other changes or idleness."""
        reported = -1
        while True:
            version, some = self._version, self.frames.after(number, BATCH)
            if some:
                number = some[-1].number
                yield some
            elif version != reported:
                reported = version
                yield []
            elif self.over or self.trouble:
                return
            else:
                try:
                    async with asyncio.timeout(QUIET_S), self._news:
                        if self._version == version:
                            await self._news.wait()
                except TimeoutError:
                    reported = -1

    def message(self, some: list[StateChange]) -> bytes:
        """Return frames as an event of a stream; the last one is cached, since current watchers share it."""
        about = some[0].number, some[-1].number
        if self._message[0] != about:
            frames = ",".join(frame.text for frame in some)
            self._message = about, f"id: {about[1]}\nevent: frames\ndata: [{frames}]\n\n".encode()
        return self._message[1]

    @property
    def age_s(self) -> float:
        """Seconds since the last write."""
        return self.source.age_s

    def unready(self) -> str:
        """Return why no news of this run can be expected; empty if it can."""
        if self.trouble:
            return "its log is broken"
        if not self.source.began:
            return "it has not begun"
        if over := self.source.state.get("over"):
            return f"it is over: {over}"
        return f"no news for more than {READY_S:g} s" if self.age_s > READY_S else ""


def source_of(folder: Path) -> LogSource:
    """Return the source of the live page of ``folder``.

    :raises UserError: if the folder is of a known kind without a page.
    """
    if not (folder / EVENTS).exists():
        for name, label in OTHERS.items():
            if (folder / name).exists():
                raise UserError(f"{folder} is not a run's folder but {label}, which has no page; see its report.html")
        for kind in map(resolve_name, OF_PARTS):
            if kind.fits(folder):
                source: LogSource = kind(folder)
                return source
    return RunSource(folder)


class RunSource:
    """Reads a run's log and folds it into a story."""

    def __init__(self, folder: Path) -> None:
        """:raises UserError: if ``folder`` is not a run's."""
        self._folder, self._log = folder, LogFollower(folder)
        self._story = LogFold(self._log.config)
        self.tally: RunTally | None = self._story.tally
        self.began = False
        self._reading: Iterator[tuple[float, LogItem]] | None = None
        """news of the log that are not folded yet"""

    @property
    def state(self) -> Json:
        return self._story.state

    @property
    def age_s(self) -> float:
        return age_s([self._folder / EVENTS])

    def opening(self) -> StateChange:
        return self._story.opening()

    def read(self, most: int) -> Iterator[StateChange | None]:
        """Yield frames; per-stage reports are skipped while the log is far ahead, so that long ones open in seconds."""
        if self._reading is None:
            self._reading = self._log.more(REPORTS if self._log.ahead > IN_MEMORY else frozenset())
        for _ in range(most):
            if (entry := next(self._reading, None)) is None:
                self._reading = None
                return
            self.began = self.began or isinstance(entry[1], RunStarted)
            yield self._story.take(*entry)
