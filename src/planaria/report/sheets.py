"""CSV export of figures and tables."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from html import unescape
from io import StringIO
from typing import Any

import plotly.graph_objects as go

Cell = str | int | float | None
EXTRAS = ("begins at", "least", "most", "note")
"""optional columns"""


def as_csv(rows: Iterable[Sequence[Cell]]) -> str:
    """Return rows as CSV (RFC 4180). Text that a spreadsheet would evaluate as a formula is quoted."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerows([_escape_formula(cell) for cell in row] for row in rows)
    return out.getvalue()


def _escape_formula(cell: Cell) -> Cell:
    signed = isinstance(cell, str) and re.fullmatch(r"[+-][-+\d.,e%\[\] …]*", cell)
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") and not signed else cell


def rows_of(fig: go.Figure) -> list[list[Cell]]:
    """Return a header of the axes' titles and one row per point, bar or cell; decoration is omitted."""
    layout = fig.layout
    points = [
        point for trace in fig.data if trace.hoverinfo != "skip" or trace.type == "bar" for point in _points(trace)
    ]
    names = (_tick_labels(layout.xaxis), _tick_labels(layout.yaxis))
    x, y = (
        _strip_html(axis.title.text) or default for axis, default in ((layout.xaxis, "column"), (layout.yaxis, "row"))
    )
    cell = "value" if any(trace.type == "heatmap" for trace in fig.data) else None
    extras = [name for name in EXTRAS if any(name in point for point in points)]
    head: list[Cell] = ["series", x, y if y != x else f"{y}, down", *([cell] if cell else []), *extras]
    body = []
    for point in points:
        across, down = (name.get(point[key], point[key]) for name, key in zip(names, ("x", "y"), strict=True))
        body.append([point["series"], across, down, *([point.get("value")] if cell else []), *map(point.get, extras)])
    return [head, *body]


def _points(trace: Any) -> Iterator[dict[str, Any]]:
    if trace.type == "contour":
        return
    name = _strip_html(trace.name or "")
    if trace.type == "heatmap":
        yield from _cells(trace, name)
        return
    xs, ys = list(trace.x if trace.x is not None else ()), list(trace.y if trace.y is not None else ())
    if isinstance(trace.meta, dict):  # positions on an axis that represent other numbers
        xs = list(trace.meta["x"])
    notes = next((n for n in (trace.customdata, trace.text) if n is not None and not isinstance(n, str)), ())
    bases = trace.base if trace.type == "bar" and trace.base is not None else ()
    least, most = _whiskers(trace)
    for index, (x, y) in enumerate(zip(xs, ys, strict=False)):
        point = {"series": name, "x": x, "y": y}
        note = notes[index] if index < len(notes) else None
        if isinstance(note, Sequence) and not isinstance(note, str):  # bounds of a band around a line
            point["least"], point["most"] = note
        elif note not in (None, ""):
            point["note"] = _strip_html(str(note))
        for key, column in (("begins at", bases), ("least", least), ("most", most)):
            if index < len(column):
                point[key] = column[index]
        yield point


def _cells(trace: Any, name: str) -> Iterator[dict[str, Any]]:
    for row, numbers in enumerate(trace.z):
        for column, value in enumerate(numbers):
            if value is not None:
                x = trace.x[column] if trace.x is not None else column
                y = trace.y[row] if trace.y is not None else row
                yield {"series": name, "x": x, "y": y, "value": value}


def _whiskers(trace: Any) -> tuple[list[float], list[float]]:
    """Return the lower and upper ends of a trace's error bars."""
    for positions, bars in ((trace.x, trace.error_x), (trace.y, trace.error_y)):
        if bars.array is not None:
            below = bars.array if bars.arrayminus is None else bars.arrayminus
            return [v - b for v, b in zip(positions, below, strict=True)], [
                v + a for v, a in zip(positions, bars.array, strict=True)
            ]
    return [], []


def _tick_labels(axis: Any) -> dict[Any, str]:
    if axis.tickvals is None or axis.ticktext is None:
        return {}
    return {value: _strip_html(text) for value, text in zip(axis.tickvals, axis.ticktext, strict=True)}


def _strip_html(text: str | None) -> str:
    return unescape(re.sub(r"<[^>]+>", "", re.sub(r"<br ?/?>", "; ", text or "")))
