"""Handovers from slow workers: only if they pay off, to a spare that is not slow, and at most once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.measurements import EdgeTravelTimes, PassDurations
from planaria.control.slowness.decisions import MIN_S_BETWEEN_HANDOVERS
from support.control.open_fleet import OpenFleet
from support.control.single_replica import SHARED, started

SLOW = 2
"""a stage"""


def running(**changed: Any) -> OpenFleet:
    """Start a run in its first step; a step takes 100 s."""
    fleet = OpenFleet(started(**({"steps": 5, "diagnose": "act", "spares": 1} | changed)))
    while fleet.state.phase != "run" or (fleet.started.spares and not fleet.run.spares):
        act(fleet, 1)
    return fleet


def act(fleet: OpenFleet, rounds: int) -> None:
    """Let every worker act ``rounds`` times."""
    for _ in range(rounds):
        for worker in fleet.pending():
            if worker in fleet.pending():
                fleet.work(worker)


def reliefs(fleet: OpenFleet) -> list[d.HandOverSlowStage]:
    return [fact for fact in fleet.history if isinstance(fact, d.HandOverSlowStage)]


def test_a_spare_takes_over_between_two_steps() -> None:
    fleet = running()
    slow = fleet.state.holders[SLOW]
    fleet.measure({SLOW: 3.0})
    fleet.behave()

    (relief,) = reliefs(fleet)
    assert (relief.node, relief.worker) == (SLOW, slow)
    assert relief.step_s == 100.0
    assert relief.predicted_s == pytest.approx(100 / 3)
    (form,) = (f for f in fleet.history if isinstance(f, d.Form) and f.outcome == "handed over")
    assert form.holders[SLOW] not in (slow, None)
    assert fleet.run.workers[slow].status == "spare"
    assert fleet.ending is not None
    assert fleet.ending.outcome == "finished"


@pytest.mark.parametrize(
    ("changed", "slow"),
    [
        ({"diagnose": "report"}, {SLOW: 3.0}),
        ({"spares": 0}, {SLOW: 3.0}),
        ({"steps": 1}, {SLOW: 3.0}),
        ({}, {SLOW: 1.2}),
        ({}, dict.fromkeys(range(1, 5), 3.0)),
    ],
)
def test_without_a_spare_or_a_clear_gain_no_stage_is_handed_over(
    changed: dict[str, Any], slow: dict[int, float]
) -> None:
    """Diagnosis only, no spare, the end of the run, a small slowdown, or a uniform one."""
    fleet = running(**changed)
    fleet.measure(slow)
    fleet.behave()

    assert reliefs(fleet) == []
    assert fleet.ending is not None


@pytest.mark.slow
def test_a_slow_spare_replaces_lost_workers_but_not_slow_ones() -> None:
    fleet = running(steps=5000, replace=False)
    first = fleet.state.holders[SLOW]
    fleet.measure({SLOW: 3.0})
    act(fleet, 60)
    assert fleet.run.workers[first].slow
    for _ in range(20):
        fleet.measure({SLOW: 5.0})
        act(fleet, 30)

    assert len(reliefs(fleet)) == 1, "the only spare was slow itself"
    fleet.lose_node(SLOW + 1)
    act(fleet, 60)
    assert fleet.state.holders[SLOW + 1] == first


@pytest.mark.slow
def test_each_spare_that_was_not_slow_takes_over_once() -> None:
    fleet = running(steps=500, spares=3)
    for _ in range(12):
        fleet.measure({SLOW: 3.0})
        act(fleet, 40)

    assert len(reliefs(fleet)) == 3, "three spares that had not been slow"
    assert len({relief.worker for relief in reliefs(fleet)}) == 3


def test_handovers_are_separated_by_a_pause() -> None:
    fleet = running(steps=5000, spares=3)
    fleet.measure({SLOW: 3.0, 3: 3.0})
    act(fleet, 20)
    assert len(reliefs(fleet)) == 1
    assert fleet.run.last_handover_at is not None
    before = fleet.run.gauges.clock

    fleet.measure({3: 3.0}, times=1)
    act(fleet, 20)

    assert fleet.run.gauges.clock > before + MIN_S_BETWEEN_HANDOVERS
    assert len(reliefs(fleet)) == 2


def on_a_schedule_with_a_slow_link(**changed: Any) -> OpenFleet:
    """From the eighth report on, an edge's activations take 50 times as long."""
    plain = started(**({"steps": 5000, "diagnose": "act", "spares": 0} | changed))
    fleet = OpenFleet(e.RunStarted.model_validate(plain.model_dump() | SHARED))
    while fleet.state.phase != "run":
        act(fleet, 1)
    report_flows(fleet, range(7), set())
    report_flows(fleet, range(7, 10), {(3, 4)})
    act(fleet, 2)
    return fleet


