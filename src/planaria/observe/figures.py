"""The report's curves and bars: loss, recovery times, bytes per edge, and who held which stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import plotly.graph_objects as go

from planaria.observe.holdings import Holding
from planaria.observe.logs import Metric, RunRecord
from planaria.observe.narrate import SIGNS, Line
from planaria.observe.places import places_of
from planaria.observe.recoveries import RecoveryTiming
from planaria.observe.theme import BLUE, GREEN, GREY, INK, ORANGE, RED, TEAL, VIOLET, figure, label, lanes

ROW = 30
"""pixels of one row of bars"""


def loss_figure(metrics: Sequence[Metric], story: Sequence[tuple[float, Line]]) -> go.Figure:
    """Training and validation loss over steps; steps that were undone in grey; a line where a worker was hit."""
    fig = figure(400, x="step", y="loss, nats per token", hovermode="closest")
    kept, undone = _last_of_each_step([m for m in metrics if m.loss is not None])
    if undone:
        fig.add_scatter(
            x=[m.step for m in undone],
            y=[m.loss for m in undone],
            name="undone",
            mode="markers",
            marker={"color": GREY, "size": 4},
            hovertemplate="step %{x}: %{y:.4f} (undone)<extra></extra>",
        )
    fig.add_scatter(
        x=[m.step for m in kept],
        y=[m.loss for m in kept],
        name="training",
        mode="lines",
        line={"color": BLUE, "width": 2},
        hovertemplate="step %{x}: %{y:.4f}<extra></extra>",
    )
    validations, _ = _last_of_each_step([m for m in metrics if m.val_loss is not None])
    if validations:
        fig.add_scatter(
            x=[m.step for m in validations],
            y=[m.val_loss for m in validations],
            name="validation",
            mode="lines+markers",
            line={"color": ORANGE, "width": 1.5, "dash": "dot"},
            marker={"size": 7, "line": {"color": "white", "width": 1.5}},
            hovertemplate="validation after step %{x}: %{y:.4f}<extra></extra>",
        )
    _mark_faults(fig, kept, story)
    return fig


def _last_of_each_step(metrics: Sequence[Metric]) -> tuple[list[Metric], list[Metric]]:
    """What counts, by step, and what a rollback or a resumption made void."""
    last = {metric.step: metric for metric in metrics}
    return sorted(last.values(), key=lambda m: m.step), [m for m in metrics if last[m.step] is not m]


def _mark_faults(fig: go.Figure, kept: Sequence[Metric], story: Sequence[tuple[float, Line]]) -> None:
    told: dict[int, list[Line]] = defaultdict(list)
    for _, line in story:
        told[line.step].append(line)
    hits = {step: lines for step, lines in told.items() if any(line.tone in ("fault", "loss") for line in lines)}
    losses = {m.step: m.loss for m in kept if m.loss is not None}
    if not hits or not losses:
        return
    for step in hits:
        fig.add_vline(x=step, line={"color": RED, "width": 1, "dash": "dot"}, opacity=0.55, layer="below")
    nearest = {step: losses[min(losses, key=lambda known: abs(known - step))] for step in hits}
    fig.add_scatter(
        x=list(hits),
        y=[nearest[step] for step in hits],
        name="fault",
        mode="markers",
        marker={"symbol": "x", "size": 9, "color": RED, "line": {"color": "white", "width": 1}},
        text=["<br>".join(f"{SIGNS[line.tone]} {label(line.text)}" for line in lines) for lines in hits.values()],
        hovertemplate="<b>step %{x}</b><br>%{text}<extra></extra>",
    )


def recovery_figure(timings: Sequence[RecoveryTiming]) -> go.Figure:
    """Where each recovery's time went, milliseconds, one bar a recovery; the diamond is the time that passed."""
    rows = [recovery_name(number, timing) for number, timing in enumerate(timings, 1)]
    fig = figure(110 + ROW * len(rows), x="milliseconds", barmode="stack", bargap=0.35)
    parts: dict[str, tuple[str, list[float | None]]] = {
        "notice": (RED, [t.notice for t in timings]),
        "decide": (ORANGE, [t.decide for t in timings]),
        "relink": (VIOLET, [t.relink for t in timings]),
        "transfer": (BLUE, [t.transfer for t in timings]),
        "rebuild": (GREEN, [t.rebuild for t in timings]),
        "redo": (TEAL, [t.redo for t in timings]),
    }
    for name, (colour, seconds) in parts.items():
        fig.add_bar(
            y=rows,
            x=[1000 * (s or 0.0) for s in seconds],
            name=name,
            orientation="h",
            marker={"color": colour},
            hovertemplate=f"{name}: %{{x:.1f}} ms<extra></extra>",
        )
    fig.add_scatter(
        y=rows,
        x=[None if t.total is None else 1000 * t.total for t in timings],
        name="total",
        mode="markers",
        marker={"symbol": "diamond", "size": 9, "color": INK, "line": {"color": "white", "width": 1}},
        hovertemplate="total: %{x:.1f} ms<extra></extra>",
    )
    fig.update_layout(yaxis=lanes(rows), legend={"traceorder": "normal"})
    return fig


