"""The report's section on coded rounds: finish times, excluded replicas, and other schemes' times with these delays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import plotly.graph_objects as go

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord, cached
from planaria.exchange.coded.choose import SchemeChoice, choose
from planaria.exchange.coded.coded_facts import CloseRound, CodedStep, ResultsSent
from planaria.exchange.coded.coding import Coding, make_coding
from planaria.exchange.coded.simulate import FinishTimes
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.report import page
from planaria.report.phrases import format_count
from planaria.report.theme import BLUE, INK, ORANGE, PAPER, figure, integer_x_axis, lane_axis

ROUNDS_DRAWN = 400
MIN_ROUNDS = 20
"""rounds required to estimate other schemes' times"""
HEAD = ["scheme", "ms a job", "load", "gradients sent a job", "microbatches a job, at least"]


@dataclass(frozen=True)
class RoundTimes:
    """One round of a coded step. Seconds count from its start."""

    step: int
    round: int
    sent: dict[int, float]
    """replica → time at which all its stages had sent their results; others were interrupted"""
    counted: frozenset[int]
    seconds: float


@cached
def completed_rounds(record: RunRecord) -> list[RoundTimes]:
    """Return the completed rounds in order."""
    laps: list[RoundTimes] = []
    nodes = Arrangement({})
    coded, began = CodedStep(), 0.0
    sent: dict[int, float] = {}
    for t, fact in record.history:
        if isinstance(fact, e.RunStarted):
            nodes = Arrangement(dict(enumerate(fact.arrangement)))
        elif isinstance(fact, d.RunStep):
            coded, began, sent = CodedStep(), t, {}
        elif isinstance(fact, ResultsSent) and fact.round == len(coded.counted):
            coded = CodedStep(coded.counted, coded.sent | {fact.node})
            sent |= dict.fromkeys(coded.done(nodes) - sent.keys(), t - began)
        elif isinstance(fact, CloseRound):
            counted_replicas = frozenset(fact.counted)
            laps.append(RoundTimes(fact.step, fact.round, sent, counted_replicas, t - began))
            coded, began, sent = coded.next_round(counted_replicas), t, {}
    return laps


def profile_of(record: RunRecord) -> FinishTimes | None:
    """Return the delays of the run's rounds, or None if too few have equal loads.

    An interrupted replica counts as finished at the end of the round. The part of a round that a replica's busiest
    stage computes grows with the load; the rest is a cost per mini-task.
    """
    coding = make_coding(record.config.exchange)
    if coding is None:
        return None
    full = [lap for lap in completed_rounds(record) if coding.scheme.delay() <= lap.round < coding.jobs]
    rows = [[lap.sent.get(replica, lap.seconds) for replica in range(coding.replicas)] for lap in full]
    if len(rows) < MIN_ROUNDS:
        return None
    load, typical = coding.scheme.load(coding.replicas), float(np.median(rows))
    microbatches = record.config.pipeline.microbatches * coding.replicas / coding.jobs
    slope = min(busiest_s(record) * microbatches, typical / load)
    return FinishTimes(np.array(rows), load, slope, task_s=(typical - slope * load) / coding.scheme.slots())


def busiest_s(record: RunRecord) -> float:
    """Return the median seconds of a microbatch's passes at the node that computes longest."""
    seconds_of: dict[int, list[float]] = {}
    for _, work in record.worked:
        passes = [span for span in work.spans if span.action in ("forward", "backward")]
        ended = [span.hop for span in passes if span.action == "backward"]
        if ended and not work.dropped:
            each = sum(span.end - span.start for span in passes) / ended.count(min(ended))
            seconds_of.setdefault(work.node, []).append(each)
    return max((median(seconds) for seconds in seconds_of.values()), default=0.0)


def schemes(record: RunRecord) -> SchemeChoice | None:
    """Return the time of every scheme under the run's delays, in steps with as many jobs."""
    coding, profile = make_coding(record.config.exchange), profile_of(record)
    if coding is None or profile is None:
        return None
    return choose(profile, slow=coding.slow, window=coding.jobs)


