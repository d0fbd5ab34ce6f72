"""Follow a folder for the live page: choose its source, read it in a thread, and pass new frames to watchers.

A folder holds a run (:class:`RunSource`), a comparison or a swarm. Reading takes place outside the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from pkgutil import resolve_name

from planaria.common.errors import UserError
from planaria.control.events import RunStarted
from planaria.control.logs import EVENTS, IN_MEMORY, Followed, News
from planaria.control.run_record import REPORTS
from planaria.report.live.tally import Tally
from planaria.report.live_page.frames import Frame, Frames, Json
from planaria.report.live_page.limits import BATCH, POLL_S, QUIET_S, READY_S
from planaria.report.live_page.source import Source, age_s
from planaria.report.live_page.story import Story

AT_ONCE = 2_000
"""facts that are folded before others may see what came of them"""
OF_PARTS = (
    "planaria.swarm.report.swarm_source:SwarmSource",
    "planaria.lab.report.comparison_source:ComparisonSource",
)
"""sources of the other parts, which are imported only to look at a folder that holds no run"""
OTHERS = {"drill.json": "a drill's", "experts.json": "an ensemble's"}
"""file → whose folder it marks, where there is no page"""


class Telling:
    """A run, a comparison or a swarm: its source, its frames, and who waits for more of them."""

    def __init__(self, folder: Path, name: str) -> None:
        """:raises UserError: when there is nothing in ``folder`` that has a page."""
        self.folder, self.name = folder, name
        self.source: Source = source_of(folder)
        self.frames = Frames()
        self.frames.add(self.source.opening())
        self.caught_up = False
        """has all been read that was there at first?"""
        self.trouble = ""
        """why the log is read no further"""
        self.closing = False
        """is the server about to end?"""
        self.over = False
        """there will be no more frames"""
        self._news = asyncio.Condition()
        self._version = 0
        """how often there was something new"""
        self._message = (-1, -1), b""

    async def follow(self) -> None:
        """Reads on until the log is broken, or the server is about to end and all that there is has been read."""
        while not self.trouble:
            closing = self.closing
            grew, more = await asyncio.to_thread(self._read)
            if grew or self.caught_up is more:
                self.caught_up = self.caught_up or not more
                await self.tell()
            if closing and not more:
                break
            if not more:
                await asyncio.sleep(POLL_S)
        self.over = True
        await self.tell()

    def _read(self) -> tuple[bool, bool]:
        """Folds the next facts, some at most: is anything new, and is there more to be read at once?"""
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
        """Watchers are to know when it is followed no more by a mistake of this program's."""
        error = None if following.cancelled() else following.exception()
        if error is not None:
            self.trouble = f"this page cannot follow it ({type(error).__name__}: {error})"
            self._version += 1

    async def tell(self) -> None:
        """Wakes all who wait for more."""
        self._version += 1
        async with self._news:
            self._news.notify_all()

    async def since(self, number: int) -> AsyncIterator[list[Frame]]:
        """The frames after that of this number, some at a time, as they come; none when something else is new, and now
        and then."""
        told = -1
        while True:
            version, some = self._version, self.frames.after(number, BATCH)
            if some:
                number = some[-1].number
                yield some
            elif version != told:
                told = version
                yield []
            elif self.over or self.trouble:
                return
            else:
                try:
                    async with asyncio.timeout(QUIET_S), self._news:
                        if self._version == version:
                            await self._news.wait()
                except TimeoutError:
                    told = -1

    def message(self, some: list[Frame]) -> bytes:
        """Frames as an event of a stream. Whoever is up to date gets the same, so the last one is kept."""
        about = some[0].number, some[-1].number
        if self._message[0] != about:
            said = ",".join(frame.text for frame in some)
            self._message = about, f"id: {about[1]}\nevent: frames\ndata: [{said}]\n\n".encode()
        return self._message[1]

    @property
    def age_s(self) -> float:
        """Seconds since something was last written."""
        return self.source.age_s

    def unready(self) -> str:
        """Why nobody should wait for news of this run; empty if they may."""
        if self.trouble:
            return "its log is broken"
        if not self.source.began:
            return "it has not begun"
        if over := self.source.state.get("over"):
            return f"it is over: {over}"
        return f"no news for more than {READY_S:g} s" if self.age_s > READY_S else ""


def source_of(folder: Path) -> Source:
    """Return what the live page of ``folder`` is drawn from.

    :raises UserError: when the folder is of a known kind that has no page.
    """
    if not (folder / EVENTS).exists():
        for name, what in OTHERS.items():
            if (folder / name).exists():
                raise UserError(f"{folder}: is not a run's folder but {what}, which has no page; see its report.html")
        for kind in map(resolve_name, OF_PARTS):
            if kind.fits(folder):
                source: Source = kind(folder)
                return source
    return RunSource(folder)


class RunSource:
    """Reads a run's log and folds it into a story."""

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
