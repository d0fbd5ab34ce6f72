from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.planner.guidelines import planned_passes
from planaria.planner.initial_plans import random_routes
from planaria.planner.problem import PlanningProblem, Solution
from planaria.planner.schedule import ProvedBound, Schedule, SearchRecord, make_schedule
from planaria.report.run.schedule_figures import (
    MAX_NODES,
    PlannedStep,
    busy_figure,
    compared_figure,
    gantt_figure,
    sites_figure,
    step_of,
)
from planaria.report.run.schedule_page import MAX_ROUTES, write_page

S = 1_000_000_000
OTHERS = {"<i>rows": 20.0, "columns": 16.0}
WAITS = "a forward waits for its node"


def problem_with(
    sizes: tuple[int, ...], microbatches: int, visits: int, sites: int = 2, slots: int = 3, transmit: int = 0
) -> PlanningProblem:
    """Nodes in turn at the sites, 1 s apart; entry, block and return take 1, 2, 0.5 s forward and 1, 1, 0.5 s back."""
    nodes = sum(sizes)
    forward, backward = ([[seconds] * nodes for seconds in kind] for kind in ((1, 2, 0.5), (1, 1, 0.5)))
    return PlanningProblem(
        names=tuple(f"node {n}" for n in range(nodes)),
        sites=tuple(f"site {s}" for s in range(sites)),
        site=np.arange(nodes) % sites,
        sizes=sizes,
        microbatches=microbatches,
        visits=visits,
        swaps=2,
        jump=4,
        forward=np.array(np.array(forward) * S, np.int64),
        backward=np.array(np.array(backward) * S, np.int64),
        link=np.full((sites, sites), S, np.int64),
        transmit=np.full((sites, sites), transmit * S, np.int64) if transmit else np.zeros((1, 1), np.int64),
        slots=np.full(nodes, slots, np.int64),
        role=np.zeros(nodes, np.int64),
    )


def schedule_with(problem: PlanningProblem, routes: list[list[int]] | None = None, seed: int = 0) -> Schedule:
    """``routes`` over stages of nodes in order; random ones unless given."""
    stages = np.split(np.arange(problem.nodes), np.cumsum(problem.sizes)[:-1])
    stage = np.repeat(np.arange(len(problem.sizes)), problem.sizes)
    if routes is None:
        solution = random_routes(problem, [own.tolist() for own in stages], random.Random(seed), problem.swaps)
    else:
        way = np.array(routes, np.int64)
        solution = Solution(stage, way[:, 0], way[:, 1:-1])
    bound, found = ProvedBound(step_s=6.0, binds="busiest <node>"), SearchRecord(seed=7, moves=12345, seconds=3.25)
    return make_schedule(problem, solution, 8.0, bound, OTHERS, found)


def two_meet(slots: int = 3) -> Schedule:
    """Two data nodes send to one worker at the same time."""
    return schedule_with(problem_with((2, 1), 1, 1, slots=slots), [[0, 2, 0], [1, 2, 1]])


def text_of(schedule: Schedule, tmp_path: Path) -> str:
    return write_page(schedule, tmp_path / "plan.html").read_text()


def strips(step: PlannedStep) -> list[tuple[float, float]]:
    """(from, to) of each strip, seconds."""
    (trace,) = [trace for trace in gantt_figure(step).data if trace.name == WAITS]
    return [(base, base + length) for base, length in zip(trace.base, trace.x, strict=True)]


def test_headline_numbers_are_the_schedules(tmp_path: Path) -> None:
    text = text_of(schedule_with(problem_with((2, 2, 3, 2), 3, 2)), tmp_path)
    cards = dict(re.findall(r'<div class="card"><span>(.*?)</span><b>(.*?)</b>', text))
    small = dict(re.findall(r'<div class="card"><span>(.*?)</span><b>.*?</b><i>(.*?)</i>', text))
    assert cards == {
        "step": "8.00 s", "lower bound": "6.00 s", "gap": "25.0 %", "search": "3.2 s",
        "nodes": "9", "stages": "3", "microbatches": "6", "visits": "2",
    }  # fmt: skip
    assert small["search"] == "12,345 moves, seed 7" and small["lower bound"] == "busiest &lt;node&gt;"
    assert small["nodes"] == "at 2 sites" and small["stages"].endswith("2 data nodes")