def section(record: RunRecord) -> Iterator[str]:
    """Yield the section about stragglers; nothing without coding or completed rounds."""
    coding, rounds = make_coding(record.config.exchange), completed_rounds(record)
    if coding is None or not rounds:
        return
    parts = [page.chart(finish_figure(rounds, coding), "stragglers")]
    if (chosen := schemes(record)) is not None:
        rows = [
            [str(candidate).partition(":")[0], f"{1e3 * candidate.seconds:.1f}", f"{candidate.load:.3f}",
             f"{candidate.vectors}", f"{candidate.microbatches}"]
            for candidate in chosen.candidates[:12]
        ]  # fmt: skip
        note = f"Time that each scheme would have taken with these delays, fastest first: {chosen.why}."
        table = page.table("schemes", HEAD, rows, numbers_from=1)
        parts += [page.subheading("Other schemes"), page.paragraph(note), table]
    yield page.section("Stragglers", _summary(coding, rounds), *parts)


def summary_lines(record: RunRecord) -> Iterator[str]:
    """Yield the count of rounds that ended without some replicas."""
    coding, rounds = make_coding(record.config.exchange), completed_rounds(record)
    if coding is not None and rounds:
        yield f"stragglers    {_summary(coding, rounds)}"


def _summary(coding: Coding, rounds: list[RoundTimes]) -> str:
    without = [coding.replicas - len(lap.counted) for lap in rounds]
    load = coding.scheme.load(coding.replicas)
    return (
        f"{format_count(len(rounds), 'round')} of coded steps; {sum(map(bool, without))} continued without replicas, "
        f"{format_count(sum(without), 'result')} in all. A replica computes {load:.3f} of a job's data in a round; "
        f"without coding, {1 / coding.replicas:.3f}."
    )


def finish_figure(rounds: list[RoundTimes], coding: Coding) -> go.Figure:
    """Plot finish times in milliseconds by round, with a cross for interrupted replicas; the last rounds only."""
    drawn = rounds[-ROUNDS_DRAWN:]
    names = [f"replica {replica}" for replica in range(coding.replicas)]
    fig = figure(120 + 26 * coding.replicas, x="round")
    first = len(rounds) - len(drawn)
    table = [
        [1e3 * lap.sent[replica] if replica in lap.sent else None for lap in drawn]
        for replica in range(coding.replicas)
    ]
    words = [[_round_line(lap, replica) for lap in drawn] for replica in range(coding.replicas)]
    fig.add_heatmap(
        z=table, x=list(range(first, len(rounds))), y=names, colorscale=[[0, PAPER], [0.5, BLUE], [1, ORANGE]], zmin=0,
        customdata=words, hovertemplate="%{customdata}<extra></extra>",
        colorbar={"title": "ms", "thickness": 12, "outlinewidth": 0},
    )  # fmt: skip
    lost = [(first + i, r) for i, lap in enumerate(drawn) for r in range(coding.replicas) if r not in lap.counted]
    fig.add_scatter(
        x=[i for i, _ in lost], y=[names[r] for _, r in lost], mode="markers", name="done without",
        hoverinfo="skip", marker={"symbol": "x-thin-open", "color": INK, "size": 7}, showlegend=True,
    )  # fmt: skip
    fig.update_layout(yaxis=lane_axis(names))
    return integer_x_axis(fig, range(first, len(rounds)), bars=True)


def _round_line(lap: RoundTimes, replica: int) -> str:
    lap_of = f"replica {replica}, step {lap.step}, round {lap.round}: "
    if replica not in lap.sent:
        return f"{lap_of}interrupted after {1e3 * lap.seconds:.1f} ms"
    when = f"{1e3 * lap.sent[replica]:.1f} ms"
    return lap_of + (when if replica in lap.counted else f"{when}, too late")
