"""Style of the report's figures: palette, layout and point limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif'
INK, MUTED, RULE, PAPER = "#1d2733", "#66727f", "#e6eaee", "#ffffff"
BLUE, ORANGE, VIOLET, GREEN, RED, GREY, TEAL, PINK = (
    "#0072b2",
    "#e69f00",
    "#8a3a8f",
    "#009e73",
    "#d0451b",
    "#b9c1c9",
    "#56b4e9",
    "#cc79a7",
)
"""Okabe and Ito's palette, distinguishable with colour blindness"""
ON_DEEP, ON_BRIGHT = "#fefefe", "#14191f"
"""text on coloured bars, in light and dark mode"""
WASH = "#f1f4f7"
"""lower end of a heat map above zero"""
VEIL = "rgba(255,255,255,0.8)"
"""behind text on bars"""
SHADES = ("#cfe0ee", "#f3ddbd", "#d9d3eb", "#c9e6d9")
"""bars that contain text"""
WRITTEN, LINKED, DROPPED = "#d7ecec", "#d5ece3", "#eef0f2"
CARRIED, DELAYED = "#86b3da", "#ecb567"
"""upper end of a heat map with numbers in its cells"""
SERIES = (BLUE, ORANGE, GREEN, VIOLET, RED, TEAL, PINK, "#7a5c2e", "#8c9a2e", "#3b4a9b")
"""colours of curves in one figure, in order of use"""
DARK = {
    INK: "#e4e9ee", MUTED: "#9aa7b4", RULE: "#2d3740", PAPER: "#182027", GREY: "#5f6b77", WASH: "#222c35",
    VEIL: "rgba(24,32,39,0.8)", BLUE: "#3d9bd6", VIOLET: "#b35fa0", RED: "#ee6a3f", TEAL: "#86cbf3",
    "#7a5c2e": "#b08a4e", "#3b4a9b": "#7f8fdd", SHADES[0]: "#274863", SHADES[1]: "#5f4a24", SHADES[2]: "#463c66",
    SHADES[3]: "#20513f", WRITTEN: "#1f4444", LINKED: "#1f4637", DROPPED: "#27313a", CARRIED: "#2c638f",
    DELAYED: "#8a651f",
}  # fmt: skip
"""light-mode colour → dark-mode colour; others are the same in both"""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
MAX_POINTS = 4000
"""maximum points per curve; a screen is half as many pixels wide"""
TICKS = 10
"""largest range of whole numbers that are all labelled"""


def escape_label(text: str) -> str:
    """Escape text for Plotly's HTML."""
    return escape(text)


