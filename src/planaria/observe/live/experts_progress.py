"""The training of experts on the terminal while it goes on: one bar, and a line for whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.progress import BarColumn, TaskID, TextColumn

from planaria.observe.live.bars import BarDisplay


class ExpertsProgress(BarDisplay):
    """A terminal gets a bar and lines, anything else the lines alone; both are a ``experts.jobs.Watcher``."""

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        columns = (
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            BarColumn(20),
            TextColumn("{task.description}", markup=False),
        )
        super().__init__(*columns, quiet=quiet, stream=stream, transient=True)
        self._task: TaskID | None = None

    def said(self, line: str) -> None:
        """Something happened."""
        self._print(line)

    def training(self, title: str, saved: int, steps: int, running: Sequence[str]) -> None:
        """Of all ``steps`` of what is trained now, ``saved`` are done and would outlive a crash."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(title, total=steps)
        self._bar.update(self._task, completed=saved, total=steps, description=f"{title}: {', '.join(running)}")
