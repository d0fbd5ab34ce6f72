"""The map of which strategy wins where, over the failure rate and the cost of redundant computation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from planaria.compare.results import Compared
from planaria.compare.winners import WinnerMap
from planaria.observe.theme import INK, figure, label

HOURLY = [float(rate) for rate in np.geomspace(0.01, 0.5, 71)]
COSTS = [float(cost) for cost in np.linspace(1.0, 2.0, 51)]
LABELLED = 0.03
"""of the map: regions as large as this have their arm's name in them"""


def winners_figure(found: Compared, winners: WinnerMap, shade: Mapping[str, str]) -> go.Figure:
    """Each region in its winner's colour, white lines between them, and where the comparison itself was run."""
    best = [[winners.winner(row, column) for column in range(len(winners.hourly))] for row in range(len(winners.costs))]
    fig = figure(430, x="probability that a stage fails within an hour", y="redundant step over plain step")
    percent = [100 * rate for rate in winners.hourly]
    last = max(len(winners.arms) - 1, 1)
    scale = [(place / last, shade[name]) for place, name in enumerate(winners.arms)]
    fig.add_heatmap(
        x=percent,
        y=list(winners.costs),
        z=best,
        zmin=0,
        zmax=last,
        colorscale=scale,
        showscale=False,
        opacity=0.85,
        text=[[_told(winners, row, column, arm) for column, arm in enumerate(line)] for row, line in enumerate(best)],
        hovertemplate="%{x:.1f} % an hour, redundant step × %{y:.2f}<br>%{text}<extra></extra>",
    )
    for arm, name in enumerate(winners.arms):
        _add_region(fig, winners, best, arm, name)
    _mark_measured(fig, found)
    shown = [1, 2, 5, 10, 20, 50]
    fig.update_xaxes(type="log", tickvals=shown, ticktext=[f"{tick} %" for tick in shown], showgrid=False)
    fig.update_xaxes(range=[np.log10(percent[0]), np.log10(percent[-1])])
    fig.update_yaxes(range=[winners.costs[0], winners.costs[-1]], showgrid=False, tickformat=".1f")
    return fig


def _told(winners: WinnerMap, row: int, column: int, arm: int | None) -> str:
    if arm is None:
        return "no arm reaches the target"
    return f"{label(winners.arms[arm])}: {winners.hours[arm][row][column]:.1f} hours"


def _add_region(fig: go.Figure, winners: WinnerMap, best: list[list[int | None]], arm: int, name: str) -> None:
    """The region's border, and its name in its middle."""
    cells = [(row, column) for row, line in enumerate(best) for column, won in enumerate(line) if won == arm]
    if not cells:
        return
    rows, columns = range(len(winners.costs)), range(len(winners.hourly))
    fig.add_contour(
        x=[100 * rate for rate in winners.hourly],
        y=list(winners.costs),
        z=[[winners.lead(arm, row, column) for column in columns] for row in rows],
        contours={"coloring": "none", "start": 0, "end": 0, "size": 1},
        line={"color": "white", "width": 2.5},
        showscale=False,
        hoverinfo="skip",
    )
    if len(cells) < LABELLED * len(rows) * len(columns):
        return
    middle = np.mean(cells, axis=0)
    row, column = min(cells, key=lambda cell: float(np.hypot(*(np.array(cell) - middle))))
    fig.add_annotation(
        x=float(np.log10(100 * winners.hourly[column])), y=winners.costs[row], text=f"<b>{label(name)}</b>",
        showarrow=False, font={"color": "white", "size": 14},
    )  # fmt: skip


def _mark_measured(fig: go.Figure, found: Compared) -> None:
    """Where on the map the comparison was run; without a redundant arm, the rate alone."""
    fig.add_vline(x=100 * found.hourly, line={"color": INK, "width": 1.2, "dash": "dot"})
    fig.add_annotation(
        x=float(np.log10(100 * found.hourly)), y=1, yref="paper", yanchor="bottom", text="raced here", showarrow=False,
        font={"color": INK, "size": 12},
    )  # fmt: skip
