"""The figures of the report on replicas: curves, waits, and who met whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from planaria.report.theme import (
    CARRIED,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    VIOLET,
    add_curve,
    figure,
    lanes,
    stroke,
    symbol,
    whole,
)
from planaria.report.words import counted

ROUNDS_DRAWN = 400

Points = Sequence[tuple[float, float | None]]


def curves(replicas: Mapping[int, Points], together: Points, name: str) -> go.Figure:
    """Validation loss in nats over steps: a line for each replica, a thick one beneath, of this ``name``, for all."""
    fig = figure(320, x="step", y="validation loss, nats per token")
    line = {"color": GREY, "width": 9}
    add_curve(fig, together, f"{name}, step %{{x}}: %{{y:.4f}}", name=name, mode="lines", line=line)
    for place, (replica, points) in enumerate(sorted(replicas.items())):
        style = stroke(place, len(replicas))
        add_curve(
            fig, points, f"replica {replica}, step %{{x}}: %{{y:.4f}}", name=f"replica {replica}", mode="lines+markers",
            **style,
        )  # fmt: skip
    fig.update_layout(showlegend=True)
    return whole(fig, [step for points in (together, *replicas.values()) for step, _ in points])


def spread(points: Points) -> go.Figure:
    """RMS distance of weights from their mean over steps."""
    fig = figure(260, x="step", y="RMS distance of weights")
    style = {"line": {"color": GREEN, "width": 2}, "marker": {"size": 5}}
    add_curve(fig, points, "step %{x}: %{y:.3g}", mode="lines+markers", **style)
    fig.update_yaxes(rangemode="tozero")
    return whole(fig, [step for step, _ in points])


def heat(table: Sequence[Sequence[int | None]], alone: bool = False) -> go.Figure:
    """How often each replica met each other, and itself, if that counts how often it was ``alone``."""
    count = len(table)
    fig = figure(120 + 26 * count)
    words = [
        [f"replicas {b} and {a} met {counted(table[a][b] or 0, 'time')}" for b in range(count)] for a in range(count)
    ]
    for replica in range(count) if alone else ():
        words[replica][replica] = f"replica {replica} was alone {counted(table[replica][replica] or 0, 'time')}"
    names = [f"replica {replica}" for replica in range(count)]
    fig.add_heatmap(
        x=names,
        y=names,
        z=table,
        colorscale=[[0, PAPER], [1, CARRIED]],
        xgap=1,
        ygap=1,
        zmin=0,
        customdata=words,
        hovertemplate="%{customdata}<extra></extra>",
        text=[["" if cell is None else str(cell) for cell in row] for row in table],
        texttemplate="%{text}",
        showscale=False,
    )
    fig.update_xaxes(showgrid=False)
    fig.update_layout(yaxis=lanes(names))
    return fig


def waits(rounds: Mapping[int, tuple[float, float, float, int]]) -> go.Figure:
    """Milliseconds that a round was waited for: (for others, for offers, longest of a replica, which), in seconds.

    Of more rounds than a screen can show, those in which a replica waited longest.
    """
    longest = set(sorted(rounds, key=lambda number: rounds[number][2])[-ROUNDS_DRAWN:])
    rounds = {number: parts for number, parts in rounds.items() if number in longest}
    fig = figure(280, x="round", y="milliseconds", barmode="stack", bargap=0.25, showlegend=True)
    numbers, told = list(rounds), list(rounds.values())
    for place, (name, colour) in enumerate((("for others to come", ORANGE), ("for what they said", VIOLET))):
        fig.add_bar(
            x=numbers,
            y=[1000 * parts[place] for parts in told],
            name=name,
            marker={"color": colour},
            hovertemplate=f"round %{{x}}, {name}: %{{y:.1f}} ms, mean<extra></extra>",
        )
    fig.add_scatter(
        x=numbers,
        y=[1000 * parts[2] for parts in told],
        name="who waited longest",
        mode="markers",
        marker=symbol("diamond", INK, 8),
        customdata=[parts[3] for parts in told],
        hovertemplate="round %{x}: replica %{customdata} waited %{y:.1f} ms<extra></extra>",
    )
    fig.update_layout(legend={"traceorder": "normal"})
    return whole(fig, numbers, bars=True)
