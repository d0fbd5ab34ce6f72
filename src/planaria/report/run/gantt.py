"""Gantt charts of workers: an ordinary step, and the time around a death."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

import plotly.graph_objects as go

from planaria.control.facts.decisions import Form
from planaria.control.facts.events import Linked, Span, WorkReport
from planaria.control.log.run_record import RunRecord
from planaria.report import theme
from planaria.report.run.naming import Naming, naming_of
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.theme import escape_label, figure, lane_axis, text_colour_on

COLOURS = {
    "forward": theme.BLUE,
    "backward": theme.ORANGE,
    "exchange": theme.GREY,
    "optimizer": theme.VIOLET,
    "rebuild": theme.GREEN,
    "save": theme.TEAL,
    "copy": theme.PINK,
}
ROW = 34
"""height of a worker's row, pixels"""


class Bar(NamedTuple):
    """A bar in a worker's row, in monotonic seconds."""

    row: str
    kind: str
    start: float
    end: float
    text: str
    hover: str


def ordinary_step(record: RunRecord) -> list[WorkReport]:
    """Return the work reports of a replica's complete training step of median duration; empty without any.

    Steps that saved or rebuilt something are considered only if there are no others.
    """
    naming = naming_of(record)
    # Two passes, since a long run has too many reports for memory.
    by_step: dict[StepKey, _StepSummary] = defaultdict(_StepSummary)
    for _, work in record.worked:
        if _is_training(work):
            by_step[_step_key(work, naming)].add(work)
    max_workers = max((step.workers for step in by_step.values()), default=0)
    whole = {key: step for key, step in by_step.items() if step.workers == max_workers}
    plain = {key: step for key, step in whole.items() if step.plain} or whole
    if not plain:
        return []
    middle = median_low(step.duration for step in plain.values())
    chosen = next(key for key, step in plain.items() if step.duration == middle)
    return [work for _, work in record.worked if _is_training(work) and _step_key(work, naming) == chosen]


StepKey = tuple[int, int, int]
"""replica, generation, step"""


@dataclass
class _StepSummary:
    """One step: number of reports, time range, and whether it only trained."""

    workers: int = 0
    start: float = math.inf
    end: float = -math.inf
    plain: bool = True

    def add(self, work: WorkReport) -> None:
        self.workers += 1
        self.start = min(self.start, *(span.start for span in work.spans))
        self.end = max(self.end, *(span.end for span in work.spans))
        self.plain = self.plain and not any(span.action in ("save", "rebuild") for span in work.spans)

    @property
    def duration(self) -> float:
        return self.end - self.start


def _is_training(work: WorkReport) -> bool:
    return not work.dropped and any(span.action == "backward" for span in work.spans)


def _step_key(work: WorkReport, naming: Naming) -> StepKey:
    return naming.replica(work.node), work.generation, work.step


def idle_fraction(works: Sequence[WorkReport]) -> float:
    """Return the pipeline's bubble: the share of the step, 0 to 1, that workers spent waiting."""
    spans = [span for work in works for span in work.spans]
    duration = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - sum(span.end - span.start for span in spans) / (duration * len(works))


def step_figure(works: Sequence[WorkReport]) -> go.Figure:
    """Draw one step, in milliseconds since its first action."""
    zero = min(span.start for work in works for span in work.spans)
    ordered = sorted(works, key=lambda work: (work.stage, work.node))
    bars = [_bar(work, span) for work in ordered for span in work.spans]
    return _draw(bars, [_row(work.worker, work.stage) for work in ordered], zero)


def death_figure(record: RunRecord, timing: RecoveryTiming) -> go.Figure:
    """Draw the time around a loss, in milliseconds since the fault (its detection, if unknown).

    Only the affected replica is drawn.
    """
    zero = timing.lost_t if timing.fault_t is None else timing.fault_t
    moments = (timing.finished_t, timing.linked_t, timing.formed_t, timing.lost_t)
    last = next(moment for moment in moments if moment is not None)
    margin = 0.45 * max(last - zero, 0.05)
    begin, end = zero - margin, last + margin
    rows: set[tuple[int, str]] = set(zip(timing.stage_of_worker, timing.workers, strict=True))
    bars, naming = [], naming_of(record)
    for work in (work for _, work in record.worked if naming.replica(work.node) == timing.replica):
        visible = [_bar(work, span) for span in work.spans if span.end > begin and span.start < end]
        bars += [bar._replace(start=max(bar.start, begin), end=min(bar.end, end)) for bar in visible]
        rows |= {(work.stage, work.worker)} if visible else set()
    for link, bar in _link_bars(record, timing):
        bars.append(bar)
        rows.add((link.stage, link.worker))
    # A lost worker's row comes before its successor's.
    ordered = sorted(rows, key=lambda row: (row[0], row[1] not in timing.workers, row[1]))
    fig = _draw(bars, [_row(worker, stage) for stage, worker in ordered], zero, flags=5)
    fig.update_xaxes(range=[1000 * (begin - zero), 1000 * (end - zero)])
    _add_flags(fig, timing, zero)
    lost = [_row(worker, stage) for stage, worker in ordered if worker in timing.workers]
    fig.add_scatter(
        x=[0] * len(lost),
        y=lost,
        mode="markers",
        showlegend=False,
        hoverinfo="skip",
        marker=theme.symbol("x", theme.RED, 12),
    )
    return fig


