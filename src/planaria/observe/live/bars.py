"""What displays with a live bar have in common: a terminal gets the bar, anything else lines, quiet ones nothing."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class BarDisplay:
    """Shows a bar, while it is entered, where ``stream`` is a terminal."""

    def __init__(
        self, *columns: ProgressColumn, quiet: bool, stream: TextIO | None = None, transient: bool = False
    ) -> None:
        """``transient``: the bar is wiped away at the end."""
        self._columns, self._quiet, self._stream, self._transient = columns, quiet, stream or sys.stdout, transient
        self._bar: Progress | None = None
        """there while a terminal is drawn on"""

    def __enter__(self) -> Self:
        if not self._quiet and self._stream.isatty():
            console = Console(file=self._stream)
            self._bar = Progress(*self._columns, console=console, transient=self._transient)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        """A line above the bar, or where the bar would be."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            print(line, file=self._stream, flush=True)
