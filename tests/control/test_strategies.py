"""Orders derived from the recovery strategies' plans: donors and rollback targets."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.control.facts import decisions as d
from planaria.control.state.replica import after_commit
from planaria.recovery import RECOVERIES
from support.control.scenarios import STAGES, fleet, last, work_until
from support.control.simulated_fleet import SimulatedFleet


@pytest.mark.parametrize(
    ("strategy", "save_every", "lost", "source", "step"),
    [
        ("checkpoint", 2, 2, d.Load(folder="step-00000002"), 2),
        ("checkfree, checkpoint", 4, 0, d.Fresh(), 0),  # no checkpoint yet
    ],
)
def test_a_rollback_leads_to_the_last_checkpoint_or_the_start(
    strategy: str, save_every: int, lost: int, source: d.Source, step: int
) -> None:
    simulation = fleet(save_every=save_every, recovery={"strategy": strategy})
    work_until(simulation, "run", 3)
    simulation.lose(simulation.state.holders[lost])
    form = last(simulation, d.Form)
    assert (form.step, form.outcome) == (step, "rolled back")
    assert {m.source for m in form.members} == {source}
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")
    assert [f.step for f in simulation.history if isinstance(f, d.Commit)] == [0, 1, 2, *range(step, 6)]


def test_a_resumed_run_without_a_new_checkpoint_rolls_back_to_its_start() -> None:
    load = {stage: "a" if stage else "b" for stage in range(STAGES)}
    simulation = fleet(first_step=2, checkpoint_of_stage=load, recovery={"strategy": "checkpoint"})
    work_until(simulation, "run", 4)
    simulation.lose(simulation.state.holders[3])
    form = last(simulation, d.Form)
    assert (form.step, form.outcome) == (2, "rolled back")
    sources = [d.Load(folder=load[s]) if s in load else d.Fresh() for s in range(STAGES + 1)]
    assert [m.source for m in form.members] == sources


@pytest.mark.parametrize("lost", [None, 0, 2])
def test_orders_of_a_run_resumed_from_memory_name_the_files(lost: int | None) -> None:
    """Also if a stage is rebuilt from the others' parities."""
    label = {"part": "0a", "generation": 6, "step": 3}
    simulation = fleet(
        first_step=3, first_generation=7, durable_step=2, checkpoint_of_stage=dict.fromkeys(range(STAGES + 1), "a"),
        snapshot_step=3, recalled_from=label, snapshot_nodes=[node for node in range(STAGES + 1) if node != lost],
        recovery={"strategy": "snapshot, checkpoint", "options": {"every": 3, "slices": 2}},
    )  # fmt: skip
    work_until(simulation, "run", 3)
    recall = d.Recall.model_validate({"by": "snapshot", "step": 3, "file": label})
    sources = {member.node: member.source for member in last(simulation, d.Form).members}
    assert all(source == recall for node, source in sources.items() if node != lost)
    assert lost is None or isinstance(sources[lost], d.Rebuild)
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_each_lost_stage_is_rebuilt_by_the_first_capable_strategy() -> None:
    simulation = fleet(recovery={"strategy": "checkfree, echo", "options": {"every": 2}}, spares=2)
    work_until(simulation, "run", 3)
    for stage in (1, 3):
        simulation.lose(simulation.state.holders[stage])
    form = last(simulation, d.Form)
    assert form.members[1].source == d.Rebuild(by="echo", donors=[2])
    assert form.members[3].source == d.Rebuild(by="checkfree", donors=[2, 4])


@pytest.mark.parametrize(("strategy", "commits"), [("redundant", 1), ("echo", 2), ("checkfree_plus", 1)])
def test_a_new_worker_is_no_donor_until_its_copy_is_complete(strategy: str, commits: int) -> None:
    """After the host of a copy is rebuilt, losing the original ends the run until the copy is complete again."""
    original, host = (0, 1) if strategy == "checkfree_plus" else (2, 1 if strategy == "redundant" else 3)
    for waited in range(commits + 1):
        simulation = fleet(recovery={"strategy": strategy, "options": options_of(strategy, every=2)}, spares=2)
        work_until(simulation, "run", 3)
        simulation.lose(simulation.state.holders[host])
        work_until(simulation, "run", 3 + waited)
        simulation.lose(simulation.state.holders[original])
        assert (simulation.cannot is None) == (waited == commits)
        if simulation.cannot is not None:
            assert "is incomplete" in simulation.cannot.reason
            assert simulation.cannot.lost == [original]


