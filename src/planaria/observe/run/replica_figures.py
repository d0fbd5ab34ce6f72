"""The figures of the report on replicas: curves, waits, and who met whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from planaria.observe.theme import BLUE, GREEN, GREY, INK, ORANGE, VIOLET, add_curve, figure, symbol

ROUNDS_DRAWN = 400

Points = Sequence[tuple[float, float | None]]


def curves(replicas: Mapping[int, Points], together: Points, name: str) -> go.Figure:
    """Validation loss in nats over steps: a thin line for each replica, a thick one, of this ``name``, for all."""
    fig = figure(300, x="step", y="validation loss, nats per token")
    for place, (replica, whole) in enumerate(sorted(replicas.items())):
        hover, line = f"replica {replica}, step %{{x}}: %{{y:.4f}}", {"color": GREY, "width": 1}
        add_curve(fig, whole, hover, name="replicas", showlegend=not place, mode="lines", line=line)
    line = {"color": BLUE, "width": 2}
    add_curve(fig, together, f"{name}, step %{{x}}: %{{y:.4f}}", name=name, mode="lines+markers", line=line)
    fig.update_layout(showlegend=True)
    return fig


def spread(points: Points) -> go.Figure:
    """RMS distance of weights from their mean over steps."""
    fig = figure(260, x="step", y="spread between replicas")
    add_curve(fig, points, "step %{x}: %{y:.3g}", mode="lines+markers", line={"color": GREEN, "width": 2})
    return fig


def heat(table: Sequence[Sequence[int | None]], alone: bool = False) -> go.Figure:
    """How often each replica met each other, and itself, if that counts how often it was ``alone``."""
    count = len(table)
    fig = figure(120 + 26 * count, x="replica", y="replica")
    words = [[f"replicas {b} and {a} met {table[a][b]} times" for b in range(count)] for a in range(count)]
    for replica in range(count) if alone else ():
        words[replica][replica] = f"replica {replica} was alone {table[replica][replica]} times"
    fig.add_heatmap(
        z=table,
        colorscale=[[0, "#ffffff"], [1, BLUE]],
        zmin=0,
        customdata=words,
        hovertemplate="%{customdata}<extra></extra>",
        text=[["" if cell is None else str(cell) for cell in row] for row in table],
        texttemplate="%{text}",
        showscale=False,
    )
    fig.update_xaxes(dtick=1)
    fig.update_yaxes(dtick=1, autorange="reversed")
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
    return fig
