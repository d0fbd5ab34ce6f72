"""Figures of the report: loss, speed, recovery times, bytes per edge and stage holders."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go

from planaria.control.log.run_record import Metric, RunRecord, StepMetric
from planaria.report import theme
from planaria.report.run.event_lines import SIGNS, EventLine
from planaria.report.run.naming import naming_of
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.stage_holders import StageStay
from planaria.report.theme import escape_label, figure, lane_axis

ROW = 30
"""height of a bar's row, pixels"""
MAX_FAULT_LINES = 200
"""maximum fault lines in the loss figure"""
MAX_RECOVERIES = 60
"""maximum recoveries drawn"""

PARTS = {
    "notice": theme.RED,
    "decide": theme.ORANGE,
    "relink": theme.VIOLET,
    "transfer": theme.BLUE,
    "rebuild": theme.GREEN,
    "redo": theme.TEAL,
}

Curve = list[tuple[int, float]]
"""(step, value) in order"""
PhaseBar = tuple[str, Mapping[str, float | None], float | None]
"""name, seconds by phase, and total seconds"""


def loss_figure(metrics: Iterable[Metric], lines: Sequence[tuple[float, EventLine]]) -> go.Figure:
    """Draw training and validation loss over steps, undone steps in grey, and a line per fault."""
    fig = figure(400, x="step", y="loss, nats per token", hovermode="closest")
    kept, undone, validations = _curves(metrics)
    dots = {"mode": "markers", "marker": {"color": theme.GREY, "size": 4}}
    if undone:
        theme.add_curve(fig, undone, "step %{x}: %{y:.4f} (undone)", name="undone", **dots)
    line = {"color": theme.BLUE, "width": 2}
    theme.add_curve(fig, kept, "step %{x}: %{y:.4f}", name="training", mode="lines", line=line)
    if validations:
        theme.add_curve(
            fig,
            validations,
            "validation after step %{x}: %{y:.4f}",
            name="validation",
            mode="lines+markers",
            line={"color": theme.ORANGE, "width": 1.5, "dash": "dot"},
            marker={"size": 7, "line": {"color": theme.PAPER, "width": 1.5}},
        )
    _mark_faults(fig, kept, lines)
    return theme.integer_x_axis(fig, [step for curve in (kept, undone, validations) for step, _ in curve])


def speed_figure(metrics: Iterable[Metric]) -> go.Figure:
    """Draw tokens per second over steps."""
    fig = figure(260, x="step", y="tokens per second", hovermode="closest")
    speeds: Curve = sorted({m.step: m.tokens_per_s for m in metrics if isinstance(m, StepMetric)}.items())
    line = {"color": theme.GREEN, "width": 2}
    theme.add_curve(fig, speeds, "step %{x}: %{y:,.0f} tokens/s", mode="lines", line=line)
    fig.update_yaxes(rangemode="tozero")
    return theme.integer_x_axis(fig, [step for step, _ in speeds])


def _curves(metrics: Iterable[Metric]) -> tuple[Curve, Curve, Curve]:
    """Return training losses, undone training losses, and validation losses by step."""
    trained: dict[int, float] = {}
    validated: dict[int, float] = {}
    undone: Curve = []
    for metric in metrics:
        if isinstance(metric, StepMetric):
            if metric.step in trained:
                undone.append((metric.step, trained[metric.step]))
            trained[metric.step] = metric.loss
        else:
            validated[metric.step] = metric.val_loss
    return sorted(trained.items()), undone, sorted(validated.items())


def _mark_faults(fig: go.Figure, kept: Curve, lines: Sequence[tuple[float, EventLine]]) -> None:
    by_step: dict[int, list[EventLine]] = defaultdict(list)
    for _, line in lines:
        by_step[line.step].append(line)
    faults = {step: lines for step, lines in by_step.items() if any(line.tone in ("fault", "loss") for line in lines)}
    if not faults or not kept:
        return
    if len(faults) <= MAX_FAULT_LINES:
        style = {"color": theme.RED, "width": 1, "dash": "dot"}
        ends = {"type": "line", "yref": "y domain", "y0": 0, "y1": 1, "opacity": 0.55, "layer": "below", "line": style}
        fig.update_layout(shapes=[{**ends, "x0": step, "x1": step} for step in faults])
    points = [(step, _value_near(kept, step)) for step in faults]
    texts = ["<br>".join(f"{SIGNS[one.tone]} {escape_label(one.text)}" for one in each) for each in faults.values()]
    hover = "<b>step %{x}</b><br>%{text}"
    theme.add_marks(fig, points, theme.symbol("x", theme.RED), hover, name="fault", text=texts)


def _value_near(curve: Curve, step: int) -> float:
    """Return the curve's value at the nearest step, the earlier of two."""
    after = bisect_left(curve, step, key=lambda point: point[0])
    neighbours = curve[max(0, after - 1) : after + 1]
    return min(neighbours, key=lambda point: abs(point[0] - step))[1]


