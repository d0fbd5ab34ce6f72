"""Tables for the terminal and for pages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from planaria.report import page

WIDE = 200
"""characters per line without a terminal"""


class Table(NamedTuple):
    """A table of text cells; columns from ``numbers_from`` on are numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers_from: int = 1

    def html(self, name: str) -> str:
        """Return the table as part of a page, without its title; ``name`` is its name in CSV exports."""
        return page.table(name, self.head, self.rows, self.numbers_from)


def show(tables: Iterable[Table]) -> Console:
    """Print tables; return the console for further lines of the same width."""
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for table in tables:
        drawn = RichTable(title=Text(table.title), title_justify="left", box=box.SIMPLE)
        for index, column in enumerate(table.head):
            drawn.add_column(column, justify="right" if index >= table.numbers_from else "left")
        for row in table.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        console.print(drawn)
    return console
