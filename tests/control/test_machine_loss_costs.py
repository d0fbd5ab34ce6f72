"""Machines that hold more stages than the others could rebuild."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planaria.control.apply_base import set_workers
from planaria.control.machine_loss_costs import machine_loss_costs
from planaria.control.state.run import RunState
from support.control.open_replicas import OpenReplicas
from support.control.replica_steps import started, work_until


def spread(strategy: str, elsewhere: int, **options: Any) -> RunState:
    """Return a run of four block stages, the first ``elsewhere`` of them on one joined machine."""
    simulation = OpenReplicas(
        started(1, 4, {"kind": "local"}, spares=0, recovery={"strategy": strategy, "options": options})
    )
    work_until(simulation, lambda run: run.replicas[0].step > 0)
    there = [simulation.run.replicas[0].holders[stage] for stage in range(1, 1 + elsewhere)]
    return set_workers(simulation.run, {worker: replace(simulation.run.workers[worker], host="g1") for worker in there})


def test_a_machine_with_a_tolerable_number_of_stages_is_not_reported() -> None:
    assert machine_loss_costs(spread("snapshot", 2, tolerate=2)) == {}
    assert machine_loss_costs(spread("snapshot", 1, tolerate=1)) == {}


def test_a_machine_with_too_many_stages_is_reported_with_the_cost_of_its_loss() -> None:
    found = machine_loss_costs(spread("snapshot", 2, tolerate=1))["g1"]
    assert found.startswith(
        "machine g1 holds stages 1, 2; if it is lost, the run cannot continue (snapshot cannot rebuild it: 2 of 5"
    )
    behind = machine_loss_costs(spread("snapshot, checkpoint", 2, tolerate=1))["g1"]
    assert behind == "machine g1 holds stages 1, 2; if it is lost, all stages roll back to the newest checkpoint"


def test_exposure_depends_on_the_strategy() -> None:
    assert "all stages roll back" in machine_loss_costs(spread("redundant, checkpoint", 2, forward=False))["g1"]
    assert machine_loss_costs(spread("echo, checkpoint", 2, distance=2)) == {}
    assert machine_loss_costs(spread("checkpoint", 3)) == {}, "each stage alone costs as much"