def test_alternatives_are_listed_fastest_first_with_their_ratios(tmp_path: Path) -> None:
    schedule = two_meet()
    text = text_of(schedule, tmp_path)
    rows = re.findall(r'<tr><td>([^<]*)</td><td class="number">([^<]*)</td><td class="number">([^<]*)</td></tr>', text)
    assert rows == [
        ("this plan", "8.00 s", "1.000"), ("columns", "16.00 s", "0.500"), ("&lt;i&gt;rows", "20.00 s", "0.400")
    ]  # fmt: skip
    fig = compared_figure(schedule)
    assert list(fig.data[0].x) == [8.0, 16.0, 20.0]
    assert [shape.x0 for shape in fig.layout.shapes] == [6.0]


def test_a_plan_with_nothing_to_compare_it_with_has_a_page_too(tmp_path: Path) -> None:
    assert 'id="compared"' in text_of(two_meet().model_copy(update={"compared": {}}), tmp_path)


def test_every_pass_is_one_bar_where_the_clock_has_it() -> None:
    schedule = schedule_with(problem_with((2, 2, 2, 2), 3, 2))
    traces = {trace.name: trace for trace in gantt_figure(step_of(schedule)).data if trace.name != WAITS}
    times = planned_passes(schedule.problem, schedule.solution)
    kinds = {"forward": times.starts[:, :3], "loss": times.starts[:, 3:4], "backward": times.starts[:, 4:]}
    assert set(traces) == set(kinds)
    for kind, starts in kinds.items():
        assert sorted(traces[kind].base) == pytest.approx(sorted((starts / S).ravel()))
    assert sum(len(trace.x) for trace in traces.values()) == 6 * 2 * 4
    assert sum(sum(trace.x) for trace in traces.values()) == pytest.approx((times.ends - times.starts).sum() / S)


def test_a_forward_that_finds_its_node_busy_is_the_one_that_waits(tmp_path: Path) -> None:
    schedule = two_meet()
    assert strips(step_of(schedule)) == [(2.0, 4.0)]
    text = text_of(schedule, tmp_path)
    assert "1 of 2 forwards waited so, 2.00 s in all; 0 backward passes and losses" in text


def test_a_forward_waits_for_a_slot_of_an_idle_node() -> None:
    # Microbatch 0 holds the only slot from its forward at 2 s to the end of its backward at 8 s.
    assert strips(step_of(two_meet(slots=1))) == [(2.0, 8.0)]


def test_waiting_for_a_link_is_transit_not_a_wait_at_the_node() -> None:
    schedule = schedule_with(problem_with((1, 1), 2, 1, transmit=4), [[0, 1, 0], [0, 1, 0]])
    step = step_of(schedule)
    # Sent at 1 s and at 2 s; the second gets the link at 5 s.
    assert [done.arrives / S for done in step.passes if done.kind == "forward" and done.hop == 1] == [2.0, 6.0]
    assert step.waits == [] and strips(step) == []
    messages, carried = step.links[0, 1]
    assert messages == 4 and carried >= (1 + 4) * S


