"""How the report's figures look: one palette, one layout, and no more points of a curve than a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, TypeVar

import plotly.graph_objects as go

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif'
INK, MUTED, RULE, PAPER = "#1d2733", "#66727f", "#e6eaee", "#ffffff"
BLUE, ORANGE, VIOLET, GREEN, RED, GREY, TEAL, PINK = (
    "#3f7fb5",
    "#e29a3d",
    "#7c69b3",
    "#2f9a6c",
    "#c73a4b",
    "#b9c1c9",
    "#4aa3a2",
    "#d16fa6",
)
SERIES = (BLUE, ORANGE, GREEN, VIOLET, RED, TEAL, "#9c6b3f", PINK, "#8c9a2e", "#5661c9")
"""of lines, peers or arms side by side"""
MOST = 4000
"""points of a curve; a screen is half as many pixels wide"""

Point = TypeVar("Point", bound=tuple[float, float | None])


def label(text: str) -> str:
    """Text that comes from outside, made safe for Plotly's small HTML."""
    return escape(text)


def figure(height: int, *, x: str = "", y: str = "", **layout: Any) -> go.Figure:
    """An empty figure in the report's style, ``height`` pixels high."""
    axis = {
        "gridcolor": RULE, "linecolor": RULE, "zeroline": False, "automargin": True,
        "tickfont": {"size": 12, "color": MUTED}, "ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)",
        "title": {"font": {"size": 12, "color": MUTED}, "standoff": 10},
    }  # fmt: skip
    fig = go.Figure()
    fig.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 16, "t": 36, "b": 40},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        font={"family": FONT, "size": 12.5, "color": INK},
        hoverlabel={"bgcolor": PAPER, "bordercolor": RULE, "font": {"family": FONT, "size": 12.5, "color": INK}},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"size": 12, "color": MUTED}},
        xaxis=axis,
        yaxis=axis,
    )
    fig.update_layout(**layout)
    fig.update_xaxes(title_text=x)
    fig.update_yaxes(title_text=y)
    return fig


def lanes(rows: list[str]) -> dict[str, Any]:
    """Layout of a y axis that shows ``rows`` from top to bottom."""
    return {
        "type": "category",
        "showgrid": False,
        "tickfont": {"color": INK},
        "categoryorder": "array",
        "categoryarray": rows[::-1],
        "range": [-0.6, len(rows) - 0.4],
    }


def symbol(kind: str, colour: str, size: int = 9) -> dict[str, Any]:
    """A marker that stands out from lines and bars."""
    return {"symbol": kind, "size": size, "color": colour, "line": {"color": "white", "width": 1}}


def add_curve(fig: go.Figure, points: Sequence[tuple[float, float | None]], hover: str, **style: Any) -> None:
    """Add (x, y) points to a figure, thinned, as a scatter trace of this ``style``; ``hover`` is Plotly's template."""
    few = thinned(points)
    fig.add_scatter(x=[x for x, _ in few], y=[y for _, y in few], hovertemplate=f"{hover}<extra></extra>", **style)


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """All (x, y) points if there are at most so many; else of each stretch the lowest, the highest and the last.

    So no spike is lost, and no gap: of a stretch with points that have no y, one of these is kept.
    """
    if len(points) <= most:
        return list(points)
    stretch = -(-4 * len(points) // most)
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        own = range(start, min(start + stretch, len(points)))
        known = [(y, place) for place in own if (y := points[place][1]) is not None]
        gaps = [place for place in own if points[place][1] is None]
        places = {own[-1], *gaps[:1], *([min(known)[1], max(known)[1]] if known else [])}
        kept += [points[place] for place in sorted(places)]
    return kept
