"""How results are handed to a program: tables with pandas where it is installed, and figures by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import plotly.graph_objects as go

from planaria.common.errors import UserError, nearest

Table = Any
"""a ``pandas.DataFrame``, or ``list[dict[str, object]]`` where pandas is not installed"""


def tabulated(rows: list[dict[str, object]]) -> Table:
    """Rows, all with the same keys, as a data frame if there is pandas."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def figure_of(figures: Mapping[str, go.Figure], name: str) -> go.Figure:
    """The figure of that name; UserError naming the nearest one when there is none."""
    if name not in figures:
        raise UserError(f"{name}: the report has no such figure; {nearest(name, figures)}")
    return figures[name]
