"""The map of which strategy wins where, over the failure rate and the cost of redundant computation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from planaria.lab.compare.race_results import Compared
from planaria.lab.compare.winners import hours_at, winners
from planaria.lab.report.comparison_figures import colours
from planaria.report.theme import INK, ON_DEEP, figure, label, on

HOURLY = [float(rate) for rate in np.geomspace(0.01, 0.5, 71)]
COSTS = [float(cost) for cost in np.linspace(1.0, 2.0, 51)]
LABELLED = 0.03
"""of the map: regions as large as this have their arm's name in them"""


def redundant_arm(found: Compared) -> str | None:
    """The first arm in which workers compute their neighbours' stages too."""
    for arm in found.arms:
        chain = [name.strip() for name in arm.changes.get("recovery.strategy", "").split(",")]
        if arm.faults and "redundant" in chain and arm.changes.get("recovery.options.forward") != "False":
            return arm.name
    return None


def winners_figure(found: Compared) -> go.Figure:
    """Each region in its winner's colour, white lines between them, and a star where the comparison was run."""
    redundant, shade = redundant_arm(found), colours(found)
    table = winners(found, HOURLY, COSTS, redundant)
    names = sorted({name for row in table for name in row if name})
    fig = figure(430, x="probability that a stage fails within an hour", y="redundant step over plain step")
    percent, last = [100 * rate for rate in HOURLY], max(len(names) - 1, 1)
    hours = {name: _hours(found, name, name == redundant) for name in names}
    fig.add_heatmap(
        x=percent,
        y=COSTS,
        z=[[names.index(name) for name in row] for row in table] if names else [],
        zmin=0,
        zmax=last,
        colorscale=[(place / last, shade[name]) for place, name in enumerate(names + names[-1:] * (len(names) == 1))],
        showscale=False,
        opacity=0.85,
        text=[[f"{label(name)}: {hours[name][row][column]:.1f} hours" for column, name in enumerate(line)]
              for row, line in enumerate(table)],
        hovertemplate="%{x:.1f} % an hour, redundant step × %{y:.2f}<br>%{text}<extra></extra>",
    )  # fmt: skip
    for name in names:
        _add_region(fig, table, hours, name, shade[name])
    _mark_raced(fig, found, redundant)
    shown = [1, 2, 5, 10, 20, 50]
    fig.update_xaxes(type="log", tickvals=shown, ticktext=[f"{tick} %" for tick in shown], showgrid=False)
    fig.update_xaxes(range=[math.log10(percent[0]), math.log10(percent[-1])])
    fig.update_yaxes(range=[COSTS[0], COSTS[-1]], showgrid=False, tickformat=".1f")
    return fig


def _hours(found: Compared, name: str, redundant: bool) -> list[list[float]]:
    """An arm's hours for every cost of redundancy (a row) and rate."""
    (arm,) = (arm for arm in found.arms if arm.name == name)
    plain = found.arms[0].step_s

    def row(cost: float | None) -> list[float]:
        hours = (hours_at(found, arm, rate, None if cost is None else cost * plain) for rate in HOURLY)
        return [math.inf if number is None else number for number in hours]

    return [row(cost) for cost in COSTS] if redundant else [row(None)] * len(COSTS)


def _add_region(
    fig: go.Figure, table: Sequence[Sequence[str]], hours: Mapping[str, list[list[float]]], name: str, colour: str
) -> None:
    """The border of the region that an arm wins, and its name in its middle."""
    others = [np.array(rows) for other, rows in hours.items() if other != name]
    if others:
        # The lead is 0 exactly on the border, so that contour lines find it between the cells.
        lead = np.log(np.min(others, axis=0) / np.array(hours[name]))
        fig.add_contour(
            x=[100 * rate for rate in HOURLY],
            y=COSTS,
            z=lead.tolist(),
            contours={"coloring": "none", "start": 0, "end": 0, "size": 1},
            line={"color": ON_DEEP, "width": 2.5},
            showscale=False,
            showlegend=False,
            hoverinfo="skip",
        )
    cells = np.argwhere(np.array(table) == name)
    if len(cells) < LABELLED * len(HOURLY) * len(COSTS):
        return
    row, column = cells[np.argmin(np.hypot(*(cells - cells.mean(axis=0)).T))]
    fig.add_annotation(
        x=math.log10(100 * HOURLY[column]), y=COSTS[row], text=f"<b>{label(name)}</b>", showarrow=False,
        font={"color": on(colour), "size": 14},
    )  # fmt: skip


def _mark_raced(fig: go.Figure, found: Compared, redundant: str | None) -> None:
    """Where on the map the comparison was run: its rate, and what redundancy took in it."""
    at = 100 * found.hourly
    fig.add_vline(x=at, line={"color": INK, "width": 1.2, "dash": "dot"})
    fig.add_annotation(
        x=math.log10(at), y=1, yref="paper", yanchor="bottom", text="raced here", showarrow=False, font={"size": 12}
    )
    costs = [arm.step_s / found.arms[0].step_s for arm in found.arms if arm.name == redundant]
    fig.add_scatter(
        x=[at] * len(costs),
        y=costs,
        mode="markers",
        showlegend=False,
        marker={"symbol": "star", "size": 15, "color": ON_DEEP, "line": {"color": INK, "width": 1.5}},
        hovertemplate="redundant step × %{y:.3f}, as raced<extra></extra>",
    )
