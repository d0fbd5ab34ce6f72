"""Figures of a schedule: its step, the utilization of nodes, and the load of links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import plotly.graph_objects as go

from planaria.planner.guidelines import PlannedPasses, planned_passes
from planaria.planner.problem import PlanningProblem, Solution
from planaria.planner.schedule import Schedule
from planaria.planner.tables import Ints
from planaria.report import theme
from planaria.report.phrases import format_number
from planaria.report.theme import escape_label, figure, lane_axis, text_colour_on

MAX_NODES = 40
"""maximum nodes whose passes are drawn"""
ROW = 30
"""height of a row, pixels"""
WIDTH = 860
"""width of the drawn step, pixels"""
DIGIT = 6.5
"""width of a digit, pixels"""
COLOURS = {"forward": theme.BLUE, "loss": theme.VIOLET, "backward": theme.ORANGE}
MAX_LABELLED_SITES = 20
"""maximum sites of a site × site figure with numbers in its cells"""

SlotKind = Literal["forward", "loss", "backward"]


class PlannedPass(NamedTuple):
    """One pass of a microbatch at a node; times are nanoseconds."""

    node: int
    kind: SlotKind
    microbatch: int
    hop: int
    arrives: int
    """time when its input arrives, or when the microbatch is admitted"""
    starts: int
    ends: int

    @property
    def waited(self) -> int:
        return self.starts - self.arrives


@dataclass(frozen=True)
class PlannedStep:
    """The planned step of a schedule."""

    problem: PlanningProblem
    solution: Solution
    times: PlannedPasses
    passes: list[PlannedPass]
    """passes sorted by microbatch, then along its route there and back"""

    @property
    def makespan(self) -> int:
        """Length of the step, nanoseconds."""
        return max(done.ends for done in self.passes)

    @property
    def waits(self) -> list[PlannedPass]:
        """Forwards that found their node busy or full."""
        return [done for done in self.passes if done.kind == "forward" and done.waited > 0]

    @property
    def busy(self) -> list[float]:
        """[nodes]: share of the step, 0 to 1, that a node works."""
        worked, whole = [0] * self.problem.nodes, self.makespan or 1
        for done in self.passes:
            worked[done.node] += done.ends - done.starts
        return [spent / whole for spent in worked]

    @property
    def held(self) -> list[int]:
        """[nodes]: maximum number of microbatches between forward and backward at the same time."""
        changes = sorted(
            (done.starts, 1, done.node) if done.kind == "forward" else (done.ends, -1, done.node)
            for done in self.passes
            if done.hop <= self.problem.visits
        )
        now, peak = [0] * self.problem.nodes, [0] * self.problem.nodes
        for _, change, node in changes:
            now[node] += change
            peak[node] = max(peak[node], now[node])
        return peak

    @property
    def links(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(site, site) → number of messages, and their total nanoseconds from sending to arrival."""
        site: list[int] = self.problem.site.tolist()
        traffic: dict[tuple[int, int], tuple[int, int]] = {}
        for sent, done in pairwise(self.passes):
            if sent.microbatch == done.microbatch and sent.node != done.node:
                route = site[sent.node], site[done.node]
                count, duration = traffic.get(route, (0, 0))
                traffic[route] = count + 1, duration + done.arrives - sent.ends
        return traffic

    def name(self, node: int) -> str:
        return f"{self.problem.names[node]} · stage {self.solution.stage[node]}"

    def by_stage(self) -> list[int]:
        return sorted(range(self.problem.nodes), key=lambda node: (self.solution.stage[node], node))

    def nodes_to_draw(self) -> list[int]:
        """Return the nodes to draw, sorted by stage: the :data:`MAX_NODES` busiest."""
        busiest = sorted(self.by_stage(), key=self.busy.__getitem__, reverse=True)[:MAX_NODES]
        return [node for node in self.by_stage() if node in busiest]


