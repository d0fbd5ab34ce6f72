"""A comparison on the terminal while it goes on: one bar for all of it, and a line for each run under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class RaceProgress:
    """Hears of ticks from several threads. A terminal gets bars, anything else a line for each run that is done."""

    def __init__(self, runs: Sequence[tuple[str, int]], ticks: int, quiet: bool, stream: TextIO | None = None) -> None:
        """``runs`` are (arm, seed), each of so many ``ticks``."""
        self._ticks, self._quiet, self._stream = ticks, quiet, stream or sys.stdout
        self._done = dict.fromkeys(runs, 0)
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._all: TaskID | None = None
        self._lines: dict[tuple[str, int], TaskID] = {}

    def __enter__(self) -> Self:
        if not self._quiet and self._stream.isatty():
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._bars.start()
            self._all = self._bars.add_task(f"{len(self._done)} runs", total=self._ticks * len(self._done))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def told(self, arm: str, seed: int, ticks: int) -> None:
        """``ticks`` of this run are done. One that stopped early never says that it is done; its line stays."""
        run = (arm, seed)
        with self._lock:
            before, self._done[run] = self._done[run], ticks
            if self._bars is not None:
                self._draw(run)
            elif not self._quiet and before < self._ticks <= ticks:
                finished = sum(done >= self._ticks for done in self._done.values())
                print(f"{finished}/{len(self._done)} runs: {arm}, seed {seed}", file=self._stream, flush=True)

    def _draw(self, run: tuple[str, int]) -> None:
        assert self._bars is not None and self._all is not None
        if run not in self._lines:
            self._lines[run] = self._bars.add_task(f"  {run[0]}, seed {run[1]}", total=self._ticks)
        done = self._done[run]
        self._bars.update(self._lines[run], completed=done, visible=done < self._ticks)
        finished = sum(done >= self._ticks for done in self._done.values())
        self._bars.update(
            self._all, completed=sum(self._done.values()), description=f"{finished} of {len(self._done)} runs done"
        )
