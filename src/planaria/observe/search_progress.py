"""A search on the terminal while it goes on: how much of the budget is spent, the best so far, and the gap."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from planaria.planner.search import Budget, Found


class SearchProgress:
    """A terminal gets a bar, anything else a line whenever a better plan is found by a hundredth."""

    def __init__(self, budget: Budget, bound_s: float, quiet: bool, stream: TextIO | None = None) -> None:
        self._budget, self._bound, self._quiet, self._stream = budget, bound_s, quiet, stream or sys.stdout
        self._told = float("inf")
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._stream.isatty():
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:.0f} %"),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._bar.start()
            self._task = self._bar.add_task("compiling, starting", total=1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, found: Found) -> None:
        """The search has got this far."""
        text = f"best {found.step_s:.2f} s, gap {1 - self._bound / found.step_s:.1%}, {found.moves} moves"
        if self._bar is not None:
            assert self._task is not None
            spent = max(found.seconds / self._budget.seconds, found.moves / self._budget.moves)
            self._bar.update(self._task, completed=min(1.0, spent), description=text)
        elif not self._quiet and found.step_s < 0.99 * self._told:
            self._told = found.step_s
            print(f"{found.seconds:8.1f} s  {text}", file=self._stream, flush=True)
