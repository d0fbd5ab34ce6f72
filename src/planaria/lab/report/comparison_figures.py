"""Figures of a comparison: loss over hours, hours to the target, price and harm, and the failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from planaria.lab.compare.race_results import ArmScore, ComparisonResults, SeedTrace, smoothed_losses
from planaria.lab.report.comparison_table import hours_form
from planaria.report import theme
from planaria.report.phrases import format_count, format_number
from planaria.report.spread_figures import add_band, error_bars
from planaria.report.theme import escape_label, figure, integer_x_axis, lane_axis, stroke, text_colour_on
from planaria.trials.spread import Spread

Over = Literal["hours", "steps"]
"""unit of a loss curve's axis"""
GRID_POINTS = 240
"""points of a curve"""
BEGINNING = 0.12
"""share of the fault-free arm's hours whose losses are above the figure"""
ROW = 30
"""pixels of one row of bars"""


def colours(results: ComparisonResults) -> Mapping[str, str]:
    """Return each arm's colour, the same in all figures."""
    names = [arm.name for arm in results.arms[1:]]
    return {
        results.arms[0].name: theme.INK,
        **{name: theme.SERIES[index % len(theme.SERIES)] for index, name in enumerate(names)},
    }


def _line_styles(results: ComparisonResults) -> Mapping[str, Mapping[str, Any]]:
    """Return each arm's line style; dash and width distinguish curves that coincide."""
    shade, count = colours(results), len(results.arms)
    return {
        arm.name: stroke(index, count)["line"] | {"color": shade[arm.name]} for index, arm in enumerate(results.arms)
    }


def loss_figure(results: ComparisonResults, over: Over = "hours") -> go.Figure:
    """Plot smoothed loss over hours or executed steps: mean over seeds, and a band from minimum to maximum."""
    fig = figure(460, x=over, y="smoothed validation loss, nats per token", hovermode="x unified")
    lowest, strokes = math.inf, _line_styles(results)
    for arm in results.arms:
        drawn = bands(arm, over)
        if drawn is None:
            continue
        hours, spreads = drawn
        lowest = min(lowest, *(band.least for band in spreads))
        add_band(fig, arm.name, {"line": strokes[arm.name]}, hours, spreads)
    targets = [run.target for run in results.arms[0].runs]
    target = sum(targets) / len(targets)
    fig.add_hline(
        y=target,
        line={"color": theme.MUTED, "width": 1.5, "dash": "dash"},
        annotation={"text": f"target {target:.3f}", "font": {"color": theme.MUTED, "size": 12}},
        annotation_position="bottom left",
    )
    free = bands(results.arms[0], over)
    if free is not None:
        top = free[1][int(BEGINNING * GRID_POINTS)].most
        fig.update_yaxes(range=[lowest - 0.04 * (top - lowest), top])
    fig.update_xaxes(rangemode="tozero", hoverformat=hours_form(results) if over == "hours" else ".0f")
    return fig


def bands(arm: ArmScore, over: Over) -> tuple[list[float], list[Spread]] | None:
    """Return hours or steps and the loss over seeds on a common grid, over the range of all seeds, or None if empty."""
    curves = arm.curves if over == "hours" else [smoothed_losses(course.points) for course in arm.courses]
    if not curves or not all(curves):
        return None
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if first >= last:
        return None
    grid = np.linspace(first, last, GRID_POINTS)
    drawn = np.array([np.interp(grid, *np.transpose(curve)) for curve in curves])
    return grid.tolist(), [Spread.of(losses) for losses in drawn.T.tolist()]


def hours_figure(results: ComparisonResults, measure: str = "hours", unit: str = "hours") -> go.Figure:
    """Plot hours to the target: mean over seeds as a bar, minimum to maximum as a whisker; dotted: without failures.

    ``measure`` and ``unit`` select another number of a run.
    """
    arms, shade = results.ranked(), colours(results)
    rows = [escape_label(arm.name) for arm in arms]
    fig = figure(80 + ROW * len(rows), x=f"{unit} to target", bargap=0.3, showlegend=False)
    spreads = {escape_label(arm.name): spread for arm in arms if (spread := arm.spread(measure)) is not None}
    means = [mean for mean, _, _ in spreads.values()]
    fig.add_bar(
        y=list(spreads),
        x=means,
        orientation="h",
        marker={"color": [shade[arm.name] for arm in arms if escape_label(arm.name) in spreads]},
        error_x=error_bars(list(spreads.values()), color=theme.INK, width=5),
        text=[
            f"{format_number(mean)} {'h' if measure == 'hours' else unit}"
            + (f" · × {mean / means[0]:.3f}" if means[0] else "")
            for mean in means
        ],
        textposition="inside",
        insidetextanchor="start",
        textfont={"color": [text_colour_on(shade[arm.name]) for arm in arms if escape_label(arm.name) in spreads]},
        hovertemplate=f"%{{y}}: %{{x:.2f}} {unit}<extra></extra>",
    )
    for arm in arms:
        if arm.missed:
            text = f"not reached in {arm.missed} of {format_count(len(arm.runs), 'seed')}"
            positions = {"x": 0, "y": escape_label(arm.name), "xanchor": "left", "xshift": 4, "showarrow": False}
            fig.add_annotation(text=text, font={"color": theme.RED}, **positions)
    if means:
        fig.add_vline(x=means[0], line={"color": theme.INK, "width": 1.2, "dash": "dot"})
    fig.update_xaxes(rangemode="tozero")
    fig.update_layout(yaxis=lane_axis(rows))
    return fig


