"""Target of a rollback: the start of the run or the last sealed checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.control.apply import apply
from planaria.control.facts import decisions as d
from planaria.control.facts.events import ReplicaPosition, RunStarted
from planaria.control.state.replica import ReplicaState
from planaria.control.state.rollback import RollbackPoint
from planaria.control.state.run import RunState


def started(**fields: Any) -> RunStarted:
    plain = {"name": "run", "seed": 1, "stages": 2, "steps": 9, "first_step": 4, "samples_per_step": 8}
    return RunStarted.model_validate({"wall_time": 0.0, "routes": [[0, 1, 2, 0]], **plain, **fields})


@pytest.mark.parametrize(
    ("load", "folder", "step"),
    [({}, "", -1), ({0: "a", 1: "a", 2: "a"}, "a", 4), ({0: "a", 1: "a"}, "", -1), ({0: "a", 1: "b", 2: "a"}, "", -1)],
)
def test_a_run_rolls_back_to_its_start_which_may_be_a_checkpoint(load: dict[int, str], folder: str, step: int) -> None:
    point = RollbackPoint.begin(started(checkpoint_of_stage=load))
    assert (point.folder, point.step, point.positions) == (folder, step, {0: ReplicaPosition(step=4)})
    expected = {n: d.Load(folder=load[n]) if n in load else d.Fresh() for n in range(3)}
    assert point.origins(ReplicaState.start(started(checkpoint_of_stage=load)).arrangement) == expected


def test_a_sealed_checkpoint_replaces_the_target_for_every_node() -> None:
    settings = started(arrangement=[[0, 4], [2, 1], [3]], routes=[[0, 2, 3, 0], [4, 1, 3, 4]])
    run = RunState.start(settings)
    assert run.durable == RollbackPoint.begin(settings)
    run = apply(d.Seal(step=6, folder="step-6", stages=[0, 1, 2], partial=False), run)
    point = run.durable
    assert (point.folder, point.step) == ("step-6", 6)
    assert point.origins(run.replicas[0].arrangement) == dict.fromkeys(range(5), d.Load(folder="step-6"))
    run = apply(d.Seal(step=7, folder="step-7", stages=[0, 1], partial=True), run)
    assert run.durable == point, "a partial checkpoint is no target"
