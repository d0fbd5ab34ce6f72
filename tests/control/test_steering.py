"""When a slow worker hands its stage over: only where that pays, to a spare that is not slow, and not to and fro."""

from __future__ import annotations

from typing import Any

import pytest
from open_fleet import OpenFleet
from test_machine import started

from planaria.control.steering import PAUSE_S
from planaria.record import decisions as d

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
