"""A search on the terminal while it goes on: how much of the budget is spent, the best so far, and the gap."""

from __future__ import annotations

from typing import Self, TextIO

from rich.progress import BarColumn, TaskID, TextColumn

from planaria.observe.live.bars import BarDisplay
from planaria.planner.search import Budget, Found


class SearchProgress(BarDisplay):
    """A terminal gets a bar, anything else a line whenever a better plan is found by a hundredth."""

    def __init__(self, budget: Budget, bound_s: float, quiet: bool, stream: TextIO | None = None) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
        )
        super().__init__(*columns, quiet=quiet, stream=stream)
        self._budget, self._bound = budget, bound_s
        self._told = float("inf")
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if self._bar is not None:
            self._task = self._bar.add_task("compiling, starting", total=1.0)
        return self

    def told(self, found: Found) -> None:
        """The search has got this far."""
        text = f"best {found.step_s:.2f} s, gap {1 - self._bound / found.step_s:.1%}, {found.moves} moves"
        if self._bar is not None:
            assert self._task is not None
            spent = max(found.seconds / self._budget.seconds, found.moves / self._budget.moves)
            self._bar.update(self._task, completed=min(1.0, spent), description=text)
        elif found.step_s < 0.99 * self._told:
            self._told = found.step_s
            self._print(f"{found.seconds:8.1f} s  {text}")
