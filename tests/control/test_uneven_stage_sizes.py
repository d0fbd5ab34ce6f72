"""Stages of unequal sizes: the largest go to the fastest workers with enough memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.control.facts import decisions as d
from support.control.scenarios import fleet, last, work_until
from support.control.simulated_fleet import SimulatedFleet

WORK, NEEDS = [1.5, 6.0, 3.0, 2.0, 1.0], [3, 6, 3, 2, 1]


def sized(machines: dict[str, tuple[int, float]], **changed: object) -> SimulatedFleet:
    simulation = fleet(stage_work=WORK, memory_needs=NEEDS, recovery={"strategy": "echo, checkpoint"}, **changed)
    simulation.machines = machines
    return simulation


def assignment(simulation: SimulatedFleet) -> dict[int, str]:
    return {member.stage: member.worker for member in last(simulation, d.Form).members}


def test_the_largest_stage_goes_to_the_fastest_worker() -> None:
    simulation = sized({f"w{n}": (0, pace) for n, pace in enumerate((3.0, 1.0, 5.0, 2.0, 4.0))}, spares=0)
    work_until(simulation, "run", 1)
    assert assignment(simulation) == {1: "w1", 2: "w3", 3: "w0", 0: "w4", 4: "w2"}


def test_a_fast_worker_without_room_gets_the_largest_stage_that_fits() -> None:
    simulation = sized({"w0": (2, 1.0), "w1": (0, 9.0), "w2": (0, 8.0), "w3": (0, 7.0), "w4": (0, 6.0)}, spares=0)
    work_until(simulation, "run", 1)
    assert assignment(simulation) == {1: "w4", 2: "w3", 3: "w0", 0: "w2", 4: "w1"}


def test_a_spare_without_room_waits_while_another_worker_is_started() -> None:
    simulation = sized({"w5": (1, 1.0)})
    work_until(simulation, "run", 2)
    before = assignment(simulation)
    assert "w5" not in before.values()
    simulation.lose(before[1])
    work_until(simulation, "run", 3)
    assert assignment(simulation) == before, "the same worker, started again"
    simulation.lose(before[4])
    work_until(simulation, "run", 4)
    assert assignment(simulation)[4] == "w5"
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_a_run_without_room_for_a_stage_reports_it() -> None:
    simulation = sized({f"w{n}": (5, 1.0) for n in range(9)})
    simulation.behave()
    assert simulation.ending is not None
    assert simulation.ending.reason == "no spare's device has room for stage 1; there is no room for another"


memory = st.sampled_from([0, 0, 0, 6, 3, 1])
machine = st.tuples(memory, st.sampled_from([1.0, 1.5, 2.0]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(machine, min_size=6, max_size=6), st.data())
def test_no_worker_gets_a_stage_that_does_not_fit(machines: list[tuple[int, float]], data: st.DataObject) -> None:
    simulation = sized({f"w{n}": found for n, found in enumerate(machines)}, steps=4)
    for _ in range(200):
        if simulation.ending is not None:
            break
        if simulation.alive and data.draw(st.integers(0, 19)) == 0:
            simulation.lose(data.draw(st.sampled_from(sorted(simulation.alive))))
        elif pending := simulation.pending():
            simulation.work(data.draw(st.sampled_from(pending)))
    forms = [fact for fact in simulation.history if isinstance(fact, d.Form)]
    for member in (member for form in forms for member in form.members):
        room = simulation.machines[member.worker][0]
        assert not room or room >= NEEDS[member.stage]
