"""The page of ``planaria plan``: verdict, step time, utilization and routes of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from planaria.pipeline.network.costs import MBIT
from planaria.planner.bound.step_bound import ALL
from planaria.planner.guidelines import Violation, find_violations
from planaria.planner.paths import CutBound
from planaria.planner.schedule import Schedule, SeveralPaths
from planaria.report import page
from planaria.report.phrases import format_count, format_number
from planaria.report.run.schedule_figures import (
    MAX_NODES,
    PlannedPass,
    PlannedStep,
    busy_figure,
    compared_figure,
    gantt_figure,
    sites_figure,
    step_of,
)
from planaria.report.tables import Table
from planaria.report.theme import CARRIED, DELAYED
from planaria.report.verdict import Verdict

MAX_ROUTES = 60
"""maximum routes listed"""
MAX_EDGES = 40
"""maximum number of edges in the table, the slowest ones"""
GRADIENT_SUMS = (
    "After its last pass each node sends its gradients to one node of its stage, which returns the sum; the step ends "
    "when all have it. The step's chart and the busy shares cover the passes only."
)


def write_page(schedule: Schedule, path: Path) -> Path:
    """Write the page of a schedule atomically to ``path`` and return that.

    :raises UserError: if it cannot be written, or the schedule's memory deadlocks.
    """
    return page.write(path, page.document("Plan · planaria", body(schedule, step_of(schedule))))


def body(schedule: Schedule, step: PlannedStep) -> Iterator[str]:
    """Yield the page's sections as HTML."""
    violations = find_violations(step.problem, step.solution, step.times)
    name = f"Plan for {format_count(len(schedule.nodes), 'node')}"
    yield page.heading(name, verdict(schedule, step, violations), _summary(schedule, step))
    yield page.cards(_facts(schedule, step))
    yield _alternatives(schedule)
    yield page.section("The planned step", _gantt_caption(step), page.chart(gantt_figure(step), "step"))
    yield from _utilization(schedule, step)
    yield from _paths(schedule)
    yield from _arrangement_section(schedule, step)
    yield page.footer("Written by planaria plan; the schedule next to this page has every number, as JSON.")


def _summary(schedule: Schedule, step: PlannedStep) -> str:
    rules, visited = schedule.rules, step.solution.stage[step.solution.path]
    back = int((np.diff(visited, axis=1) < 0).sum(axis=1).max(initial=0))
    queue = (
        "Messages on one link wait for its bandwidth." if schedule.transmit_s else "Messages do not slow each other."
    )
    return (
        f"Each microbatch visits {rules.visits} of {format_count(len(rules.sizes) - 1, 'block stage')}. Its route may "
        f"go back {format_count(rules.swaps, 'time')} by one place (in this plan, at most {back}) and forward by at "
        f"most {format_count(rules.jump, 'place')} a hop. A node runs backward passes and losses first, then forwards "
        f"in order of arrival if it has a slot. {queue}" + (f" {GRADIENT_SUMS}" if schedule.sums_s else "")
    )


def _facts(schedule: Schedule, step: PlannedStep) -> Iterator[tuple[str, str, str]]:
    bound = schedule.bound
    search = schedule.search
    rules = schedule.rules
    yield "step", f"{format_number(schedule.step_s)} s", "simulated"
    if schedule.sums_s:
        yield "gradient sums", f"{format_number(schedule.step_s - step.makespan / 1e9)} s", "of it, after the last pass"
    yield "lower bound", f"{format_number(bound.step_s)} s", bound.binds
    if schedule.gap is None:
        yield "gap", "–", "passes cost nothing, so it is meaningless; set network.forward_s and backward_s"
    else:
        yield "gap", f"{100 * schedule.gap:.1f} %", "1 − bound ÷ step: maximum improvement by any plan"
    yield "search", f"{search.seconds:.1f} s", f"{format_count(search.moves, 'move')}, seed {search.seed}"
    yield "nodes", f"{len(schedule.nodes)}", f"at {format_count(len(schedule.sites), 'site')}"
    yield "stages", f"{len(rules.sizes) - 1}", f"block stages; the ends on {format_count(rules.sizes[0], 'data node')}"
    yield "microbatches", f"{len(schedule.routes)}", f"{rules.microbatches} from each data node"
    yield "visits", f"{rules.visits}", "of block stages, by each microbatch"