def _bar(work: WorkReport, span: Span) -> Bar:
    duration = f"{1000 * (span.end - span.start):.1f} ms"
    numbered = f" of microbatch {span.microbatch}, hop {span.hop}" if span.microbatch >= 0 else ""
    hover = f"{span.action}{numbered}, step {work.step}: {duration}{' (dropped)' if work.dropped else ''}"
    text = str(span.microbatch) if span.microbatch >= 0 else ""
    kind = "dropped" if work.dropped else span.action
    return Bar(_row(work.worker, work.stage), kind, span.start, span.end, text, hover)


def _link_bars(record: RunRecord, timing: RecoveryTiming) -> Iterator[tuple[Linked, Bar]]:
    """Yield the bar of each member from the last formation to its link."""
    formed: float | None = None
    naming = naming_of(record)
    for t, fact in record.landmarks:
        if isinstance(fact, Form) and fact.replica == timing.replica:
            formed = t if t == timing.formed_t else None
        elif not isinstance(fact, Linked) or naming.replica(fact.node) != timing.replica:
            continue
        elif formed is not None and fact.generation == timing.generation:
            hover = f"relink {1000 * fact.link_s:.1f} ms, transfer {1000 * fact.transfer_s:.1f} ms, " + (
                f"rebuild {1000 * fact.rebuild_s:.1f} ms, {fact.transfer_bytes / 1e6:.1f} MB received"
            )
            yield fact, Bar(_row(fact.worker, fact.stage), "relink", formed, t, "", hover)


def _draw(bars: Sequence[Bar], rows: list[str], zero: float, flags: int = 0) -> go.Figure:
    fig = figure(
        110 + 16 * flags + ROW * len(rows),
        x="milliseconds",
        barmode="overlay",
        bargap=0.28,
        uniformtext={"minsize": 8, "mode": "hide"},
        margin={"t": 20 + 16 * flags, "b": 90},
    )
    styles = {
        "write": {"color": theme.WRITTEN, "line": {"color": theme.TEAL, "width": 1}},  # beneath concurrent training
        "relink": {"color": theme.LINKED, "line": {"color": theme.GREEN, "width": 1}},
        "dropped": {
            "color": theme.DROPPED,
            "pattern": {"shape": "/", "fgcolor": theme.GREY, "size": 5, "solidity": 0.35},
            "line": {"color": theme.GREY, "width": 1},
        },
        **{kind: {"color": colour, "line": {"color": theme.PAPER, "width": 1}} for kind, colour in COLOURS.items()},
    }
    # Plotly squeezes text into bars of any width; a digit needs about a hundredth of the chart.
    legible = 0.011 * (max(bar.end for bar in bars) - min(bar.start for bar in bars)) if bars else 0.0
    for kind, style in styles.items():
        of_kind = [bar for bar in bars if bar.kind == kind]
        if of_kind:
            theme.add_bars(
                fig,
                [bar.row for bar in of_kind],
                [1000 * (bar.end - bar.start) for bar in of_kind],
                style,
                "%{y}<br>%{customdata}",
                base=[1000 * (bar.start - zero) for bar in of_kind],
                name={"relink": "relink, transfer, rebuild", "write": "background write"}.get(kind, kind),
                text=[bar.text if bar.end - bar.start > legible else "" for bar in of_kind],
                insidetextanchor="middle",
                textposition="inside",
                textangle=0,
                textfont={
                    "size": 10,
                    "color": theme.MUTED if kind == "dropped" else text_colour_on(str(style["color"])),
                },
                customdata=[bar.hover for bar in of_kind],
            )
    below = -52 / (ROW * len(rows))
    fig.update_layout(
        yaxis=lane_axis(rows), showlegend=True, legend={"traceorder": "normal", "y": below, "yanchor": "top"}
    )
    return fig


def _add_flags(fig: go.Figure, timing: RecoveryTiming, zero: float) -> None:
    """Draw a line with a flag for each known moment, at different heights so that they do not overlap."""
    moments = [
        ("fault", timing.fault_t, theme.RED),
        ("noticed", timing.lost_t, theme.ORANGE),
        ("formed again", timing.formed_t, theme.VIOLET),
        ("all linked", timing.linked_t, theme.GREEN),
        ("first microbatch done", timing.finished_t, theme.INK),
    ]
    marked = [(name, t, colour) for name, t, colour in moments if t is not None]
    begin, end = fig.layout.xaxis.range
    plot = fig.layout.height - fig.layout.margin.t - fig.layout.margin.b
    for index, (name, t, colour) in enumerate(marked):
        ms, top = 1000 * (t - zero), 1 + (8 + 16 * (len(marked) - 1 - index)) / plot
        fig.add_shape(
            type="line", x0=ms, x1=ms, y0=0, y1=top, xref="x", yref="paper", line={"color": colour, "width": 1.4}
        )
        right_half = ms - begin > 0.6 * (end - begin)  # no space for a flag to the right on a narrow screen
        fig.add_annotation(
            x=ms,
            y=top,
            xref="x",
            yref="paper",
            xanchor="right" if right_half else "left",
            yanchor="middle",
            showarrow=False,
            xshift=-3 if right_half else 3,
            text=f"{name} <b>{ms:.0f} ms</b>",
            font={"size": 11.5, "color": colour},
            bgcolor=theme.VEIL,
        )


def _row(worker: str, stage: int) -> str:
    return f"{escape_label(worker)} · stage {stage}"
