"""Map of the winning strategy over failure rates that were not raced and costs of redundant computation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from planaria.lab.compare.race_results import ArmScore, ComparisonResults
from planaria.lab.report.comparison_figures import colours
from planaria.lab.report.comparison_table import hours_form
from planaria.report.theme import INK, ON_DEEP, add_marks, escape_label, figure, text_colour_on


def fault_free_ratio(results: ComparisonResults, arm: ArmScore) -> float:
    """Return the arm's steps to the target over the fault-free arm's without failures: the cost of its routing.

    It comes from a fault-free arm with the same routes; without one it is 1.
    """
    for control_arm in results.arms:
        ratio = control_arm.spread("ratio")
        if not control_arm.faults and control_arm.routing == arm.routing and ratio is not None:
            return ratio[0]
    return 1.0


def hours_at(results: ComparisonResults, arm: ArmScore, hourly: float, step_s: float | None = None) -> float | None:
    """Return the hours to the target at another failure rate, linearly extrapolated, or None if the arm missed it.

    With r₀ the ratio without failures, r the one raced at rate h₀, D the hours that failures stopped the raced arm, U
    those of its uploads, m = log(1 − h) / log(1 − h₀) and T fault-free steps:
    hours(h) = T · step · (r₀ + (r − r₀) m) + D m + U. ``step_s`` replaces the arm's own step.
    """
    raced, ticks, hours = arm.spread("ratio"), arm.spread("ticks"), arm.spread("hours")
    if raced is None or ticks is None or hours is None:
        return None
    free = ticks[0] / raced[0]
    fault_free = fault_free_ratio(results, arm)
    failures_ratio = math.log1p(-hourly) / math.log1p(-results.hourly)
    step = arm.step_s if step_s is None else step_s
    uploads = statistics.fmean(run.saves for run in arm.runs) * arm.save_s / 3600
    down = hours[0] - ticks[0] * arm.step_s / 3600 - uploads
    return (
        free * step * (fault_free + (raced[0] - fault_free) * failures_ratio) / 3600 + down * failures_ratio + uploads
    )


Hours = Mapping[str, NDArray[np.float64]]
"""arm → its hours for every cost of redundancy (rows) and failure rate"""


def hours_of_arms(
    results: ComparisonResults, rates: Sequence[float], costs: Sequence[float], redundant: str | None
) -> Hours:
    """Return the hours of all contestants that reached the target.

    A cost is the step time of the arm ``redundant`` over that of the fault-free arm.
    """
    plain = results.arms[0].step_s

    def row(arm: ArmScore, step_s: float | None) -> list[float]:
        return [hours_at(results, arm, rate, step_s) or math.inf for rate in rates]

    reached = [arm for arm in results.contestants if arm.spread("hours") is not None]
    return {
        arm.name: np.array(
            [row(arm, plain * c) for c in costs] if arm.name == redundant else [row(arm, None)] * len(costs)
        )
        for arm in reached
    }


def winning_arms(hours: Hours) -> list[list[str]]:
    """Return the arm with the fewest hours for every cost of redundancy (rows) and failure rate."""
    return np.array(list(hours))[np.argmin(list(hours.values()), axis=0)].tolist() if hours else []


HOURLY = [float(rate) for rate in np.geomspace(0.01, 0.5, 71)]
COSTS = [float(cost) for cost in np.linspace(1.0, 2.0, 51)]
MIN_LABELLED_SHARE = 0.03
"""minimum share of the map of a region with its arm's name inside"""


def redundant_arm(results: ComparisonResults) -> str | None:
    """Return the first arm with failures in which workers also compute stages whose copies they hold."""
    return next((arm.name for arm in results.arms if arm.faults and arm.computes_copies), None)


def winners_figure(results: ComparisonResults) -> go.Figure:
    """Plot the regions in their winners' colours, and a star at the raced conditions."""
    redundant, shade = redundant_arm(results), colours(results)
    hours = hours_of_arms(results, HOURLY, COSTS, redundant)
    table = winning_arms(hours)
    names = sorted({name for row in table for name in row})
    fig = figure(430, x="probability that a stage fails within an hour", y="redundant step over plain step")
    percent, last, form = [100 * rate for rate in HOURLY], max(len(names) - 1, 1), hours_form(results)
    fig.add_heatmap(
        x=percent,
        y=COSTS,
        z=[[names.index(name) for name in row] for row in table],
        zmin=0,
        zmax=last,
        colorscale=[(index / last, shade[name]) for index, name in enumerate(names + names[-1:] * (len(names) == 1))],
        showscale=False,
        opacity=0.85,
        text=[
            [f"{escape_label(name)}: {hours[name][row, column]:{form}} hours" for column, name in enumerate(line)]
            for row, line in enumerate(table)
        ],
        hovertemplate="%{x:.1f} % an hour, redundant step × %{y:.2f}<br>%{text}<extra></extra>",
    )  # fmt: skip
    for name in names:
        _add_region(fig, table, hours, name, shade[name])
    _mark_raced_conditions(fig, results, redundant)
    tick_values = [1, 2, 5, 10, 20, 50]
    fig.update_xaxes(type="log", tickvals=tick_values, ticktext=[f"{tick} %" for tick in tick_values], showgrid=False)
    fig.update_xaxes(range=[math.log10(percent[0]), math.log10(percent[-1])])
    fig.update_yaxes(range=[COSTS[0], COSTS[-1]], showgrid=False, tickformat=".1f")
    return fig


def _add_region(fig: go.Figure, table: Sequence[Sequence[str]], hours: Hours, name: str, colour: str) -> None:
    """Draw the border of an arm's winning region, and its name at the centre."""
    won = {one for row in table for one in row}
    others = [rows for rival, rows in hours.items() if rival != name and rival in won]
    if others:
        # The lead is 0 on the border, so contour lines locate it between grid points.
        lead = np.log(np.min(others, axis=0) / hours[name])
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
    if len(cells) < MIN_LABELLED_SHARE * len(HOURLY) * len(COSTS):
        return
    row, column = cells[np.argmin(np.hypot(*(cells - cells.mean(axis=0)).T))]
    fig.add_annotation(
        x=math.log10(100 * HOURLY[column]), y=COSTS[row], text=f"<b>{escape_label(name)}</b>", showarrow=False,
        font={"color": text_colour_on(colour), "size": 14},
    )  # fmt: skip


def _mark_raced_conditions(fig: go.Figure, results: ComparisonResults, redundant: str | None) -> None:
    """Mark the raced conditions: the failure rate, and the cost of redundancy."""
    hourly_percent = 100 * results.hourly
    fig.add_vline(x=hourly_percent, line={"color": INK, "width": 1.2, "dash": "dot"})
    fig.add_annotation(
        x=math.log10(hourly_percent),
        y=1,
        yref="paper",
        yanchor="bottom",
        text="raced here",
        showarrow=False,
        font={"size": 12},
    )
    costs = [arm.step_s / results.arms[0].step_s for arm in results.arms if arm.name == redundant]
    star = {"symbol": "star", "size": 15, "color": ON_DEEP, "line": {"color": INK, "width": 1.5}}
    add_marks(fig, [(hourly_percent, cost) for cost in costs], star, "redundant step × %{y:.3f}, as raced")