def report_flows(fleet: OpenFleet, reports: Iterable[int], slow: set[tuple[int, int]]) -> None:
    """Report the transfer times of activations."""
    for report in reports:
        for node, worker in sorted(fleet.state.holders.items()):
            pairs = [pair for pair in fleet.state.pairs_of(fleet.state.holders) if node in pair]
            peers = {peer for pair in pairs for peer in {*pair} - {node}}
            flows = {
                p: EdgeTravelTimes(frames=8, low_s=0.05 if (p, node) in slow else 0.001, high_s=0.002) for p in peers
            }
            passes = {"forward": PassDurations(count=1, median_s=1.0)}
            values = {"step": 2 * report + 1, "steps": 2, "seconds": 2.0, "waited": {}, "passes": passes}
            fleet.report(fleet.alive[worker], e.WorkerMeasurements, **values, flows=flows)


def answer_plan(fleet: OpenFleet, before_s: float) -> None:
    """Let the planner answer with routes on which a step takes 1 s instead of ``before_s``."""
    nodes = fleet.replans.pop(0).nodes
    routes = [[6, 1, 2, 3, 6], *fleet.started.routes[1:]]
    fleet.happened(e.Replanned(nodes=nodes, routes=routes, step_s=1.0, seconds=0.1, before_s=before_s))


def test_a_slow_link_is_routed_around_if_that_pays_off() -> None:
    fleet = on_a_schedule_with_a_slow_link()
    (replan,) = fleet.replans
    assert [(link.source, link.target, link.seconds) for link in replan.links] == [(3, 4, 0.05)]
    assert fleet.state.phase == "replan"

    answer_plan(fleet, before_s=2.0)

    assert isinstance(fleet.history[-2], d.Reroute)
    form = fleet.history[-1]
    assert isinstance(form, d.Form)
    assert form.routes[0] == [6, 1, 2, 3, 6]
    assert all(isinstance(member.source, d.Keep) for member in form.members)
    assert not fleet.replans, "it is requested once"


def test_a_plan_with_too_little_gain_is_rejected() -> None:
    fleet = on_a_schedule_with_a_slow_link()

    answer_plan(fleet, before_s=1.0)

    assert not any(isinstance(fact, d.Reroute) for fact in fleet.history)
    assert isinstance(fleet.history[-1], d.RunStep), "training continues as before"

    report_flows(fleet, range(10, 13), {(3, 4), (4, 3)})
    act(fleet, 2)

    (replan,) = fleet.replans
    assert [(link.source, link.target) for link in replan.links] == [(3, 4), (4, 3)], "a second link is planned for too"


@pytest.mark.parametrize(
    ("reports", "blamed"),
    [
        ([(3, 2, 0.1), (4, 3, 0.0), (2, 3, 0.3)], [2, 3]),
        ([(0, 1, 0.0), (1, 2, 0.2), (2, 3, 0.3), (3, 2, 0.1)], [2, 3]),
        ([(2, 3, 0.1), (3, 2, 0.3)], [3, 2]),
        ([(3, 2, 0.1), (4, 3, 0.0)], None),
        ([(0, 1, 0.1)], None),
    ],
)
def test_the_earliest_of_chained_waits_identifies_the_link(
    reports: list[tuple[int, int, float]], blamed: list[int] | None
) -> None:
    """(node, peer, since); no link is reported while a chain of waits ends at a node without a report."""
    fleet = OpenFleet(started(diagnose="report"))
    while fleet.state.phase != "run":
        act(fleet, 1)
    for node, peer, since_s in reports:
        fleet.break_edge((node, peer), detail="", waited_s=2.0, wait_began_s=since_s)
    fleet.expire_grace()

    found = [fact.nodes for fact in fleet.history if isinstance(fact, d.SlowPartFound)]
    assert found == ([] if blamed is None else [blamed])
    assert isinstance(fleet.history[-1], d.Form), "the edges are replaced in any case"