def step_of(schedule: Schedule) -> PlannedStep:
    """Simulate the planned step.

    :raises UserError: if memory deadlocks.
    """
    problem, solution = schedule.problem, schedule.solution
    times, last = planned_passes(problem, solution), problem.visits + 1
    routes = [(*route, *reversed(route)) for route in solution.routes]
    arrives, passes = _arrivals(problem, routes, times), []
    for i, visits in enumerate(routes):
        rows = zip(visits, arrives[i].tolist(), times.starts[i].tolist(), times.ends[i].tolist(), strict=True)
        for k, (node, *when) in enumerate(rows):
            kind: SlotKind = "forward" if k < last else "loss" if k == last else "backward"
            passes.append(PlannedPass(node, kind, i, min(k, 2 * last + 1 - k), *when))
    return PlannedStep(problem, solution, times, passes)


def _arrivals(problem: PlanningProblem, routes: Sequence[Sequence[int]], times: PlannedPasses) -> Ints:
    """Return [count, passes]: when each pass's input arrives; a microbatch's first pass needs none.

    Messages on one link wait for its bandwidth in sending order.
    """
    starts = times.starts.tolist()
    ends = times.ends.tolist()
    prices = problem.prices
    order = sorted(
        (ends[i][k - 1], starts[i][k - 1], i, k) for i, route in enumerate(routes) for k in range(1, len(route))
    )
    link_free: dict[tuple[int, int], int] = defaultdict(int)
    arrivals = times.starts.copy()
    for sent, _, i, k in order:
        a, b = routes[i][k - 1], routes[i][k]
        arrivals[i, k] = sent
        if a != b:
            begins = max(sent, link_free[a, b])
            link_free[a, b] = begins + prices.transmit(a, b, "forward")
            arrivals[i, k] = begins + prices.carry(a, b, "forward")
    return arrivals


