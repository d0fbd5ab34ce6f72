"""The training of experts on the terminal while it goes on: one bar, and a line for whatever happens to one of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class ExpertsProgress:
    """A terminal gets a bar and lines, anything else the lines alone; both are a ``experts.jobs.Watcher``."""

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        self._quiet, self._stream = quiet, stream or sys.stdout
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._stream.isatty():
            columns = (
                TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
                BarColumn(20),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def said(self, line: str) -> None:
        """Something happened."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            print(line, file=self._stream, flush=True)

    def training(self, title: str, saved: int, steps: int, running: Sequence[str]) -> None:
        """Of all ``steps`` of what is trained now, ``saved`` are done and would outlive a crash."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(title, total=steps)
        self._bar.update(self._task, completed=saved, total=steps, description=f"{title}: {', '.join(running)}")
