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
from planaria.control.log.reader import EVENTS, IN_MEMORY, LogFollower, LogItem
from planaria.control.log.run_record import REPORTS
from planaria.report.live_page.frames import Frames, Json, StateChange
from planaria.report.live_page.limits import KEEP_ALIVE_S, MAX_BATCH, POLL_S, READY_S
from planaria.report.live_page.log_fold import LogFold
from planaria.report.live_page.source import LogSource, age_s
from planaria.report.observe.tally import RunTally

MAX_FACTS = 2_000
"""maximum facts folded before watchers are notified"""
OTHER_SOURCES = (
    "planaria.swarm.report.swarm_source:SwarmSource",
    "planaria.lab.report.comparison_source:ComparisonSource",
)
"""sources of other parts, imported only for folders without a run"""
PAGELESS_FOLDERS = {"drill.json": "a drill's", "experts.json": "an ensemble's"}
"""file → kind of folder without a live page"""


class FolderFollower:
    """A run, comparison or swarm on the page: its source, frames and watchers."""

    def __init__(self, folder: Path, name: str) -> None:
        """:raises UserError: if ``folder`` holds nothing that has a page."""
        self.folder, self.name = folder, name
        self.source: LogSource = source_of(folder)
        self.frames = Frames()
        self.frames.add(self.source.initial_frame())
        self.caught_up = False
        """whether everything that existed at the start has been read"""
        self.trouble = ""
        """reason for which reading stopped"""
        self.closing = False
        """whether the server is stopping"""
        self.over = False
        """whether no more frames will follow"""
        self._changed = asyncio.Condition()
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
        """Fold at most :data:`MAX_FACTS` facts; return whether there were any, and whether there are more."""
        folded = 0
        try:
            for frame in self.source.read(MAX_FACTS):
                folded += 1
                if frame is not None:
                    self.frames.add(frame)
        except (UserError, OSError) as error:
            self.trouble = str(error)
            return True, False
        return folded > 0, folded == MAX_FACTS

    def on_reading_failed(self, following: asyncio.Task[None]) -> None:
        """Show watchers the internal error that ended the task ``following``, which reads the log."""
        error = None if following.cancelled() else following.exception()
        if error is not None:
            self.trouble = f"this page cannot follow it ({type(error).__name__}: {error})"
            self._version += 1

    async def notify(self) -> None:
        """Wake all watchers."""
        self._version += 1
        async with self._changed:
            self._changed.notify_all()

    async def frames_since(self, number: int) -> AsyncIterator[list[StateChange]]:
        """Yield the frames after ``number`` in batches as they come; an empty batch marks other changes or idleness."""
        reported = -1
        while True:
            version, frames = self._version, self.frames.after(number, MAX_BATCH)
            if frames:
                number = frames[-1].number
                yield frames
            elif version != reported:
                reported = version
                yield []
            elif self.over or self.trouble:
                return
            else:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S), self._changed:
                        if self._version == version:
                            await self._changed.wait()
                except TimeoutError:
                    reported = -1

    def message(self, frames: list[StateChange]) -> bytes:
        """Return frames as an event of a stream; the last one is cached, since current watchers share it."""
        numbers = frames[0].number, frames[-1].number
        if self._message[0] != numbers:
            data = ",".join(frame.text for frame in frames)
            self._message = numbers, f"id: {numbers[1]}\nevent: frames\ndata: [{data}]\n\n".encode()
        return self._message[1]

    @property
    def age_s(self) -> float:
        """Seconds since the last write."""
        return self.source.age_s

    def unready_reason(self) -> str:
        """Return why no new frames of this run can be expected, or an empty string if they can."""
        if self.trouble:
            return "its log is broken"
        if not self.source.began:
            return "it has not started"
        if over := self.source.state.get("over"):
            return f"it is over: {over}"
        return f"nothing new for more than {READY_S:g} s" if self.age_s > READY_S else ""


def source_of(folder: Path) -> LogSource:
    """Return the source of the live page of ``folder``.

    :raises UserError: if the folder is of a known kind without a page.
    """
    if not (folder / EVENTS).exists():
        for name, kind_name in PAGELESS_FOLDERS.items():
            if (folder / name).exists():
                raise UserError(
                    f"{folder} is not a run's folder but {kind_name}, which has no page; see its report.html"
                )
        for kind in map(resolve_name, OTHER_SOURCES):
            if kind.fits(folder):
                source: LogSource = kind(folder)
                return source
    return RunSource(folder)


class RunSource:
    """Reads a run's log and folds it into the state of the live page."""

    def __init__(self, folder: Path) -> None:
        """:raises UserError: if ``folder`` is not a run's."""
        self._folder, self._log = folder, LogFollower(folder)
        self._fold = LogFold(self._log.config)
        self.tally: RunTally | None = self._fold.tally
        self.began = False
        self._reading: Iterator[tuple[float, LogItem]] | None = None
        """new facts of the log that have not been folded"""

    @property
    def state(self) -> Json:
        return self._fold.state

    @property
    def age_s(self) -> float:
        return age_s([self._folder / EVENTS])

    def initial_frame(self) -> StateChange:
        return self._fold.initial_frame()

    def read(self, limit: int) -> Iterator[StateChange | None]:
        """Yield frames; per-stage reports are skipped while the log is far ahead, so that long ones open in seconds."""
        if self._reading is None:
            self._reading = self._log.more(REPORTS if self._log.ahead > IN_MEMORY else frozenset())
        for _ in range(limit):
            if (entry := next(self._reading, None)) is None:
                self._reading = None
                return
            self.began = self.began or isinstance(entry[1], RunStarted)
            yield self._fold.apply(*entry)
