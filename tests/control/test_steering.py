"""When a slow worker hands its stage over: only where that pays, to a spare that is not slow, and not to and fro."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from open_fleet import OpenFleet
from test_machine import SHARED, started

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.gauges import Flow, Passes
from planaria.control.steering import PAUSE_S

SLOW = 2
"""a stage"""


def running(**changed: Any) -> OpenFleet:
    """A run in its first step, in which a step takes 100 seconds."""
    fleet = OpenFleet(started(**({"steps": 5, "diagnose": "act", "spares": 1} | changed)))
    while fleet.state.phase != "run" or (fleet.started.spares and not fleet.run.spares):
        go_on(fleet, 1)
    return fleet


def go_on(fleet: OpenFleet, rounds: int) -> None:
    """Everyone does what it was told, so many times."""
    for _ in range(rounds):
        for worker in fleet.pending():
            if worker in fleet.pending():
                fleet.work(worker)


def deeds(fleet: OpenFleet) -> list[d.Relieve]:
    return [fact for fact in fleet.history if isinstance(fact, d.Relieve)]


def test_the_spare_takes_over_between_two_steps_and_the_run_goes_on() -> None:
    fleet = running()
    slow = fleet.state.holders[SLOW]
    fleet.measure({SLOW: 3.0})
    fleet.behave()

    (deed,) = deeds(fleet)
    assert (deed.node, deed.worker) == (SLOW, slow)
    assert deed.step_s == 100.0
    assert deed.predicted_s == pytest.approx(100 / 3)
    (form,) = (f for f in fleet.history if isinstance(f, d.Form) and f.outcome == "handed over")
    assert form.holders[SLOW] not in (slow, None)
    assert fleet.run.workers[slow].status == "spare"
    assert fleet.ending is not None
    assert fleet.ending.outcome == "finished"


@pytest.mark.parametrize(
    ("changed", "slow"),
    [
        ({"diagnose": "tell"}, {SLOW: 3.0}),
        ({"spares": 0}, {SLOW: 3.0}),
        ({"steps": 1}, {SLOW: 3.0}),
        ({}, {SLOW: 1.2}),
        ({}, dict.fromkeys(range(1, 5), 3.0)),
    ],
)
def test_otherwise_nobody_is_relieved(changed: dict[str, Any], slow: dict[int, float]) -> None:
    """Who only looks, has no spare, is at the run's end, or has nobody slow."""
    fleet = running(**changed)
    fleet.measure(slow)
    fleet.behave()

    assert deeds(fleet) == []
    assert fleet.ending is not None


@pytest.mark.slow
def test_a_spare_that_was_slow_takes_over_what_is_lost_but_nothing_that_is_slow() -> None:
    fleet = running(steps=5000, replace=False)
    first = fleet.state.holders[SLOW]
    fleet.measure({SLOW: 3.0})
    go_on(fleet, 60)
    assert fleet.run.workers[first].slow
    for _ in range(20):
        fleet.measure({SLOW: 5.0})
        go_on(fleet, 30)

    assert len(deeds(fleet)) == 1, "the only spare was slow itself"
    fleet.lose_node(SLOW + 1)
    go_on(fleet, 60)
    assert fleet.state.holders[SLOW + 1] == first


@pytest.mark.slow
def test_each_spare_that_was_not_slow_may_take_over_once() -> None:
    fleet = running(steps=500, spares=3)
    for _ in range(12):
        fleet.measure({SLOW: 3.0})
        go_on(fleet, 40)

    told = deeds(fleet)
    assert len(told) == 3, "three spares that had not been slow"
    assert len({deed.worker for deed in told}) == 3


def test_two_deeds_are_half_a_minute_of_training_apart() -> None:
    fleet = running(steps=5000, spares=3)
    fleet.measure({SLOW: 3.0, 3: 3.0})
    go_on(fleet, 20)
    assert len(deeds(fleet)) == 1
    assert fleet.run.relieved is not None
    before = fleet.run.gauges.clock

    fleet.measure({3: 3.0}, times=1)
    go_on(fleet, 20)

    assert fleet.run.gauges.clock > before + PAUSE_S
    assert len(deeds(fleet)) == 2


