"""Displays with a live bar on a terminal, lines elsewhere, and nothing if quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from planaria.report.phrases import format_number

if TYPE_CHECKING:  # which imports torch
    from planaria.planner.search import SearchBudget, SearchResult

MIN_INTERVAL_S = 5.0
"""minimum time between two lines of a count"""


@dataclass(frozen=True)
class _Parts:
    """A line of as many parts as fit, the most important first."""

    parts: Sequence[str]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, cell_len("  ".join(self.parts))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self.parts)
        while len(shown) > 1 and cell_len("  ".join(shown)) > options.max_width:
            shown.pop()
        yield Text("  ".join(shown), no_wrap=True, overflow="ellipsis")


class PartsColumn(ProgressColumn):
    """The task's field ``parts``, or its description, in the space the other columns leave."""

    max_refresh = None

    def __init__(self) -> None:
        super().__init__(Column(ratio=3))

    def render(self, task: Task) -> _Parts:
        return _Parts(task.fields.get("parts", (task.description,)))


def columns(count: str, first: bool = False) -> list[ProgressColumn]:
    """Return columns that fit any terminal of 40 characters or more: text, bar, ``count`` and the remaining time.

    Text and bar share the remaining width; ``first`` puts the count before them.
    """
    text, bar = PartsColumn(), BarColumn(bar_width=None, table_column=Column(ratio=1))
    counted = TextColumn(count, table_column=Column(no_wrap=True))
    left = TimeRemainingColumn(table_column=Column(no_wrap=True))
    return [counted, bar, text, left] if first else [text, bar, counted, left]


class BarDisplay:
    """Context manager that shows a bar if ``stream`` is a terminal."""

    def __init__(
        self,
        *shown: ProgressColumn,
        quiet: bool,
        stream: TextIO | None = None,
        transient: bool = False,
        task: tuple[str, float] | None = None,
    ) -> None:
        """
        :param transient: remove the bar at the end
        :param task: text and total of the one task, if there is only one
        """
        self._columns, self._task = shown, task
        self._quiet = quiet
        self._stream = stream or sys.stdout
        self._transient = transient
        self._bar: Progress | None = None
        """None without a terminal"""

    def __enter__(self) -> Self:
        if not self._quiet and self._stream.isatty():
            console = Console(file=self._stream)
            self._bar = Progress(*self._columns, console=console, transient=self._transient, expand=True)
            self._bar.start()
            if self._task is not None:
                self._bar.add_task(self._task[0], total=self._task[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _update(self, completed: float, text: str) -> bool:
        """Update the one task; return False without a bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=completed, description=text)
        return self._bar is not None

    def print_note(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            print(line, file=self._stream, flush=True)


class SearchProgress(BarDisplay):
    """Progress of a plan search. Without a terminal, prints each change of the plan's step of at least 1 %."""

    def __init__(self, budget: SearchBudget, bound_s: float | None, quiet: bool, stream: TextIO | None = None) -> None:
        task = "compiling, starting", 1.0
        super().__init__(*columns("{task.percentage:.0f} %"), quiet=quiet, stream=stream, task=task)
        self._budget, self._bound_s = budget, bound_s
        self._printed_s: float | None = None

    def update(self, progress: SearchResult) -> None:
        """Report the plan that the search would return now. Its step may grow if the objective is another."""
        gap = "" if self._bound_s is None or not progress.step_s else f"gap {1 - self._bound_s / progress.step_s:.1%}, "
        text = f"step {format_number(progress.step_s)} s, {gap}{progress.moves} moves"
        spent = max(progress.seconds / self._budget.seconds, progress.moves / self._budget.moves)
        printed = self._printed_s
        changed = printed is None or abs(progress.step_s - printed) > 0.01 * printed
        if not self._update(min(1.0, spent), text) and changed:
            self._printed_s = progress.step_s
            self.print_note(f"{progress.seconds:8.1f} s  {text}")


class SurveyProgress(BarDisplay):
    """Progress of link measurements. Without a terminal, prints each finished pair."""

    def __init__(self, pairs: int, quiet: bool, stream: TextIO | None = None) -> None:
        shown = columns("{task.completed:.0f}/{task.total:.0f} pairs")
        super().__init__(*shown, quiet=quiet, stream=stream, task=("starting nodes", pairs))
        self._pairs = pairs
        self._done = 0

    def update(self, text: str) -> None:
        """Report one more finished pair; ``text`` holds its result."""
        self._done += 1
        if not self._update(self._done, text):
            self.print_note(f"{self._done}/{self._pairs} pairs: {text}")


class CountProgress(BarDisplay):
    """Progress of work in parts. Without a terminal, prints every :data:`MIN_INTERVAL_S`."""

    def __init__(self, label: str, unit: str, total: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        """``stream`` defaults to standard error, since results go to standard output."""
        count = f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}"
        stream = stream or sys.stderr
        super().__init__(*columns(count), quiet=quiet, stream=stream, transient=True, task=(label, total))
        self._label, self._unit, self._total = label, unit, total
        self._done = 0
        self._printed = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more parts as done."""
        self._done += count
        if not self._update(self._done, self._label) and time.monotonic() - self._printed >= MIN_INTERVAL_S:
            self._printed = time.monotonic()
            self.print_note(f"{self._label}: {self._done}/{self._total} {self._unit}")


class JobsProgress(BarDisplay):
    """Implements ``trials.jobs.Watcher``: bars and lines on a terminal, only lines elsewhere."""

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        count = "{task.completed:.0f}/{task.total:.0f} steps"
        super().__init__(*columns(count), quiet=quiet, stream=stream, transient=True)
        self._tasks: list[TaskID] = []

    def on_progress(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
        """Show progress: ``reached`` of all ``steps``, and (reached, steps) of each job in ``running``."""
        if self._bar is None:
            return
        lines = {title: (reached, steps)} | {f"  {name}": counts for name, counts in running.items()}
        for index in range(len(lines), len(self._tasks)):
            self._bar.update(self._tasks[index], visible=False)
        for index, (description, (completed, total)) in enumerate(lines.items()):
            if index == len(self._tasks):
                self._tasks.append(self._bar.add_task(description))
            self._bar.update(
                self._tasks[index], description=description, completed=completed, total=total, visible=True
            )