def compared_figure(schedule: Schedule) -> go.Figure:
    """Draw step times of the plan and of alternatives, fastest first, and the lower bound."""
    others = sorted(schedule.compared.items(), key=lambda pair: pair[1])
    names, seconds = zip(("this plan", schedule.step_s), *others, strict=True)
    fig = figure(96 + ROW * len(names), x="seconds of one step", bargap=0.3, showlegend=False)
    fig.add_bar(
        y=_keys(names),
        x=seconds,
        orientation="h",
        marker={"color": [theme.BLUE] + [theme.GREY] * len(others)},
        text=[f"{format_number(time)} s" for time in seconds],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    fig.add_vline(
        x=schedule.bound.step_s,
        line={"color": theme.INK, "width": 1.2, "dash": "dot"},
        annotation={
            "text": f"lower bound {format_number(schedule.bound.step_s)} s",
            "font": {"color": theme.MUTED, "size": 12},
        },
        annotation_position="top",
    )
    fig.update_xaxes(range=[0, 1.12 * max(seconds)])  # space for the longest bar's text
    fig.update_layout(yaxis=_lanes(names))
    return fig


def gantt_figure(step: PlannedStep) -> go.Figure:
    """Draw the planned step in seconds: passes by node, and waits of forwards for their node."""
    nodes = step.nodes_to_draw()
    keys = dict(zip(nodes, _keys(nodes), strict=True))
    fig = figure(112 + ROW * len(nodes), x="seconds", barmode="overlay")
    total = step.makespan / 1e9 or 1.0
    for kind, colour in COLOURS.items():
        of_kind = [done for done in step.passes if done.kind == kind and done.node in keys]
        seconds = [(done.ends - done.starts) / 1e9 for done in of_kind]
        numbers = [str(done.microbatch) for done in of_kind]
        theme.add_bars(
            fig,
            [keys[done.node] for done in of_kind],
            seconds,
            {"color": colour, "line": {"color": theme.PAPER, "width": 0.5}},
            "%{customdata}",
            name=kind,
            base=[done.starts / 1e9 for done in of_kind],
            width=0.6,
            offset=-0.3,
            text=[
                i if WIDTH * duration > DIGIT * len(i) * total else ""
                for i, duration in zip(numbers, seconds, strict=True)
            ],
            constraintext="none",
            insidetextanchor="middle",
            textposition="inside",
            textangle=0,
            textfont={"size": 10, "color": text_colour_on(colour)},
            customdata=[_hover(step, done) for done in of_kind],
        )
    _add_waits(fig, step, keys)
    fig.update_layout(yaxis=_lanes([step.name(node) for node in nodes]), legend={"traceorder": "normal"})
    fig.update_xaxes(range=[0, total])
    return fig


def _add_waits(fig: go.Figure, step: PlannedStep, keys: dict[int, str]) -> None:
    waits = [done for done in step.waits if done.node in keys]
    theme.add_bars(
        fig,
        [keys[done.node] for done in waits],
        [done.waited / 1e9 for done in waits],
        theme.RED,
        "%{customdata}",
        name="a forward waits for its node",
        base=[done.arrives / 1e9 for done in waits],
        width=0.15,
        offset=-0.5,
        opacity=0.5,
        customdata=[f"{_hover(step, done)}<br>waited {format_number(done.waited / 1e9)} s" for done in waits],
    )


def _hover(step: PlannedStep, done: PlannedPass) -> str:
    return (
        f"{escape_label(step.name(done.node))}<br>{done.kind} of microbatch {done.microbatch}, hop {done.hop}<br>"
        f"{format_number(done.starts / 1e9)} to {format_number(done.ends / 1e9)} s"
    )


def busy_figure(step: PlannedStep) -> go.Figure:
    """Draw each node's busy share of the step by stage, with its maximum number of used slots."""
    nodes = step.by_stage()
    busy = step.busy
    held_slots = step.held
    slots = step.problem.slots.tolist()
    fig = figure(96 + 22 * len(nodes), x="% of the step", barmode="overlay", bargap=0.25)
    keys = dict(zip(nodes, _keys(nodes), strict=True))
    for stage in range(len(step.problem.sizes)):
        of_stage = [node for node in nodes if step.solution.stage[node] == stage]
        fig.add_bar(
            name=f"stage {stage}",
            y=[keys[node] for node in of_stage],
            x=[100 * busy[node] for node in of_stage],
            orientation="h",
            marker={"color": theme.SERIES[stage % len(theme.SERIES)]},
            text=[f"{100 * busy[node]:.0f} % · {held_slots[node]} of {slots[node]} slots" for node in of_stage],
            textposition="outside",
            textfont={"color": theme.MUTED},
            cliponaxis=False,
            hoverinfo="skip",
        )
    fig.update_xaxes(range=[0, min(115, 130 * max(busy)) or 1])  # space for the longest bar's text
    fig.update_layout(yaxis=_lanes([step.name(node) for node in nodes]), legend={"traceorder": "normal"})
    return fig


def sites_figure(
    sites: Sequence[str], table: Sequence[Sequence[float | None]], notes: Sequence[Sequence[str]], shade: str
) -> go.Figure:
    """Draw seconds between sites, ``table`` [from, to], with numbers in up to :data:`MAX_LABELLED_SITES` rows.

    ``notes`` [from, to] are hover texts, ``shade`` is the colour of the maximum; None leaves a cell blank.
    """
    keys, is_labelled = _keys(sites), len(sites) <= MAX_LABELLED_SITES
    fig = figure(140 + (28 if is_labelled else 16) * len(sites), x="to", y="from", margin={"t": 12, "b": 90})
    theme.add_heatmap(
        fig,
        keys,
        keys,
        table,
        shade,
        "%{customdata}",
        low=theme.WASH,
        text=[["" if number is None else f"{number:.3g}" for number in row] for row in table],
        texttemplate="%{text}" if is_labelled else None,
        textfont={"size": 11, "color": theme.INK},
        customdata=[
            [f"{escape_label(a)} → {escape_label(b)}<br>{notes[i][j]}" for j, b in enumerate(sites)]
            for i, a in enumerate(sites)
        ],
        zmax=max((number for row in table for number in row if number is not None), default=1),
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "s", "side": "top"}, "thickness": 12, "outlinewidth": 0},
    )
    fig.update_layout(yaxis=_lanes(sites), xaxis={"showgrid": False})
    fig.update_xaxes(type="category", tickvals=keys, ticktext=[escape_label(name) for name in sites], tickangle=-35)
    return fig


def _keys(rows: Sequence[object]) -> list[str]:
    """Return unique keys of rows, whose names may repeat."""
    return [str(index) for index in range(len(rows))]


def _lanes(names: Sequence[str]) -> dict[str, Any]:
    """Return the layout of a y axis with a row per name, from top to bottom."""
    keys = _keys(names)
    return {**lane_axis(keys), "tickvals": keys, "ticktext": [escape_label(name) for name in names]}
