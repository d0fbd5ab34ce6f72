"""A comparison on the terminal while it goes on: one bar for all of it, and a line for each run under way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self, TextIO

from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn

from planaria.observe.live.bars import BarDisplay


class RaceProgress(BarDisplay):
    """Hears of ticks from several threads. A terminal gets bars, anything else a line for each run that is done."""

    def __init__(self, runs: Sequence[tuple[str, int]], ticks: int, quiet: bool, stream: TextIO | None = None) -> None:
        """``runs`` are (arm, seed), each of so many ``ticks``."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(),
        )
        super().__init__(*columns, quiet=quiet, stream=stream)
        self._ticks = ticks
        self._done = dict.fromkeys(runs, 0)
        self._lock = threading.Lock()
        self._all: TaskID | None = None
        self._lines: dict[tuple[str, int], TaskID] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        if self._bar is not None:
            self._all = self._bar.add_task(f"{len(self._done)} runs", total=self._ticks * len(self._done))
        return self

    def told(self, arm: str, seed: int, ticks: int) -> None:
        """``ticks`` of this run are done. One that stopped early never says that it is done; its line stays."""
        run = (arm, seed)
        with self._lock:
            before, self._done[run] = self._done[run], ticks
            if self._bar is not None:
                self._draw(run)
            elif before < self._ticks <= ticks:
                self._print(f"{self._finished()}/{len(self._done)} runs: {arm}, seed {seed}")

    def _draw(self, run: tuple[str, int]) -> None:
        assert self._bar is not None and self._all is not None
        if run not in self._lines:
            self._lines[run] = self._bar.add_task(f"  {run[0]}, seed {run[1]}", total=self._ticks)
        done = self._done[run]
        self._bar.update(self._lines[run], completed=done, visible=done < self._ticks)
        told = f"{self._finished()} of {len(self._done)} runs done"
        self._bar.update(self._all, completed=sum(self._done.values()), description=told)

    def _finished(self) -> int:
        return sum(done >= self._ticks for done in self._done.values())