def test_losses_that_wait_are_no_collisions_and_free_no_slot(tmp_path: Path) -> None:
    problem = problem_with((1, 1), 3, 1)
    problem.forward[0] = 10 * S
    schedule = schedule_with(problem, [[0, 1, 0]] * 3)
    step = step_of(schedule)
    # The first loss is at the data node at 14 s, which lets the second microbatch in until 20 s, then the third.
    (first, *_) = [done for done in step.passes if done.kind == "loss"]
    assert (first.arrives, first.starts) == (14 * S, 20 * S)
    assert step.waits == [] and "0 of 3 forwards waited so, 0.00 s in all" in text_of(schedule, tmp_path)
    assert step.held[0] == 3


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 2), st.integers(1, 4))
def test_a_pass_waits_only_while_its_node_is_busy_or_full(
    seed: int, slots: int, transmit: int, microbatches: int
) -> None:
    problem = replace(problem_with((2, 2, 2, 2), microbatches, 2, sites=3, transmit=transmit), swaps=0)
    problem.slots[:] = slots
    step = step_of(schedule_with(problem, seed=seed))
    assert all(done.arrives <= done.starts for done in step.passes)
    spans = [[(done.starts, done.ends) for done in step.passes if done.node == n] for n in range(problem.nodes)]
    backs = {(d.microbatch, d.node): d.ends for d in step.passes if d.kind == "backward" and d.hop <= problem.visits}
    for late in step.waits:
        others = [d for d in step.passes if d.kind == "forward" and d.node == late.node]
        held = [(d.starts, backs[d.microbatch, d.node]) for d in others if d is not late]
        for t in {late.arrives, *(end for _, end in spans[late.node] if late.arrives < end < late.starts)}:
            busy = any(start <= t < end for start, end in spans[late.node])
            assert busy or sum(start <= t < end for start, end in held) >= slots
    assert all(most <= slots for most in step.held)


def test_links_carry_what_routes_send_there_and_back() -> None:
    # Nodes 0 and 2 are at site 0, nodes 1 and 3 at site 1.
    schedule = schedule_with(problem_with((1, 1, 2), 2, 2), [[0, 1, 2, 0], [0, 1, 3, 0]])
    links = step_of(schedule).links
    assert links == {(0, 1): (4, 4 * S), (1, 0): (4, 4 * S), (0, 0): (2, 2 * S), (1, 1): (2, 2 * S)}


def test_cells_have_their_numbers_and_links_without_messages_are_blank() -> None:
    fig = sites_figure(["<b>x", "y"], [[1.25, None], [None, 10.0]], [["one", "none"], ["none", "two"]], "#000000")
    (heat,) = fig.data
    assert list(heat.text[0]) == ["1.25", ""] and list(heat.z[1]) == [None, 10.0] and heat.texttemplate
    assert heat.customdata[0][1] == "&lt;b&gt;x → y<br>none"
    many = [f"s{n}" for n in range(30)]
    table = [[1.0] * 30] * 30
    assert sites_figure(many, table, [[""] * 30] * 30, "#000000").data[0].texttemplate is None


def test_busy_bars_are_shares_of_the_step_with_the_used_slots() -> None:
    step = step_of(two_meet())
    # The worker: two forwards of 2 s, two backwards of 1 s, in 12 s; it holds both microbatches at once.
    worker = busy_figure(step).data[1]
    assert step.makespan == 12 * S and worker.name == "stage 1"
    assert list(worker.x) == [50.0] and list(worker.text) == ["50 % · 2 of 3 slots"]
    assert step.held == [1, 1, 2]
    assert step_of(two_meet(slots=1)).held == [1, 1, 1]


def test_the_busiest_of_too_many_nodes_are_drawn_with_a_note(tmp_path: Path) -> None:
    problem = problem_with((1, 22, 21), 2, 2)
    schedule = schedule_with(problem, [[0, 1, 23, 0], [0, 22, 43, 0]])
    step = step_of(schedule)
    fig = gantt_figure(step)
    rows = fig.layout.yaxis.ticktext
    assert len(rows) == MAX_NODES < problem.nodes
    assert {f"node {n} · stage {s}" for n, s in ((0, 0), (1, 1), (22, 1), (23, 2), (43, 2))} <= set(rows)
    bars = sum(len(trace.x) for trace in fig.data if trace.name != WAITS)
    assert bars == len(step.passes), "every pass is drawn here"
    assert sum(len(trace.x) for trace in busy_figure(step).data) == problem.nodes
    assert f"The {MAX_NODES} busiest of 44 nodes." in text_of(schedule, tmp_path)
    assert "busiest of" not in text_of(two_meet(), tmp_path)