def recovery_figure(timings: Sequence[RecoveryTiming]) -> go.Figure:
    """Draw the :data:`MAX_RECOVERIES` longest recoveries by phase."""
    names = [recovery_name(number, timing) for number, timing in enumerate(timings, 1)]
    bars = [(name, timing.parts, timing.total) for name, timing in zip(names, timings, strict=True)]
    return phase_figure(bars, PARTS)


def phase_figure(bars: Sequence[PhaseBar], colours: Mapping[str, str]) -> go.Figure:
    """Draw a stacked bar of phases per recovery, in milliseconds; a diamond marks the total.

    Shows the :data:`MAX_RECOVERIES` longest. ``colours``: phase → its colour, in order.
    """
    longest = sorted(range(len(bars)), key=lambda index: bars[index][2] or 0.0)[-MAX_RECOVERIES:]
    bars = [bars[index] for index in sorted(longest)]
    rows = [name for name, _, _ in bars]
    fig = figure(110 + ROW * len(rows), x="milliseconds", barmode="stack", bargap=0.35)
    for phase, colour in colours.items():
        lengths = [1000 * (durations[phase] or 0.0) for _, durations, _ in bars]
        theme.add_bars(fig, rows, lengths, colour, f"{phase}: %{{x:.1f}} ms", name=phase)
    totals = [(None if total is None else 1000 * total, name) for name, _, total in bars]
    theme.add_marks(fig, totals, theme.symbol("diamond", theme.INK), "total: %{x:.1f} ms", name="total")
    fig.update_layout(yaxis=lane_axis(rows), legend={"traceorder": "normal"})
    return fig


def recovery_name(number: int, timing: RecoveryTiming) -> str:
    """Return a recovery's unique name in figures and tables."""
    return f"{number} · step {timing.step} · {timing.where}"


def bytes_figure(record: RunRecord) -> go.Figure | None:
    """Draw the payload over each edge and direction, MB per run, dropped steps on top."""
    useful: dict[tuple[int, int], float] = defaultdict(float)
    wasted: dict[tuple[int, int], float] = defaultdict(float)
    for _, work in record.worked:
        for peer, sent in work.sent_bytes.items():
            (wasted if work.dropped else useful)[work.node, peer] += sent / 1e6
    edges = sorted({*useful, *wasted}, key=lambda edge: (min(edge), max(edge), edge[0]))
    if not edges:
        return None
    naming = naming_of(record)
    rows = [naming.transit(source, target) for source, target in edges]
    fig = figure(90 + 24 * len(rows), x="MB sent", barmode="stack", bargap=0.3)
    for name, amounts, colour in (("in finished steps", useful, theme.BLUE), ("in dropped steps", wasted, theme.GREY)):
        if amounts:
            megabytes = [amounts[edge] for edge in edges]
            theme.add_bars(fig, rows, megabytes, colour, f"%{{y}}: %{{x:.2f}} MB {name}", name=name)
    fig.update_layout(yaxis=lane_axis(rows), showlegend=True, legend={"traceorder": "normal"})
    return fig


def holdings_figure(stays: Sequence[StageStay], timings: Sequence[RecoveryTiming], zero: float) -> go.Figure:
    """Draw the holders of each stage over seconds since monotonic time ``zero``; a cross marks a lost holder."""
    name_of = {h.node: h.where for h in stays}
    rows = [name_of[node] for node in sorted(name_of)]
    fig = figure(80 + ROW * len(rows), x="seconds since the start", barmode="overlay", bargap=0.25)
    changes: dict[int, int] = defaultdict(int)
    colours = []
    for h in stays:
        colours.append(theme.SHADES[changes[h.node] % len(theme.SHADES)])
        changes[h.node] += 1
    theme.add_bars(
        fig,
        [h.where for h in stays],
        [h.end - h.start for h in stays],
        {"color": colours, "line": {"color": theme.PAPER, "width": 2}},
        "%{customdata}",
        base=[h.start - zero for h in stays],
        showlegend=False,
        text=[escape_label(h.worker) for h in stays],
        textposition="inside",
        insidetextanchor="start",
        textfont={"color": theme.INK},
        customdata=[f"{escape_label(h.worker)}: {h.start - zero:.2f} to {h.end - zero:.2f} s" for h in stays],
    )
    losses = [(t.lost_t - zero, name_of[node]) for t in timings for node in t.nodes if node in name_of]
    theme.add_marks(fig, losses, theme.symbol("x", theme.RED), "lost at %{x:.2f} s")
    fig.update_layout(yaxis=lane_axis(rows), margin={"t": 12}, uniformtext={"minsize": 9, "mode": "hide"})
    first, last = min((h.start - zero for h in stays), default=0.0), max((h.end - zero for h in stays), default=1.0)
    fig.update_xaxes(range=[first, last])
    return fig
