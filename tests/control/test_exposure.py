"""Machines that hold more stages than the others could bring back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from herd_steps import started, work_until
from open_herd import OpenHerd

from planaria.control.apply_base import set_workers
from planaria.control.staffing import exposed
from planaria.control.state import RunState


def spread(strategy: str, guests: int, **options: Any) -> RunState:
    """A run of four block stages, of which the first so many are on one machine that has joined."""
    made = OpenHerd(started(1, 4, {"kind": "local"}, spares=0, recovery={"strategy": strategy, "options": options}))
    work_until(made, lambda run: run.replicas[0].step > 0)
    there = [made.run.replicas[0].holders[stage] for stage in range(1, 1 + guests)]
    return set_workers(made.run, {worker: replace(made.run.workers[worker], host="g1") for worker in there})


def test_as_many_stages_as_may_be_lost_together_are_no_matter() -> None:
    assert exposed(spread("snapshot", 2, tolerate=2)) == {}
    assert exposed(spread("snapshot", 1, tolerate=1)) == {}


def test_one_more_is_said_with_what_it_would_cost() -> None:
    told = exposed(spread("snapshot", 2, tolerate=1))["g1"]
    assert told.startswith(
        "machine g1 holds stages 1, 2: were it lost, the run could not go on (snapshot cannot, 2 of 5"
    )
    behind = exposed(spread("snapshot, checkpoint", 2, tolerate=1))["g1"]
    assert behind == "machine g1 holds stages 1, 2: were it lost, all would go back to the newest checkpoint"


def test_it_holds_of_every_strategy() -> None:
    assert "all would go back" in exposed(spread("redundant, checkpoint", 2, forward=False))["g1"]
    assert exposed(spread("echo, checkpoint", 2, distance=2)) == {}
    assert exposed(spread("checkpoint", 3)) == {}, "each stage alone costs as much"
