"""A measurement of links on the terminal while it goes on."""

from __future__ import annotations

from typing import Self, TextIO

from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn

from planaria.observe.live.bars import BarDisplay


class SurveyProgress(BarDisplay):
    """A terminal gets a bar, anything else a line for each pair that is done."""

    def __init__(self, pairs: int, quiet: bool, stream: TextIO | None = None) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} pairs"),
            TimeRemainingColumn(),
        )
        super().__init__(*columns, quiet=quiet, stream=stream)
        self._pairs = pairs
        self._done = 0
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if self._bar is not None:
            self._task = self._bar.add_task("starting nodes", total=self._pairs)
        return self

    def told(self, text: str) -> None:
        """One more pair is done; ``text`` says which, and what was found."""
        self._done += 1
        if self._bar is not None:
            assert self._task is not None
            self._bar.update(self._task, completed=self._done, description=text)
        else:
            self._print(f"{self._done}/{self._pairs} pairs: {text}")
