"""The pictures of a drill: what the attacks achieved, and what became of accuracy, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from planaria.lab.report.spread_figures import add_band
from planaria.lab.trials.spread import Spread
from planaria.report.theme import BLUE, GREEN, INK, ORANGE, RED, SERIES, TEAL, VIOLET, figure, share, stroke, whole
from planaria.swarm.drill import Drill, Drilled
from planaria.swarm.records.outcome import Outcome, Point, total

COLOURS = (INK, RED, BLUE, ORANGE, GREEN, VIOLET, TEAL, *SERIES[6:])
"""the first arms are mostly a control, an attacked one and a defended one"""

Measure = Callable[[Sequence[Point]], float | None]
"""one number from the evaluations of all honest peers after the same round; None where there is none"""


def success_figure(found: Drill, kind: str) -> go.Figure:
    """An attack's success over rounds, one line an arm; for DoS the length of completions."""
    if kind == "dos":
        return _lines(found, "tokens a completion", lambda points: sum(p.tokens for p in points) / len(points))
    return _lines(found, "attack success", lambda points: total([p.watch[kind] for p in points]).rate)


def accuracy_figure(found: Drill) -> go.Figure:
    """Held-out accuracy over rounds, one line an arm."""
    return _lines(found, "accuracy", lambda points: total([p.accuracy for p in points]).rate)


def _lines(found: Drill, y: str, measure: Measure) -> go.Figure:
    fig = figure(420, x="round", y=y, hovermode="x unified")
    for place, arm in enumerate(found.arms):
        style, colour = stroke(place, len(found.arms)), {"color": COLOURS[place % len(COLOURS)]}
        _add(fig, arm, {key: value | colour for key, value in style.items()}, measure)
    lines = [trace for trace in fig.data if trace.fill is None]
    if "token" not in y:
        share(fig, [one for trace in fig.data for one in trace.y])
    return whole(fig, [number for trace in lines for number in trace.x])


def _add(fig: go.Figure, arm: Drilled, style: Mapping[str, Any], measure: Measure) -> None:
    curves = [_curve(run.outcome, measure) for run in arm.runs]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    spreads = [Spread.of([curve[number] for curve in curves]) for number in rounds]
    add_band(fig, arm.name, style, rounds, spreads, "lines+markers")


def _curve(outcome: Outcome, measure: Measure) -> dict[int, float]:
    rounds = sorted({point.round for peer in outcome.honest for point in peer.points})
    found = {}
    for number in rounds:
        value = measure([p for peer in outcome.honest for p in peer.points if p.round == number])
        if value is not None:
            found[number] = value
    return found