def price_figure(results: ComparisonResults) -> go.Figure:
    """Plot an arm's price without failures (traffic across, memory as area) against their harm (up).

    The dashed line is the Pareto front of the arms with failures.
    """
    shade = colours(results)
    arms = [arm for arm in results.arms if arm.spread("ratio") is not None]
    positions, ticks = _log_positions([100 * arm.traffic for arm in arms])
    spreads = [Spread(*(100 * (ratio - 1) for ratio in arm.spread("ratio") or ())) for arm in arms]
    areas = [max(arm.memory, 0.0) for arm in arms]  # arms with fewer replicas have less memory than the reference
    largest = max(areas) or 1.0
    fig = figure(480, x="extra traffic in a step, % of activations and gradients", y="extra steps to target, %")
    for arm, position, extra, area in zip(arms, positions, spreads, areas, strict=True):
        fig.add_scatter(
            x=[position],
            y=[extra.mean],
            meta={"x": [100 * arm.traffic]},
            name=escape_label(arm.name),
            mode="markers",
            showlegend=False,
            marker={"size": 10 + 28 * math.sqrt(area / largest), "color": shade[arm.name], "opacity": 0.85},
            error_y=error_bars([extra], thickness=1.2, width=4, color=shade[arm.name]),
            hovertemplate=f"<b>{escape_label(arm.name)}</b><br>{100 * arm.traffic:.2f} % traffic, "
            f"{100 * arm.memory:.0f} % memory<br>%{{y:.2f}} % more steps, "
            f"{extra.least:.2f} to {extra.most:.2f}<extra></extra>",
        )  # fmt: skip
    marks = [(position, mean) for position, (mean, _, _) in zip(positions, spreads, strict=True)]
    best = pareto_front(
        [mark if arm.faults and not arm.control else None for arm, mark in zip(arms, marks, strict=True)]
    )
    fig.add_scatter(
        x=[marks[i][0] for i in best], y=[marks[i][1] for i in best], mode="lines", showlegend=False, hoverinfo="skip",
        line={"shape": "hv", "color": theme.MUTED, "width": 1.5, "dash": "dash"},
    )  # fmt: skip
    low, high = min(least for _, least, _ in spreads), max(most for _, _, most in spreads)
    pad = 0.08 * max(high - low, 1.0)
    fig.add_hline(y=0, line={"color": theme.MUTED, "width": 1, "dash": "dot"}, layer="below")
    fig.update_yaxes(range=[low - pad, high + pad])
    right = max(positions) + 0.45 * max(max(positions) - min(positions), 1.0)
    fig.update_xaxes(tickvals=list(ticks), ticktext=list(ticks.values()), range=[min(positions) - 0.3, right])
    _add_names(fig, arms, positions, [mean for mean, _, _ in spreads], (right - min(positions), high - low + 2 * pad))
    return fig


def pareto_front(points: Sequence[tuple[float, float] | None]) -> list[int]:
    """Return the Pareto front of (price, harm), by price."""
    front: list[int] = []
    least = math.inf
    for (_, harm), i in sorted((point, i) for i, point in enumerate(points) if point is not None):
        if harm < least:
            least = harm
            front.append(i)
    return front


def _log_positions(shares: Sequence[float]) -> tuple[list[float], Mapping[float, str]]:
    """Return positions of ``shares`` ≥ 0 on a logarithmic axis with 0 at its left, and the axis's ticks."""
    logs = [math.log10(share) for share in shares if share > 0]
    if not logs:
        return [0.0] * len(shares), {0.0: "0"}
    first, last = math.floor(min(logs)), math.ceil(max(logs))
    zero = first - 1.0
    ticks = {zero: "0"} | {float(power): f"{10.0**power:g} %" for power in range(first, last + 1)}
    return [math.log10(share) if share > 0 else zero for share in shares], ticks


def _add_names(
    fig: go.Figure, arms: Sequence[ArmScore], x: Sequence[float], y: Sequence[float], spans: tuple[float, float]
) -> None:
    """Annotate each mark with its arm's name, moved up where it would overlap another."""
    placed: list[tuple[float, float]] = []
    for index in sorted(range(len(arms)), key=lambda i: y[i]):
        height = y[index]
        for at, other_height in placed:
            if abs(at - x[index]) < 0.3 * spans[0]:
                height = max(height, other_height + 0.05 * spans[1])
        placed.append((x[index], height))
        memory = f" · {100 * arms[index].memory:.0f} % memory" if arms[index].memory else ""
        fig.add_annotation(
            x=x[index], y=y[index], ax=30, ay=-(height - y[index]) / spans[1] * 400, xanchor="left", standoff=4,
            text=escape_label(arms[index].name) + f'<span style="color:{theme.MUTED}">{memory}</span>',
            arrowcolor=theme.RULE, arrowhead=0, arrowwidth=1, font={"size": 12.5}, bgcolor=theme.VEIL, borderpad=1,
        )  # fmt: skip


def failures_figure(results: ComparisonResults, failures: SeedTrace) -> go.Figure:
    """Plot one seed's trace: the stage lost before each step."""
    stages = sorted({*range(1, results.stages + 1), *(stage for _, stage in failures.faults)})
    rows = [f"stage {stage}" if stage else "ends" for stage in stages]
    fig = figure(64 + 17 * len(rows), x="step", margin={"l": 8, "r": 16, "t": 8, "b": 40}, showlegend=False)
    points = [(step, f"stage {stage}" if stage else "ends") for step, stage in failures.faults]
    marker = {"symbol": "line-ns", "size": 11, "line": {"color": theme.RED, "width": 2}}
    theme.add_marks(fig, points, marker, "%{y}, step %{x}")
    integer_x_axis(fig, (0, results.steps))
    fig.update_layout(yaxis={**lane_axis(rows), "showgrid": True})
    return fig