def recovery_name(number: int, timing: RecoveryTiming) -> str:
    """A recovery's name in figures and tables; the number keeps two at the same step apart."""
    return f"{number} · step {timing.step} · {timing.where}"


def bytes_figure(record: RunRecord) -> go.Figure | None:
    """Payload sent over each edge in each direction, MB over the whole run; what dropped steps sent lies on top."""
    useful: dict[tuple[int, int], float] = defaultdict(float)
    wasted: dict[tuple[int, int], float] = defaultdict(float)
    for _, work in record.worked:
        for peer, sent in work.sent_bytes.items():
            (wasted if work.dropped else useful)[work.node, peer] += sent / 1e6
    edges = sorted({*useful, *wasted}, key=lambda edge: (min(edge), max(edge), edge[0]))
    if not edges:
        return None
    places = places_of(record)
    rows = [places.way(source, target) for source, target in edges]
    fig = figure(90 + 24 * len(rows), x="MB sent", barmode="stack", bargap=0.3)
    for name, amounts, colour in (("in finished steps", useful, BLUE), ("in dropped steps", wasted, GREY)):
        if amounts:
            fig.add_bar(
                y=rows,
                x=[amounts[edge] for edge in edges],
                name=name,
                orientation="h",
                marker={"color": colour},
                hovertemplate=f"%{{y}}: %{{x:.2f}} MB {name}<extra></extra>",
            )
    fig.update_layout(yaxis=lanes(rows), showlegend=True, legend={"traceorder": "normal"})
    return fig


def holdings_figure(held: Sequence[Holding], timings: Sequence[RecoveryTiming], zero: float) -> go.Figure:
    """Who held which stage, over seconds since the monotonic time ``zero``; a cross where a holder was lost."""
    named = {h.node: h.where for h in held}
    rows = [named[node] for node in sorted(named)]
    fig = figure(80 + ROW * len(rows), x="seconds since the start", barmode="overlay", bargap=0.25)
    shades = ("#cfe0ee", "#f3ddbd", "#d9d3eb", "#c9e6d9")
    turn: dict[int, int] = defaultdict(int)
    for h in held:
        fig.add_bar(
            y=[h.where],
            x=[h.end - h.start],
            base=[h.start - zero],
            orientation="h",
            showlegend=False,
            marker={"color": shades[turn[h.node] % len(shades)], "line": {"color": "white", "width": 2}},
            text=[label(h.worker)],
            textposition="inside",
            insidetextanchor="start",
            textfont={"color": INK},
            hovertemplate=f"{label(h.worker)}: {h.start - zero:.2f} to {h.end - zero:.2f} s<extra></extra>",
        )
        turn[h.node] += 1
    losses = [(t.lost_t - zero, named[node]) for t in timings for node in t.nodes if node in named]
    fig.add_scatter(
        x=[t for t, _ in losses],
        y=[where for _, where in losses],
        mode="markers",
        showlegend=False,
        marker={"symbol": "x", "size": 9, "color": RED, "line": {"color": "white", "width": 1}},
        hovertemplate="lost at %{x:.2f} s<extra></extra>",
    )
    fig.update_layout(yaxis=lanes(rows), margin={"t": 12}, uniformtext={"minsize": 9, "mode": "hide"})
    fig.update_xaxes(range=[0, max((h.end - zero for h in held), default=1)])
    return fig