def test_names_from_outside_are_not_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    problem = replace(problem_with((2, 1), 1, 1), names=("<b>&a</b>", evil, "<i>c"), sites=("<u>here", evil))
    text = text_of(schedule_with(problem, [[0, 2, 0], [1, 2, 1]]), tmp_path)
    assert evil not in text
    own = re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.DOTALL)
    assert "&lt;b&gt;&amp;a&lt;/b&gt;" in own and "<b>&a" not in own and "<i>c" not in own
    step = step_of(schedule_with(problem, [[0, 2, 0], [1, 2, 1]]))
    for fig in (gantt_figure(step), busy_figure(step)):
        assert "&lt;i&gt;c · stage 1" in fig.layout.yaxis.ticktext
    assert not any("<i>" in hover for trace in gantt_figure(step).data for hover in trace.customdata)


def test_nodes_of_one_name_have_rows_of_their_own() -> None:
    problem = replace(problem_with((2, 1), 1, 1), names=("twin", "twin", "worker"))
    fig = gantt_figure(step_of(schedule_with(problem, [[0, 2, 0], [1, 2, 1]])))
    assert list(fig.layout.yaxis.ticktext) == ["twin · stage 0", "twin · stage 0", "worker · stage 1"]
    assert {row for trace in fig.data for row in trace.y} == {"0", "1", "2"}


def test_routes_are_listed_up_to_a_number_and_the_rest_is_counted(tmp_path: Path) -> None:
    text = text_of(
        schedule_with(problem_with((1, 1, 1), MAX_ROUTES + 3, 2), [[0, 1, 2, 0]] * (MAX_ROUTES + 3)), tmp_path
    )
    row = "<td>{}</td><td>node 0</td><td>node 1 · stage 1</td><td>node 2 · stage 2</td>"
    assert row.format(MAX_ROUTES - 1) in text and row.format(MAX_ROUTES) not in text
    assert f"The first {MAX_ROUTES}; 3 more are in the schedule." in text
    assert "<tr><td>1</td><td>node 1</td></tr>" in text, "the arrangement"


def test_a_plan_that_breaks_guidelines_is_not_called_good(tmp_path: Path) -> None:
    wrong = schedule_with(problem_with((1, 1, 1), 2, 1), [[0, 1, 0], [0, 1, 0]])
    text = text_of(wrong, tmp_path)
    assert 'class="badge bad">violates 1 guideline<' in text and "CC2: stage 1 is visited 2 times" in text
    assert 'class="badge good">obeys every guideline' in text_of(two_meet(), tmp_path)


def test_a_schedule_that_deadlocks_has_no_page(tmp_path: Path) -> None:
    crossed = schedule_with(problem_with((2, 1, 1), 1, 2, slots=1), [[0, 2, 3, 0], [1, 3, 2, 1]])
    with pytest.raises(UserError, match=r"memory deadlocks: the forward of microbatch \d at node \d waits for a slot"):
        write_page(crossed, tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("route", "back"), [([0, 3, 2, 4, 0], 1), ([0, 2, 3, 4, 0], 0)])
def test_the_page_has_the_allowed_and_the_planned_steps_back(route: list[int], back: int, tmp_path: Path) -> None:
    nodes = [0, *(node - 1 for node in route[1:-1]), 0]
    schedule = schedule_with(problem_with((1, 1, 1, 1), 1, 3), [nodes])
    assert f"may go back 2 times by one place (in this plan, at most {back})" in text_of(schedule, tmp_path)


def test_the_sum_of_transit_times_keeps_milliseconds(tmp_path: Path) -> None:
    problem = problem_with((1, 1), 1, 1)
    fast = replace(problem, link=problem.link // 80, forward=problem.forward // 80, backward=problem.backward // 80)
    text = text_of(schedule_with(fast, [[0, 1, 0]]), tmp_path)
    assert "together: 4 messages, 0.05 s." in text
