"""Progress display of jobs: one bar for all, and one line per running job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich.progress import TaskID

from planaria.report.observe.bars import BarDisplay, columns


class JobsProgress(BarDisplay):
    """Implements ``trials.jobs.Watcher``: bars and lines on a terminal, only lines elsewhere."""

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        count = "{task.completed:.0f}/{task.total:.0f} steps"
        super().__init__(*columns(count), quiet=quiet, stream=stream, transient=True)
        self._tasks: list[TaskID] = []

    def note(self, line: str) -> None:
        """Print a line."""
        self._print(line)

    def progressed(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
        """Show progress: ``reached`` of all ``steps``, and (reached, steps) of each job in ``running``."""
        if self._bar is None:
            return
        lines = {title: (reached, steps)} | {f"  {name}": how for name, how in running.items()}
        for index in range(len(lines), len(self._tasks)):
            self._bar.update(self._tasks[index], visible=False)
        for index, (description, (completed, total)) in enumerate(lines.items()):
            if index == len(self._tasks):
                self._tasks.append(self._bar.add_task(description))
            self._bar.update(
                self._tasks[index], description=description, completed=completed, total=total, visible=True
            )
