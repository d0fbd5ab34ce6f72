"""A measurement of links on the terminal while it goes on."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class SurveyProgress:
    """A terminal gets a bar, anything else a line for each pair that is done."""

    def __init__(self, pairs: int, quiet: bool, stream: TextIO | None = None) -> None:
        self._pairs, self._quiet, self._stream = pairs, quiet, stream or sys.stdout
        self._done = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} pairs"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task("starting nodes", total=self._pairs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, text: str) -> None:
        """One more pair is done; ``text`` says which, and what was found."""
        self._done += 1
        if self._bar is not None:
            assert self._task is not None
            self._bar.update(self._task, completed=self._done, description=text)
        elif not self._quiet:
            print(f"{self._done}/{self._pairs} pairs: {text}", file=self._stream, flush=True)