def _alternatives(schedule: Schedule) -> str:
    others = sorted(schedule.compared.items(), key=lambda pair: pair[1])
    rows = [
        [name, f"{format_number(seconds)} s", f"{schedule.step_s / seconds:.3f}" if seconds else "–"]
        for name, seconds in [("this plan", schedule.step_s), *others]
    ]
    order = "" if schedule.bound.binds == ALL else ", in any order of work"
    return page.section(
        "Alternatives",
        "Simulated steps on the same nodes, with as many microbatches. The dotted line is the lower bound: no "
        f"arrangement and routes take less{order}. It is attained by: {schedule.bound.binds}.",
        page.chart(compared_figure(schedule), "compared"),
        page.table("step-times", ["", "step", "this plan ÷ it"], rows, numbers_from=1),
    )


def _gantt_caption(step: PlannedStep) -> str:
    nodes, waits = step.problem.nodes, step.waits
    others = [done for done in step.passes if done.kind != "forward" and done.waited > 0]
    forwards = sum(done.kind == "forward" and done.hop > 0 for done in step.passes)
    unmarked = format_count(len(others), "backward pass or loss", "backward passes and losses")
    return (
        (f"The {MAX_NODES} busiest of {nodes} nodes. " if nodes > MAX_NODES else "")
        + "Numbers are microbatches. A red strip under a row is a forward whose message has arrived, but whose node is "
        f"busy or full: {len(waits)} of {forwards} forwards waited so, {_total_wait(waits)} in all; "
        f"{unmarked}, not marked, waited {_total_wait(others)}. Waits for admission "
        "at a data node do not count."
    )


def _total_wait(waits: list[PlannedPass]) -> str:
    return f"{format_number(sum(done.waited for done in waits) / 1e9)} s"


def _utilization(schedule: Schedule, step: PlannedStep) -> Iterator[str]:
    busy = step.busy
    yield page.section(
        "Utilization of nodes",
        f"Share of the step in which a node works ({100 * sum(busy) / len(busy):.0f} % on average), and the most "
        "microbatches it holds at the same time between their forward and their backward, of its slots.",
        page.chart(busy_figure(step), "busy"),
    )
    sites, links = range(len(schedule.sites)), step.links
    seconds = {route: duration / 1e9 for route, (_, duration) in links.items()}
    notes = {
        route: f"{format_count(count, 'message')}, {format_number(seconds[route])} s in transit"
        for route, (count, _) in links.items()
    }
    yield page.section(
        "Link traffic",
        "Seconds from sending to arrival, all messages of the step from one site (down) to another (across) together: "
        f"{format_count(sum(count for count, _ in links.values()), 'message')}, "
        + f"{format_number(sum(seconds.values()))} s"
        + (", waiting for links included" if schedule.transmit_s else "")
        + ". Blank cells have no messages; on the diagonal, between nodes of one site.",
        page.chart(
            sites_figure(
                schedule.sites,
                [[seconds.get((a, b)) for b in sites] for a in sites],
                [[notes.get((a, b), "no messages") for b in sites] for a in sites],
                CARRIED,
            ),
            "transit",
        ),
    )
    delays = [[f"{format_number(delay)} s a message" for delay in row] for row in schedule.link_s]
    yield page.section(
        "Delays",
        "Seconds of one message from a site (down) to another (across).",
        page.chart(sites_figure(schedule.sites, schedule.link_s, delays, DELAYED), "delays"),
    )


def _paths(schedule: Schedule) -> Iterator[str]:
    if schedule.paths is not None:
        yield page.section(
            "Paths",
            "Where sites are joined by several paths, each edge of the plan has one of them. Rates are what an edge "
            f"has when all send at the same time, shared max-min fairly. In all {path_summary(schedule.paths)}.",
            path_table(schedule, schedule.paths).html("paths"),
        )


def path_table(
    schedule: Schedule, paths: SeveralPaths, old_paths: Mapping[tuple[int, int], str] | None = None
) -> Table:
    """Return a table of the edges with the longest transfers of a step, each with its path and its rate.

    ``old_paths``: edge → its previous path.
    """
    names = [machine.name for machine in schedule.nodes]
    longest = sorted(paths.edges, key=lambda edge: -edge.size / edge.rate)
    rows = [
        [
            names[edge.source], names[edge.target],
            *([old_paths.get((edge.source, edge.target), "–")] if old_paths is not None else ()),
            edge.path, f"{edge.size / 1e6:.2f}", f"{edge.rate / MBIT:.4g}",
            f"{edge.size / edge.rate:.3g}",
        ]
        for edge in longest[:MAX_EDGES]
    ]  # fmt: skip
    title = "edges between sites, and their paths"
    if len(longest) > MAX_EDGES:
        title += f": the {MAX_EDGES} slowest of {len(longest)}; the schedule has all"
    head = [
        "from",
        "to",
        *(["path before"] if old_paths is not None else ()),
        "path",
        "MB a step",
        "Mbit/s, all sending",
        "seconds a step",
    ]
    return Table(title, head, rows, numbers_from=3 if old_paths is None else 4)