@pytest.mark.parametrize(
    ("missed", "skipped", "after", "missed_after"),
    [
        ((), (), {0: 4, 1: 3, 2: 6, 3: 8, 4: 10}, set()),
        ((2,), (1,), {0: 3, 1: 2, 2: 5, 3: 7, 4: 9}, {1, 2}),  # ages stop while a node is skipped
        ((1,), (), {0: 1, 1: 1, 2: 6, 3: 8, 4: 10}, set()),  # and restart at both ends of a copy that missed steps
    ],
)
def test_copies_age_with_commits_of_all_nodes(
    missed: tuple[int, ...], skipped: tuple[int, ...], after: dict[int, int], missed_after: set[int]
) -> None:
    ages = {0: 3, 1: 2, 2: 5, 3: 7, 4: 9}
    assert after_commit(ages, frozenset(missed), skipped, [(0, 1), (2, 3)]) == (after, missed_after)


def test_a_redundant_copy_is_complete_after_the_commit_in_which_its_original_died() -> None:
    simulation = fleet(recovery={"strategy": "redundant"})
    work_until(simulation, "commit", 0)
    simulation.lose(simulation.state.holders[2])
    work_until(simulation, "link", 1)
    assert last(simulation, d.Form).members[2].source == d.Rebuild(by="redundant", donors=[1])


def options_of(strategy: str, **given: object) -> dict[str, Any]:
    return RECOVERIES.declared([name.strip() for name in strategy.split(",")], given)


def skipping(strategy: str, **changed: object) -> SimulatedFleet:
    recovery = {"strategy": strategy, "meanwhile": "skip", "options": options_of(strategy, every=4)}
    return fleet(steps=9, spares=0, recovery=recovery, routes=[[0, 1, 2, 3, 4, 0]], **changed)


def commit_without(simulation: SimulatedFleet, steps: int) -> None:
    """Commit steps while the replacement worker does not start."""
    goal = simulation.state.step + steps
    while simulation.state.step < goal:
        simulation.work(next(worker for worker in simulation.pending() if simulation.alive[worker].joined))


@pytest.mark.parametrize(("strategy", "host"), [("echo, checkfree", 3), ("redundant, checkfree", 1)])
def test_a_copy_does_not_age_while_its_original_is_skipped(strategy: str, host: int) -> None:
    """An incomplete copy stays incomplete, however many steps are trained without its original."""
    simulated = skipping(strategy)
    work_until(simulated, "run", 2)
    simulated.lose(simulated.state.holders[host])
    while simulated.state.vacant or simulated.state.phase != "run":
        simulated.work(simulated.pending()[-1])  # newest first, so the host has barely started to copy
    simulated.lose(simulated.state.holders[2])
    commit_without(simulated, 5)
    assert last(simulated, d.Form).outcome == "skipping"
    simulated.behave()
    assert simulated.ending == d.Finish(outcome="finished")


def test_a_stage_that_can_be_restored_exactly_is_not_skipped() -> None:
    """Skipping it would give it a stale state, and other stages a wrong donor."""
    simulated = skipping("checkfree")
    work_until(simulated, "run", 0)
    simulated.lose(simulated.state.holders[3])
    assert simulated.state.phase == "idle"
    simulated.behave()
    assert [f.outcome for f in simulated.history if isinstance(f, d.Form)] == ["started", "recovered"]
    assert simulated.ending == d.Finish(outcome="finished")


def test_a_stage_and_its_neighbour_that_is_still_loading_can_both_die() -> None:
    """After a rollback, both workers die when only one of two neighbours has loaded its state."""
    simulation = fleet(save_every=2, spares=2, recovery={"strategy": "checkfree, checkpoint"})
    work_until(simulation, "run", 3)
    for stage in (2, 3):
        simulation.lose(simulation.state.holders[stage])
    work_until(simulation, "link", 2)
    while 2 in simulation.state.origins:
        simulation.work(simulation.state.holders[2])
    assert 3 in simulation.state.origins
    for stage in (3, 2):
        simulation.lose(simulation.state.holders[stage])
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")