def figure(height: int, *, x: str = "", y: str = "", **layout: Any) -> go.Figure:
    """Return an empty figure in the report's style, ``height`` pixels high."""
    axis = {
        "gridcolor": RULE, "linecolor": RULE, "zeroline": False, "automargin": True,
        "tickfont": {"size": 12, "color": MUTED}, "ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)",
        "title": {"font": {"size": 12, "color": MUTED}, "standoff": 10},
    }  # fmt: skip
    style: dict[str, Any] = {
        "template": "none",
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 36, "b": 40},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": FONT, "size": 12.5, "color": INK},
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": RULE, "font": {"family": FONT, "size": 12.5, "color": INK}},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"size": 12, "color": MUTED}},
        "xaxis": _merge(axis, {"title": {"text": x}}),
        "yaxis": _merge(axis, {"title": {"text": y}}),
    }
    return go.Figure(layout=_merge(style, layout))  # update_layout would take ten times as long


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` updated with ``above``, recursively."""
    both = {key: (below[key], above[key]) for key in below.keys() & above.keys()}
    tables = {key: _merge(*pair) for key, pair in both.items() if all(isinstance(table, dict) for table in pair)}
    return {**below, **above, **tables}


def lane_axis(rows: list[str]) -> dict[str, Any]:
    """Return the layout of a y axis that shows ``rows`` from top to bottom."""
    return {
        "type": "category",
        "showgrid": False,
        "tickfont": {"color": INK},
        "categoryorder": "array",
        "categoryarray": rows[::-1],
        "range": [-0.6, len(rows) - 0.4],
    }


def integer_x_axis(fig: go.Figure, numbers: Iterable[float], *, bars: bool = False) -> go.Figure:
    """Fit the x axis to steps or rounds, with whole numbers as ticks.

    :param numbers: x values that are drawn; the figure is unchanged without any.
    :param bars: leave room for half a bar at either end.
    """
    xs = list(numbers)
    if not xs:
        return fig
    first, last = min(xs), max(xs)
    if first == last and not bars:
        last += 1
    room = 0.5 if bars else 0.015 * (last - first)
    fig.update_xaxes(range=[first - room, last + room])
    if last - first <= TICKS:
        fig.update_xaxes(dtick=1, tick0=0)
    return fig


def fit_share_axis(fig: go.Figure, shares: Iterable[float | None]) -> go.Figure:
    """Fit the y axis to shares: from 0 to the largest, at most 1."""
    max_points = max((amount for amount in shares if amount is not None), default=1.0)
    top = min(1.0, math.ceil(11 * max_points) / 10) or 1.0
    return fig.update_yaxes(range=[-0.02 * top, 1.02 * top], tickformat=".0%")


def stroke(index: int, count: int = 1) -> dict[str, Any]:
    """Return line and marker of the curve at ``index`` of ``count``.

    Earlier curves are wider, and dashes and symbols differ, so that coinciding curves are both visible.
    """
    wider = min(1.5, 4 / max(1, count - 1)) * (count - 1 - index)
    return {
        "line": {"color": SERIES[index % len(SERIES)], "width": 2 + wider, "dash": DASHES[index % len(DASHES)]},
        "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 6 + wider, "color": SERIES[index % len(SERIES)]},
    }


def text_colour_on(colour: str) -> str:
    """Return the text colour with more contrast on ``colour`` (WCAG 2.2, relative luminance)."""
    if colour == INK:  # light in dark mode, so its text changes too
        return PAPER
    brightness, bright, deep = luminance(colour), luminance(ON_DEEP), luminance(ON_BRIGHT)
    return ON_DEEP if (bright + 0.05) / (brightness + 0.05) > (brightness + 0.05) / (deep + 0.05) else ON_BRIGHT


def luminance(colour: str) -> float:
    """Return the relative luminance of an sRGB colour ``#rrggbb``, 0 to 1 (WCAG 2.2)."""
    shares = (channel / 255 for channel in hex_to_rgb(colour))
    linear = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return float(sum(weight * s for weight, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))


def symbol(kind: str, colour: str, size: int = 9) -> dict[str, Any]:
    """Return a marker with an outline."""
    return {"symbol": kind, "size": size, "color": colour, "line": {"color": PAPER, "width": 1}}


def add_curve(fig: go.Figure, points: Sequence[tuple[float, float | None]], hover: str, **style: Any) -> None:
    """Add (x, y) points to a figure as a scatter trace of this ``style``; ``hover`` is Plotly's template."""
    fig.add_scatter(
        x=[x for x, _ in points], y=[y for _, y in points], hovertemplate=f"{hover}<extra></extra>", **style
    )


def add_marks(
    fig: go.Figure, points: Sequence[tuple[Any, Any]], marker: Mapping[str, Any], hover: str, **style: Any
) -> None:
    """Add marks at (x, y), without a legend entry unless they have a name."""
    add_curve(fig, points, hover, mode="markers", marker=marker, showlegend="name" in style, **style)


def add_bars(
    fig: go.Figure,
    rows: Sequence[str],
    lengths: Sequence[float],
    marker: str | Mapping[str, Any],
    hover: str,
    **style: Any,
) -> None:
    """Add horizontal bars; ``marker`` is their colour or Plotly's marker, ``hover`` Plotly's template."""
    marker = {"color": marker} if isinstance(marker, str) else marker
    fig.add_bar(y=rows, x=lengths, orientation="h", marker=marker, hovertemplate=f"{hover}<extra></extra>", **style)


def add_heatmap(
    fig: go.Figure, x: Sequence[Any], y: Sequence[Any], z: Any, colour: str, hover: str, low: str = PAPER, **style: Any
) -> None:
    """Add a heatmap from ``low`` at 0 to ``colour`` at the maximum; ``hover`` is Plotly's template."""
    style = {"zmin": 0, "colorscale": [[0, low], [1, colour]], "hovertemplate": f"{hover}<extra></extra>", **style}
    fig.add_heatmap(x=x, y=y, z=z, **style)


def points_to_draw(ys: Sequence[float | None], max_points: int) -> list[int]:
    """Return the indices of the points to draw: all, or the lowest, highest and last of each stretch.

    Spikes and gaps are kept: so is one missing value per stretch that has any.
    """
    if len(ys) <= max_points:
        return list(range(len(ys)))
    stretch = -(-4 * len(ys) // max_points)
    kept: list[int] = []
    for start in range(0, len(ys), stretch):
        indices = range(start, min(start + stretch, len(ys)))
        present = [(y, index) for index in indices if (y := ys[index]) is not None]
        gaps = [index for index in indices if ys[index] is None]
        kept += sorted({indices[-1], *gaps[:1], *([min(present)[1], max(present)[1]] if present else [])})
    return kept