def on_a_schedule_with_a_slow_link(**changed: Any) -> OpenFleet:
    """An edge's activations take 50 times as long as at first, as of the eighth report."""
    plain = started(**({"steps": 5000, "diagnose": "act", "spares": 0} | changed))
    fleet = OpenFleet(e.RunStarted.model_validate(plain.model_dump() | SHARED))
    while fleet.state.phase != "run":
        go_on(fleet, 1)
    report_ways(fleet, range(7), set())
    report_ways(fleet, range(7, 10), {(3, 4)})
    go_on(fleet, 2)
    return fleet


def report_ways(fleet: OpenFleet, reports: Iterable[int], slow: set[tuple[int, int]]) -> None:
    """All tell what activations took to reach them."""
    for report in reports:
        for node, worker in sorted(fleet.state.holders.items()):
            pairs = [pair for pair in fleet.state.pairs_of(fleet.state.holders) if node in pair]
            peers = {peer for pair in pairs for peer in {*pair} - {node}}
            flows = {p: Flow(frames=8, low_s=0.05 if (p, node) in slow else 0.001, high_s=0.002) for p in peers}
            told = {"node": node, "stage": fleet.stage_of[node], "generation": fleet.state.generation, "waited": {}}
            passes = {"forward": Passes(count=1, median_s=1.0)}
            fleet.happened(
                e.Gauged(worker=worker, step=2 * report + 1, steps=2, seconds=2.0, passes=passes, flows=flows, **told)
            )


def offer(fleet: OpenFleet, before_s: float) -> None:
    """The planner has found routes on which a step takes a second, in place of ``before_s``."""
    nodes = fleet.asked.pop(0).nodes
    routes = [[6, 1, 2, 3, 6], *fleet.started.routes[1:]]
    fleet.happened(e.Replanned(nodes=nodes, routes=routes, step_s=1.0, seconds=0.1, before_s=before_s))


def test_a_slow_link_is_gone_around_when_that_pays() -> None:
    fleet = on_a_schedule_with_a_slow_link()
    (asked,) = fleet.asked
    assert [(way.source, way.target, way.seconds) for way in asked.ways] == [(3, 4, 0.05)]
    assert fleet.state.phase == "replan"

    offer(fleet, before_s=2.0)

    assert isinstance(fleet.history[-2], d.Reroute)
    form = fleet.history[-1]
    assert isinstance(form, d.Form)
    assert form.routes[0] == [6, 1, 2, 3, 6]
    assert all(isinstance(member.source, d.Keep) for member in form.members)
    assert not fleet.asked, "it is asked for once"


def test_a_plan_that_gains_too_little_is_not_taken() -> None:
    fleet = on_a_schedule_with_a_slow_link()

    offer(fleet, before_s=1.0)

    assert not any(isinstance(fact, d.Reroute) for fact in fleet.history)
    assert isinstance(fleet.history[-1], d.RunStep), "training goes on as before"

    report_ways(fleet, range(10, 13), {(3, 4), (4, 3)})
    go_on(fleet, 2)

    (asked,) = fleet.asked
    assert [(way.source, way.target) for way in asked.ways] == [(3, 4), (4, 3)], "a second link is planned for too"


@pytest.mark.parametrize(
    ("told", "blamed"),
    [
        ([(3, 2, 0.1), (4, 3, 0.0), (2, 3, 0.3)], [2, 3]),
        ([(0, 1, 0.0), (1, 2, 0.2), (2, 3, 0.3), (3, 2, 0.1)], [2, 3]),
        ([(2, 3, 0.1), (3, 2, 0.3)], [3, 2]),
        ([(3, 2, 0.1), (4, 3, 0.0)], None),
        ([(0, 1, 0.1)], None),
    ],
)
def test_of_those_who_wait_for_each_other_the_first_names_the_link(
    told: list[tuple[int, int, float]], blamed: list[int] | None
) -> None:
    """(who, for whom, since when); nobody is blamed while a chain of waits leads to somebody who has told nothing."""
    fleet = OpenFleet(started(diagnose="tell"))
    while fleet.state.phase != "run":
        go_on(fleet, 1)
    for node, peer, since_s in told:
        worker, generation = fleet.state.holders[node], fleet.state.generation
        fleet.happened(
            e.EdgeBroken(
                worker=worker, node=node, peer=peer, generation=generation, detail="", waited_s=2.0, since_s=since_s
            )
        )
    fleet.expire_grace()

    found = [fact.nodes for fact in fleet.history if isinstance(fact, d.Blamed)]
    assert found == ([] if blamed is None else [blamed])
    assert isinstance(fleet.history[-1], d.Form), "the edges are replaced in any case"
