"""Several nodes per stage on real processes: routes over nodes, summed gradients, nodes that die and return."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault
from planaria.planner.cells import restrict_problem
from planaria.planner.guidelines import find_violations
from planaria.planner.problem import PlanningProblem, Solution
from planaria.planner.schedule import Schedule, read
from support.live.harness import LiveWorkers, apart, ending, facts, inline, losses, outcomes, rebuilt, tiny, train
from support.schedules import ONE_EACH, on_schedule, shape

TOLERANCE = 1e-5


def scheduled(folder: Path, steps: int = 8, skip: float = 0.5, disorderly: bool = True, **sections: Any) -> RunConfig:
    settings = shape(skip)
    for name, fields in sections.items():
        settings[name] = {**settings.get(name, {}), **fields}
    return on_schedule(tiny(folder, stages=4, steps=steps, **settings), folder, disorderly)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run on the schedule without a failure."""
    return train(scheduled(tmp_path_factory.mktemp("unharmed"), train={"eval_every": 4}))


def test_ten_processes_on_a_schedule_train_as_one(unharmed: RunRecord) -> None:
    assert ending(unharmed).outcome == "finished" and outcomes(unharmed) == ["started"]
    assert len(facts(unharmed, e.Linked)) == 10
    assert (losses(unharmed), {m.step: m.val_loss for m in unharmed.validated}) == inline(unharmed), "to the last bit"


@pytest.mark.slow
def test_a_schedule_without_skips_trains_as_a_plain_pipeline(tmp_path: Path) -> None:
    """The same samples through all stages: only the order in which gradients are added up differs."""
    record = train(scheduled(tmp_path, skip=0.0, disorderly=False, network={"emulate": "links"}))
    plain = train(tiny(tmp_path / "plain", steps=8, pipeline={"microbatches": 6, "microbatch_size": 2}))
    assert apart(losses(record), losses(plain)) <= TOLERANCE


@pytest.mark.slow
def test_dead_nodes_are_copied_exactly_from_others_of_their_stages(tmp_path: Path, unharmed: RunRecord) -> None:
    """A data node, and one of a block stage."""
    config = scheduled(tmp_path)
    stages = read(tmp_path / "schedule.json").stages
    faults = [Fault(step=step, stage=stages[stage][0], moment="forward") for step, stage in ((2, 0), (5, 2))]
    record = train(config, faults)
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "recovered", "recovered"]
    assert [m.source.by for m in rebuilt(record)] == [d.PEER, d.PEER]
    assert losses(record) == losses(unharmed)


@pytest.mark.slow
def test_a_stage_without_nodes_is_rebuilt_from_its_neighbours(tmp_path: Path) -> None:
    config = scheduled(tmp_path, fleet={"spares": 2})
    schedule = read(tmp_path / "schedule.json")
    faults = [Fault(step=4, stage=node, moment="forward") for node in schedule.stages[2]]
    record = train(config, faults)
    assert ending(record).outcome == "finished"
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


@pytest.mark.slow
def test_a_stage_without_nodes_is_restored_exactly_by_redundant(tmp_path: Path, unharmed: RunRecord) -> None:
    """The first node of the stage before keeps a copy for all its nodes."""
    config = scheduled(tmp_path, fleet={"spares": 2}, recovery={"strategy": "redundant"})
    stages = read(tmp_path / "schedule.json").stages
    killed: list[int] = []

    def both_at_once(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.RunStep) and decision.step == 3 and not killed:
            killed.extend(workers.signal(signal.SIGKILL, node) for node in stages[2])

    record = train(config, hook=both_at_once)
    assert ending(record).outcome == "finished" and set(outcomes(record)) == {"started", "recovered"}
    # The controller learns of one death first: it may try a copy of the other node before it learns of that one's.
    assert [m.source.by for m in rebuilt(record) if m.node == stages[2][0]][-1] == "redundant"
    assert losses(record) == losses(unharmed), "not equal to the last bit"


@pytest.mark.slow
def test_without_a_spare_a_new_plan_is_used_until_a_worker_returns(tmp_path: Path) -> None:
    config = scheduled(tmp_path, steps=40, fleet={"spares": 0}, recovery={"meanwhile": "skip"})
    record = train(config, [Fault(step=4, stage=5, moment="forward")])
    # On a busy machine the new worker may be there before the new plan.
    assert outcomes(record) in (["started", "skipping", "recovered"], ["started", "recovered"])
    assert ending(record).outcome == "finished"
    assert facts(record, d.Form)[-1].routes == facts(record, e.RunStarted)[0].routes
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


@pytest.mark.slow
def test_nodes_that_are_not_replaced_are_planned_around(tmp_path: Path) -> None:
    settings = {"fleet": {"spares": 0, "replace": False}, "recovery": {"meanwhile": "skip"}}
    config = scheduled(tmp_path, steps=14, **settings)
    schedule = read(tmp_path / "schedule.json")
    gone = [schedule.stages[0][0], schedule.stages[3][1]]  # a data node, and one of a block stage
    record = train(config, [Fault(step=4 + 4 * k, stage=node, moment="forward") for k, node in enumerate(gone)])
    assert outcomes(record) == ["started", "skipping", "skipping"] and ending(record).outcome == "finished"
    # The same nodes are planned again if the first answer took long (the search is compiled at its first use).
    first, second = {tuple(plan.nodes): plan for plan in facts(record, e.Replanned)}.values()
    for plan, left in ((first, set(range(10)) - {gone[0]}), (second, set(range(10)) - set(gone))):
        assert set(plan.nodes) == left and {node for route in plan.routes for node in route} <= left
        assert find_violations(*_sub(schedule, plan)) == []
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE
    assert facts(record, d.Seal)[-1].stages == list(range(5))


def test_a_stage_without_nodes_and_replacement_ends_the_run_saved(tmp_path: Path) -> None:
    settings = {"fleet": {"spares": 0, "replace": False}, "recovery": {"meanwhile": "skip"}}
    config = scheduled(tmp_path, **settings)
    faults = [Fault(step=4, stage=node) for node in read(tmp_path / "schedule.json").stages[2]]
    record = train(config, faults)
    assert ending(record).outcome == "cannot" and "fleet.replace = false" in ending(record).reason
    assert facts(record, d.Seal)[-1].stages == [0, 1, 3, 4]


@pytest.mark.slow
def test_a_schedule_may_number_its_nodes_in_any_order(tmp_path: Path) -> None:
    """Stage 0 is at node 4; a middle stage is lost, and rebuilt from its neighbours."""
    settings = shape(0.5)
    settings["routing"]["data_nodes"] = 1
    config = on_schedule(tiny(tmp_path, stages=4, steps=8, **settings), tmp_path, disorderly=False, topology=ONE_EACH)
    assert read(tmp_path / "schedule.json").stages[0] == [4]
    middle = read(tmp_path / "schedule.json").stages[2][0]
    record = train(config, [Fault(step=4, stage=middle, moment="forward")])
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "recovered"]
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


def _sub(schedule: Schedule, plan: e.Replanned) -> tuple[PlanningProblem, Solution]:
    """Return the plan's problem and solution, with nodes renumbered."""
    problem, kept = restrict_problem(schedule.problem, schedule.solution, plan.nodes), sorted(plan.nodes)
    new = {node: place for place, node in enumerate(kept)}
    routes = np.array([[new[node] for node in route] for route in plan.routes])
    return problem, Solution(schedule.solution.stage[kept], routes[:, 0], routes[:, 1:-1])
