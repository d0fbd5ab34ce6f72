"""What the controller makes of the strategies' answers: who rebuilds from whom, and who goes back to where."""

from __future__ import annotations

from typing import Any

import pytest
from pretend_fleet import PretendFleet
from test_decide import STAGES, fleet, last, work_until

from planaria.control import decisions as d
from planaria.recovery import RECOVERIES


def test_with_checkpoints_everyone_goes_back_to_the_last_one() -> None:
    made = fleet(save_every=2, recovery={"strategy": "checkpoint"})
    work_until(made, "run", 3)
    made.lose(made.state.holders[2])
    form = last(made, d.Form)
    assert (form.step, form.outcome) == (2, "rolled back")
    assert {m.source for m in form.members} == {d.Load(folder="step-00000002")}
    made.behave()
    assert made.ending == d.Finish(outcome="finished")
    assert [f.step for f in made.history if isinstance(f, d.Commit)] == [0, 1, 2, 2, 3, 4, 5]


def test_without_a_checkpoint_a_rollback_leads_to_the_beginning() -> None:
    made = fleet(save_every=4, recovery={"strategy": "checkfree, checkpoint"})
    work_until(made, "run", 3)
    made.lose(made.state.holders[0])
    form = last(made, d.Form)
    assert (form.step, form.outcome) == (0, "rolled back")
    assert {m.source for m in form.members} == {d.Fresh()}
    made.behave()
    assert made.ending == d.Finish(outcome="finished")
    assert [f.step for f in made.history if isinstance(f, d.Commit)] == [0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_a_resumed_run_without_a_checkpoint_of_its_own_rolls_back_to_where_it_took_up() -> None:
    load = {stage: "a" if stage else "b" for stage in range(STAGES)}
    made = fleet(first_step=2, load=load, recovery={"strategy": "checkpoint"})
    work_until(made, "run", 4)
    made.lose(made.state.holders[3])
    form = last(made, d.Form)
    assert (form.step, form.outcome) == (2, "rolled back")
    sources = [d.Load(folder=load[s]) if s in load else d.Fresh() for s in range(STAGES + 1)]
    assert [m.source for m in form.members] == sources


@pytest.mark.parametrize("lost", [None, 0, 2])
def test_workers_of_a_run_resumed_from_memory_are_told_which_file_to_read(lost: int | None) -> None:
    """Also where a stage has to be rebuilt from the others' parities."""
    label = {"part": "0a", "generation": 6, "step": 3}
    made = fleet(
        first_step=3, first_generation=7, durable_step=2, load=dict.fromkeys(range(STAGES + 1), "a"),
        recalled=3, recalled_from=label, remembering=[node for node in range(STAGES + 1) if node != lost],
        recovery={"strategy": "snapshot, checkpoint", "options": {"every": 3, "slices": 2}},
    )  # fmt: skip
    work_until(made, "run", 3)
    recall = d.Recall.model_validate({"by": "snapshot", "step": 3, "file": label})
    sources = {member.node: member.source for member in last(made, d.Form).members}
    assert all(source == recall for node, source in sources.items() if node != lost)
    assert lost is None or isinstance(sources[lost], d.Rebuild)
    made.behave()
    assert made.ending == d.Finish(outcome="finished")


def test_each_lost_stage_goes_to_the_first_strategy_that_can() -> None:
    made = fleet(recovery={"strategy": "checkfree, echo", "options": {"every": 2}}, spares=2)
    work_until(made, "run", 3)
    for stage in (1, 3):
        made.lose(made.state.holders[stage])
    form = last(made, d.Form)
    assert form.members[1].source == d.Rebuild(by="echo", donors=[2])
    assert form.members[3].source == d.Rebuild(by="checkfree", donors=[2, 4])


@pytest.mark.parametrize(("strategy", "commits"), [("redundant", 1), ("echo", 2), ("checkfree_plus", 1)])
def test_who_has_just_come_has_nothing_to_give_yet(strategy: str, commits: int) -> None:
    """The host of a copy is rebuilt; until its copy is whole again, the loss of the original ends the run."""
    original, host = (0, 1) if strategy == "checkfree_plus" else (2, 1 if strategy == "redundant" else 3)
    for waited in range(commits + 1):
        made = fleet(recovery={"strategy": strategy, "options": options_of(strategy, every=2)}, spares=2)
        work_until(made, "run", 3)
        made.lose(made.state.holders[host])
        work_until(made, "run", 3 + waited)
        made.lose(made.state.holders[original])
        assert (made.cannot is None) == (waited == commits)
        if made.cannot is not None:
            assert "not whole yet" in made.cannot.reason
            assert made.cannot.lost == [original]


def test_a_twin_is_whole_as_soon_as_a_commit_is_over_in_which_its_original_died() -> None:
    made = fleet(recovery={"strategy": "redundant"})
    work_until(made, "commit", 0)
    made.lose(made.state.holders[2])
    work_until(made, "link", 1)
    assert last(made, d.Form).members[2].source == d.Rebuild(by="redundant", donors=[1])


def options_of(strategy: str, **given: object) -> dict[str, Any]:
    return RECOVERIES.declared([name.strip() for name in strategy.split(",")], given)


def skipping(strategy: str, **changed: object) -> PretendFleet:
    recovery = {"strategy": strategy, "meanwhile": "skip", "options": options_of(strategy, every=4)}
    return fleet(steps=9, spares=0, recovery=recovery, routes=[[0, 1, 2, 3, 4, 0]], **changed)


def commit_without(made: PretendFleet, steps: int) -> None:
    """Train on while the worker that was started for what is missing does not come up."""
    goal = made.state.step + steps
    while made.state.step < goal:
        made.work(next(worker for worker in made.pending() if made.alive[worker].joined))


@pytest.mark.parametrize(("strategy", "host"), [("echo, checkfree", 3), ("redundant, checkfree", 1)])
def test_a_copy_gets_no_older_while_its_original_is_skipped(strategy: str, host: int) -> None:
    """What was not whole when the stage was lost is not whole when it comes back, however many steps were trained."""
    made = skipping(strategy)
    work_until(made, "run", 2)
    made.lose(made.state.holders[host])
    while made.state.vacant or made.state.phase != "run":
        made.work(made.pending()[-1])  # the newest first: the host is rebuilt, and has hardly begun to copy
    made.lose(made.state.holders[2])
    commit_without(made, 5)
    assert last(made, d.Form).outcome == "skipping"
    made.behave()
    assert made.ending == d.Finish(outcome="finished")


def test_a_stage_whose_state_can_be_had_exactly_is_not_skipped() -> None:
    """It could come back only as it was before the others moved on, and until then be taken for somebody's donor."""
    made = skipping("checkfree")
    work_until(made, "run", 0)
    made.lose(made.state.holders[3])
    assert made.state.phase == "idle"
    made.behave()
    assert [f.outcome for f in made.history if isinstance(f, d.Form)] == ["started", "recovered"]
    assert made.ending == d.Finish(outcome="finished")


def test_a_stage_is_rebuilt_from_a_neighbour_that_has_yet_to_be_read_from_disk() -> None:
    """After a rollback one stage has its state already, its neighbour not yet, and both their workers die."""
    made = fleet(save_every=2, spares=2, recovery={"strategy": "checkfree, checkpoint"})
    work_until(made, "run", 3)
    for stage in (2, 3):
        made.lose(made.state.holders[stage])
    work_until(made, "link", 2)
    while 2 in made.state.origins:
        made.work(made.state.holders[2])
    assert 3 in made.state.origins
    for stage in (3, 2):
        made.lose(made.state.holders[stage])
    made.behave()
    assert made.ending == d.Finish(outcome="finished")