def path_summary(paths: SeveralPaths) -> str:
    """Return the load of the busiest link, and the lower bound on it for any choice of paths."""
    gap = CutBound(paths.least_s, ()).gap(paths.largest_s)
    cut = ", ".join(paths.cut[:3]) + (f" and {len(paths.cut) - 3} more" if len(paths.cut) > 3 else "")
    return (
        f"{len(paths.edges)} edges; the busiest link carries {paths.largest_s:.4g} s of a step, no choice less than "
        f"{paths.least_s:.4g} s (gap {gap:.1%}; cut: {cut or 'none'})"
    )


def _arrangement_section(schedule: Schedule, step: PlannedStep) -> Iterator[str]:
    names = step.problem.names
    yield page.section(
        "Arrangement",
        "The nodes that hold each stage; those of stage 0 are the data nodes, with embedding, head and loss.",
        page.table(
            "stages",
            ["stage", "nodes"],
            [
                [f"{stage}", ", ".join(names[node] for node in stage_nodes)]
                for stage, stage_nodes in enumerate(schedule.stages)
            ],
            numbers_from=2,
        ),
    )
    visits = [f"visit {hop}" for hop in range(1, schedule.rules.visits + 1)]
    ends = [done.ends for done in step.passes if done.kind == "backward" and done.hop == 0]
    rows = [
        [str(i), names[route[0]], *(step.name(node) for node in route[1:-1]), f"{format_number(ends[i] / 1e9)} s"]
        for i, route in enumerate(schedule.routes[:MAX_ROUTES])
    ]
    more = len(schedule.routes) - len(rows)
    yield page.section(
        "Routes",
        "Each microbatch starts at its data node and ends there, with head and loss; its gradients go the same way "
        "back." + (f" The first {MAX_ROUTES}; {more} more are in the schedule." if more else ""),
        page.table("routes", ["microbatch", "data node", *visits, "through at"], rows, numbers_from=len(visits) + 2),
    )


def verdict(schedule: Schedule, step: PlannedStep, violations: Sequence[Violation]) -> Verdict:
    """Return the verdict: good if the plan obeys every guideline and no other plan that was tried is faster."""
    faster = [name for name, seconds in schedule.compared.items() if seconds < schedule.step_s]
    badge = f"violates {format_count(len(violations), 'guideline')}" if violations else "obeys every guideline"
    possible_gain = [] if schedule.gap is None else [(schedule.gap, "maximum gain of any other plan: 1 − bound ÷ step")]
    return Verdict(
        good=not violations and not faster,
        badge="slower than an alternative" if faster and not violations else badge,
        summary=f"{_step_time(schedule)} {_bound_sentence(schedule)}"
        + (f" First violated guideline: {violations[0]}." if violations else ""),
        numbers=[
            (f"{format_number(schedule.step_s)} s", "one step, simulated"),
            *((f"{100 * gap:.1f} %", label) for gap, label in possible_gain),
        ],
        cost=_cost_sentence(step),
    )


def _step_time(schedule: Schedule) -> str:
    text = f"A step takes {format_number(schedule.step_s)} s on {format_count(len(schedule.nodes), 'node')}"
    if not schedule.compared:
        return f"{text}."
    name, seconds = min(schedule.compared.items(), key=lambda pair: pair[1])
    change = abs(1 - schedule.step_s / seconds) if seconds else 0.0
    if change < 0.0005:
        return f"{text}, the same as the best alternative, {name}."
    than = "less" if schedule.step_s < seconds else "more"
    return f"{text}, {change:.1%} {than} than the best alternative, {name} ({format_number(seconds)} s)."


def _bound_sentence(schedule: Schedule) -> str:
    if schedule.gap is None:
        return "Passes cost nothing here, so the possible gain of another plan is unknown."
    if schedule.gap < 0.0005:
        return "No plan can be faster."
    return f"No plan can take less than {format_number(schedule.bound.step_s)} s ({schedule.bound.binds})."


def _cost_sentence(step: PlannedStep) -> str:
    """Return idle time, and waits of forwards for their node."""
    idle = 1 - sum(step.busy) / len(step.busy)
    waits = step.waits
    waited = sum(done.waited for done in waits) / 1e9
    text = f"Lost: nodes idle {idle:.0%} of the step"
    return (
        f"{text}; {format_count(len(waits), 'forward')} waited for their node, {format_number(waited)} s in all."
        if waits
        else f"{text}."
    )
