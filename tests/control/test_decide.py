"""Decisions of the controller in single scenarios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.control.apply import apply
from planaria.control.checkpoint_decisions import LAST_TRIES
from planaria.control.decide import MAX_ATTEMPTS, decide
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.replay import replay
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState
from planaria.control.stop_reasons import stop_blockers, underlying_error
from support.control.open_fleet import OpenFleet
from support.control.scenarios import STAGES, decision_kinds, fleet, last, seals, work_until
from support.control.simulated_fleet import SimulatedFleet


def test_a_run_without_faults_makes_the_expected_decisions() -> None:
    simulation = fleet(steps=2, eval_every=1, save_every=1)
    simulation.behave()
    step = ["run_step", "commit", "run_step", "save", "seal"]  # the second order to run is the validation
    assert decision_kinds(simulation) == [
        "spawn",
        "form",
        "run_step",
        "commit",
        "run_step",
        "save",
        "seal",
        *step,
        "finish",
    ]
    assert simulation.ending == d.Finish(outcome="finished")
    assert sum(isinstance(fact, d.Spawn) for fact in simulation.history) == STAGES + 2


def test_a_middle_stage_is_rebuilt_by_the_spare_and_only_its_edges_are_new() -> None:
    simulation = fleet()
    work_until(simulation, "run", 2)
    before, victim = last(simulation, d.Form), simulation.state.holders[2]
    spare = simulation.run.with_status("spare")[0]
    simulation.lose(victim)
    form = last(simulation, d.Form)
    assert (form.generation, form.step, form.outcome) == (before.generation + 1, 2, "recovered")
    assert form.members[2] == d.Member(node=2, stage=2, worker=spare, source=d.Rebuild(by="checkfree", donors=[1, 3]))
    assert [m.source for m in form.members if m.stage != 2] == [d.Keep()] * STAGES
    old, new = ({(n.low, n.high): n.id for n in f.links} for f in (before, form))
    assert {pair for pair in old if old[pair] != new[pair]} == {(1, 2), (2, 3)}
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_a_used_spare_is_replaced_once_the_run_commits_again() -> None:
    simulation = fleet()
    work_until(simulation, "run", 2)
    simulation.lose(simulation.state.holders[2])
    work_until(simulation, "run", 2)
    assert not simulation.run.with_status("starting"), "a new worker would slow down the others while they catch up"
    work_until(simulation, "run", 3)
    assert simulation.run.with_status("starting")


def test_without_a_spare_a_worker_is_started_first() -> None:
    simulation = fleet(spares=0)
    work_until(simulation, "run", 1)
    victim = simulation.state.holders[3]
    simulation.lose(victim)
    assert simulation.history[-1] == d.Spawn(worker=victim, incarnation=2)
    simulation.work(victim)
    assert last(simulation, d.Form).members[3].source == d.Rebuild(by="checkfree", donors=[2, 4])


def test_a_death_during_the_commit_does_not_undo_it() -> None:
    simulation = fleet()
    work_until(simulation, "commit", 1)
    simulation.lose(simulation.state.holders[2])
    work_until(simulation, "link", 2)
    assert last(simulation, d.Form).step == 2
    assert last(simulation, d.Form).members[2].source == d.Rebuild(by="checkfree", donors=[1, 3])


def test_a_donor_that_dies_while_sending_makes_both_unrecoverable() -> None:
    simulation = fleet()
    work_until(simulation, "run", 1)
    simulation.lose(simulation.state.holders[2])
    simulation.lose(simulation.state.holders[3])
    assert simulation.cannot is not None
    assert simulation.cannot.lost == [2, 3]
    assert "adjacent" in simulation.cannot.reason


def test_an_unrecoverable_loss_ends_the_run_with_the_survivors_saved() -> None:
    simulation = fleet()
    work_until(simulation, "run", 3)
    simulation.lose(simulation.state.holders[1])
    simulation.behave()
    assert decision_kinds(simulation)[-4:] == ["unrecoverable", "save", "seal", "finish"]
    seal = next(fact for fact in simulation.history if isinstance(fact, d.Seal))
    assert seal == d.Seal(step=3, folder="step-00000003.partial", stages=[0, 2, 3, 4], partial=True, first_block=3)
    assert simulation.ending is not None
    assert simulation.ending.outcome == "cannot"
    assert "first block stage" in simulation.ending.reason
    assert simulation.ending.reason.endswith("add ', checkpoint': --recovery.strategy 'checkfree, checkpoint'")


def test_other_failures_suggest_no_rollback() -> None:
    simulation = fleet(spares=0, replace=False)
    work_until(simulation, "run", 1)
    simulation.lose("w2")
    assert simulation.cannot is not None and "roll back" not in simulation.cannot.reason


def test_a_broken_edge_is_replaced_if_no_worker_died() -> None:
    simulation = fleet()
    work_until(simulation, "run", 1)
    before = last(simulation, d.Form)
    simulation.break_edge((1, 2))
    assert last(simulation, d.Form) == before, "a death notice of one of its ends may follow"
    simulation.expire_grace()
    form = last(simulation, d.Form)
    assert (form.outcome, form.step) == ("relinked", 1)
    assert [n.low for n in form.links if n not in before.links] == [1]
    assert {m.source for m in form.members} == {d.Keep()}


def test_an_edge_that_breaks_during_the_commit_waits_for_its_end() -> None:
    simulation = fleet()
    work_until(simulation, "commit", 1)
    simulation.break_edge((1, 2))
    simulation.expire_grace()
    assert simulation.state.phase == "commit"
    work_until(simulation, "link", 2)
    assert last(simulation, d.Form).outcome == "relinked"


def test_a_stop_waits_for_a_complete_step_and_saves_it() -> None:
    simulation = fleet(eval_every=1)
    work_until(simulation, "run", 2)
    simulation.stop()
    simulation.behave()
    assert [fact for fact in simulation.history if isinstance(fact, d.Seal)] == [
        d.Seal(step=3, folder="step-00000003", stages=[0, 1, 2, 3, 4], first_block=3)
    ]
    assert simulation.ending == d.Finish(outcome="stopped", reason="someone asked")


def saves(simulation: SimulatedFleet) -> list[int]:
    return [fact.step for fact in simulation.history if isinstance(fact, d.Save)]


UNREACHABLE = {"detail": "w1 (stage 1): Network is unreachable", "cause": "Network"}
"""fields of a report on an edge that could not be opened"""


def test_a_stop_saves_what_workers_hold_before_broken_edges_are_replaced() -> None:
    """No worker answers: the step does not end and no edge opens, but the run is saved."""
    simulation = fleet()
    work_until(simulation, "run", 3)
    simulation.break_edge((1, 2), generation=simulation.state.generation, **UNREACHABLE)
    simulation.expire_grace()
    assert simulation.state.phase == "link"
    simulation.stop(skip_repairs=True)
    assert saves(simulation) == [3] and simulation.state.phase == "save"
    simulation.behave()
    assert seals(simulation) == [3]
    why = "w1 (stage 1): Network is unreachable"
    assert simulation.ending == d.Finish(outcome="stopped", reason="someone asked", detail=why)


def test_a_stop_drops_a_step_that_does_not_end() -> None:
    simulation = fleet()
    work_until(simulation, "run", 3)
    simulation.stop(skip_repairs=True)
    assert not saves(simulation), "the stop waits for a step that ends soon"
    late = "step 3 was dropped: no result from stages 0, 1, 2, 3, 4"
    assert stop_blockers(simulation.run) == late
    simulation.expire_stop()
    assert saves(simulation) == [3]
    simulation.behave()
    assert seals(simulation) == [3] and simulation.ending == d.Finish(
        outcome="stopped", reason="someone asked", detail=late
    )
    assert replay(simulation.history).problems == []


def test_a_stop_at_the_newest_checkpoint_is_immediate() -> None:
    """Before the first step, workers may take minutes to start; nothing would be lost."""
    simulation = fleet()
    simulation.stop(skip_repairs=True)
    assert simulation.ending == d.Finish(outcome="stopped", reason="someone asked")
    simulation = fleet(save_every=2)
    work_until(simulation, "run", 2)
    simulation.stop(skip_repairs=True)
    assert seals(simulation) == [2] and simulation.ending == d.Finish(outcome="stopped", reason="someone asked")


def test_a_stop_after_the_last_step_changes_nothing() -> None:
    simulation = fleet()
    work_until(simulation, "save", 6)
    simulation.stop(skip_repairs=True)
    simulation.behave()
    assert seals(simulation) == [6] and simulation.ending == d.Finish(outcome="finished")


def test_a_stop_waits_for_a_lost_stage_no_longer_than_for_a_step() -> None:
    simulation = fleet(spares=0)
    work_until(simulation, "run", 3)
    simulation.lose(simulation.state.holders[2])
    simulation.stop(skip_repairs=True)
    simulation.expire_stop()
    simulation.behave()
    assert simulation.ending is not None and simulation.ending.outcome == "cannot"
    assert simulation.ending.reason.endswith("no worker had the state of stage 2")
    (seal,) = (fact for fact in simulation.history if isinstance(fact, d.Seal))
    assert (seal.partial, seal.stages) == (True, [0, 1, 3, 4])


def test_after_too_many_generations_the_underlying_error_is_named() -> None:
    simulation = fleet()
    work_until(simulation, "run", 1)
    while simulation.cannot is None:
        simulation.break_edge((1, 2), generation=simulation.state.generation, **UNREACHABLE)
        simulation.expire_grace()
    first, _, error = simulation.cannot.reason.partition("; ")
    assert first == f"{MAX_ATTEMPTS} generations in a row did not get step 1 committed"
    assert error == "the last error: w1 (stage 1): Network is unreachable"


def test_the_replay_of_an_older_log_keeps_its_reasons() -> None:
    """Older versions named another error, or worded it differently."""
    simulation = fleet()
    work_until(simulation, "run", 1)
    simulation.lose("w1")
    simulation.behave()
    older = [
        fact.model_copy(update={"reason": "the last error: closed"})
        if isinstance(fact, d.Unrecoverable | d.Finish)
        else fact
        for fact in simulation.history
    ]
    replayed = replay(older)
    assert replayed.problems == [] and replayed.state.replicas[0].unrecoverable_reason == "the last error: closed"
    other = [f.model_copy(update={"lost": [2]}) if isinstance(f, d.Unrecoverable) else f for f in simulation.history]
    (problem, *_) = replay(other).problems
    assert "logged Unrecoverable" in problem


def test_rejections_that_prove_nothing_exclude_no_worker() -> None:
    lost = fleet()
    reject(lost, 2, 1, 3)  # CheckFree cannot rebuild the first block stage
    spoofed = fleet()
    for _ in range(3):
        work_until(spoofed, "run", 1)
        spoofed.report(spoofed.alive["w4"], e.EdgeBroken, node=2, peer=3, detail="closed", cause="closed", invalid=True)
        spoofed.break_edge((1, 2))
        spoofed.expire_grace()
    repeated = fleet(spares=2)
    work_until(repeated, "run", 1)
    repeated.break_edge((1, 2), invalid=True)
    repeated.lose("w4")  # the link of that report stays, and its receiver reports it again
    repeated.break_edge((1, 2), invalid=True)
    repeated.expire_grace()
    successor = fleet(spares=2)
    reject(successor, 2, 3, 1)
    work_until(successor, "run", 1)
    successor.lose("w3")
    reject(successor, 2, 3, 1)
    for simulation in (lost, spoofed, repeated, successor):
        assert not exclusions(simulation)


def reject(simulation: SimulatedFleet, receiver: int, sender: int, times: int) -> None:
    """Let ``receiver`` reject a message of ``sender``, and that connection end, in this and the next generations."""
    for _ in range(times):
        work_until(simulation, "run", 1)
        generation = simulation.state.generation
        cause = {"cause": "a scale is not finite", "detail": "a scale is not finite"}
        simulation.break_edge((receiver, sender), generation=generation, invalid=True, **cause)
        simulation.break_edge((sender, receiver), generation=generation, cause="closed", detail="closed")
        simulation.expire_grace()


def exclusions(simulation: SimulatedFleet) -> list[list[str]]:
    return [fact.workers for fact in simulation.history if isinstance(fact, d.ExcludeMember)]


def test_a_sender_of_invalid_messages_is_replaced_and_then_the_worker_that_rejects_others() -> None:
    simulation = fleet()
    reject(simulation, 2, 3, 1)
    assert not exclusions(simulation) and simulation.state.last_edge_failure == "a scale is not finite"
    reject(simulation, 2, 3, 1)
    assert exclusions(simulation) == [["w3"]]
    reject(simulation, 2, 1, 2)
    assert exclusions(simulation) == [["w3"], ["w2"]], "no worker is believed twice"
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_rejections_in_different_steps_and_of_workers_without_a_replacement_exclude_no_worker() -> None:
    simulation = fleet()
    for step in (1, 2, 3):
        work_until(simulation, "run", step)
        simulation.break_edge((1, 2), generation=simulation.state.generation, invalid=True)
        simulation.expire_grace()
    alone = fleet(spares=0, replace=False)
    reject(alone, 1, 2, 3)
    assert not exclusions(simulation) and not exclusions(alone)


@pytest.mark.parametrize(("rooms", "excluded"), [([2], []), ([1, 1], [["w4"]])])
def test_spares_on_the_machine_of_an_invalid_sender_do_not_replace_it(rooms: list[int], excluded: list[str]) -> None:
    started = fleet(local_workers=STAGES, recovery={"strategy": "checkpoint"}).started
    simulation = OpenFleet(started)
    for room in rooms:
        simulation.join(room)
    work_until(simulation, "run", 1)
    assert simulation.state.holders[4] == "w4" and simulation.run.spares == ("w5",)
    reject(simulation, 3, 4, 3 if not excluded else 2)
    assert exclusions(simulation) == excluded
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_a_spare_without_room_for_its_stage_does_not_replace_an_invalid_sender() -> None:
    simulation = fleet(replace=False, memory_needs=[1, 1, 1, 5, 1], stage_work=[1.0] * 5)
    simulation.machines = {f"w{number}": (5 if number < 5 else 2, 1.0) for number in range(6)}
    reject(simulation, 2, 3, 3)
    assert not exclusions(simulation)


def test_the_last_error_is_a_workers_own_and_not_a_connection_closed_by_its_exit() -> None:
    simulation = fleet()
    work_until(simulation, "run", 1)
    generation = simulation.state.generation
    simulation.happened(e.WorkerFailed(worker="w2", stage=2, generation=generation, detail="KeyError(3)", leaves=True))
    simulation.break_edge((1, 2), generation=generation, cause="closed", detail="closed")
    simulation.lose("w2")
    assert simulation.state.last_edge_failure == "worker w2 (stage 2): KeyError(3)"
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_the_underlying_error_comes_from_workers_or_a_probe() -> None:
    simulation = fleet()
    work_until(simulation, "run", 1)
    known = {name: replace(worker, at="10.0.0.1:7") for name, worker in simulation.run.workers.items()}
    run = replace(simulation.run, roster=simulation.run.roster.with_workers(known))
    refused = "{}: Connection refused".format
    assert underlying_error(run, {"w1": "no route"}, refused) == "worker w1: no route"
    assert underlying_error(run, {}, refused) == "10.0.0.1:7: Connection refused"
    assert underlying_error(run, {}, lambda at: "") == ""
    broken = e.EdgeBroken(worker="w1", node=1, peer=2, generation=simulation.state.generation, **UNREACHABLE)
    assert underlying_error(apply(broken, run), {}, refused) == "w1 (stage 1): Network is unreachable"


def test_a_worker_that_fails_ends_the_run_at_once() -> None:
    simulation = fleet()
    work_until(simulation, "run", 2)
    simulation.happened(
        e.WorkerFailed(worker="w1", stage=1, generation=simulation.state.generation, detail="out of memory")
    )
    assert simulation.ending == d.Finish(outcome="failed", reason="worker w1 (stage 1): out of memory")


def test_a_failed_save_is_discarded_and_the_next_is_made_when_due() -> None:
    simulation = fleet(save_every=2)
    work_until(simulation, "save", 2)
    simulation.full = 1
    simulation.behave()
    assert seals(simulation) == [4, 6] and simulation.ending == d.Finish(outcome="finished")
    failed = next(n for n, fact in enumerate(simulation.history) if isinstance(fact, e.SaveFailed))
    assert simulation.history.index(d.Discard(step=2)) > failed
    assert [fact.step for fact in simulation.history if isinstance(fact, d.Commit)] == list(range(6)), (
        "no step is undone"
    )


def test_a_checkpoint_that_cannot_be_sealed_does_not_count() -> None:
    simulation = fleet(save_every=2, recovery={"strategy": "checkpoint"})
    work_until(simulation, "save", 4)
    simulation.room, simulation.full = STAGES + 1, 1  # no room for the manifest
    while d.Discard(step=4) not in simulation.history:
        simulation.work(simulation.pending()[0])
    assert (simulation.run.saved, simulation.run.durable.step, seals(simulation)) == (2, 2, [2, 4])
    simulation.lose(simulation.state.holders[2])
    assert (last(simulation, d.Form).outcome, last(simulation, d.Form).step) == ("rolled back", 2)
    simulation.behave()
    assert seals(simulation) == [2, 4, 4, 6] and simulation.ending == d.Finish(outcome="finished")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_whose_last_save_keeps_failing_has_failed(stopped: bool) -> None:
    simulation = fleet(save_every=4)
    work_until(simulation, "run", 5)
    if stopped:
        simulation.stop()
    simulation.full = 1000
    simulation.behave()
    assert simulation.ending is not None and simulation.ending.outcome == "failed"
    assert simulation.ending.reason == "the last save failed 3 times: disk full; the newest checkpoint is step-00000004"
    assert sum(isinstance(fact, e.RetryDue) for fact in simulation.history) == LAST_TRIES - 1


def test_survivors_that_cannot_be_saved_are_reported() -> None:
    simulation = fleet()
    work_until(simulation, "run", 3)
    simulation.full = 1000
    simulation.lose(simulation.state.holders[1])
    simulation.behave()
    assert simulation.ending is not None and simulation.ending.outcome == "cannot"
    assert "the last checkpoint could not be saved: the last save failed 3 times: disk full" in simulation.ending.reason


def test_failing_starts_are_limited() -> None:
    simulation = fleet()
    for _ in range(MAX_FAILED_STARTS):
        simulation.lose(simulation.pending()[0])
    assert simulation.ending is not None
    assert simulation.ending.outcome == "failed"


def test_a_run_continues_without_spares_that_fail_to_start() -> None:
    simulation = fleet()
    work_until(simulation, "run", 2)
    simulation.lose(simulation.run.with_status("spare")[0])
    for _ in range(MAX_FAILED_STARTS):
        simulation.lose(simulation.run.with_status("starting")[0])
    assert not simulation.run.with_status("starting")
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_a_stage_for_which_no_worker_starts_ends_the_run_with_the_others_saved() -> None:
    simulation = fleet(spares=0)
    work_until(simulation, "run", 3)
    simulation.lose(simulation.state.holders[2])
    for _ in range(MAX_FAILED_STARTS):
        simulation.lose(simulation.run.with_status("starting")[0])
    simulation.behave()
    assert (
        d.Seal(step=3, folder="step-00000003.partial", stages=[0, 1, 3, 4], partial=True, first_block=3)
        in simulation.history
    )
    assert simulation.ending is not None
    assert simulation.ending.outcome == "cannot"
    assert "died before they were ready" in simulation.ending.reason


@pytest.mark.parametrize(("phase", "stage"), [("link", 1), *(("run", stage) for stage in range(STAGES + 1))])
def test_a_stage_that_dies_before_the_first_commit_starts_again_from_the_seed(phase: str, stage: int) -> None:
    simulation = fleet()
    work_until(simulation, phase, 0)
    simulation.lose(simulation.state.holders[stage])
    simulation.behave()
    again = [fact for fact in simulation.history if isinstance(fact, d.Form)][1]
    assert again.members[stage].source == d.Fresh()
    assert phase == "link" or {m.source for m in again.members if m.stage != stage} == {d.Keep()}
    assert simulation.ending == d.Finish(outcome="finished")


def test_replay_names_deviations() -> None:
    simulation = fleet(steps=1)
    simulation.behave()
    whole = simulation.history
    assert not replay(whole).problems
    assert not replay(whole[:-1]).problems  # the controller died before it logged the last decision
    place = next(n for n, fact in enumerate(whole) if isinstance(fact, d.Commit))
    forged = [*whole[:place], d.Commit(generation=9, step=7, progress=7), *whole[place + 1 :]]
    assert f"record {place + 1}: logged Commit(" in replay(forged).problems[0]
    assert "was due" in replay([*whole[:place], *whole[place + 1 :]]).problems[0]
    with pytest.raises(ValueError, match="empty"):
        replay([])
    with pytest.raises(ValueError, match="run_started"):
        replay(whole[1:])


def test_a_resumed_run_starts_from_its_files() -> None:
    load = {0: "new", 1: "new", 3: "new", 4: "new"}
    simulation = fleet(first_step=3, first_generation=5, checkpoint_of_stage=load)
    work_until(simulation, "link", 3)
    form = last(simulation, d.Form)
    assert (form.generation, form.step) == (6, 3)
    assert [m.source for m in form.members] == [d.Load(folder=load[s]) if s in load else d.Fresh() for s in range(5)]
    state = RunState.start(simulation.started)
    assert (state.durable.folder, decide(state)) == ("", d.Spawn(worker="w0", incarnation=1))


SHARED = {
    "arrangement": [[0], [1, 2], [3, 4], [5], [6]],
    "routes": [[0, 1, 3, 5, 6, 0], [0, 2, 4, 5, 6, 0]],
    "extra_edges": [],
}


def test_nodes_of_a_stage_start_from_the_same_state() -> None:
    """After a rollback, a node that has loaded dies while another loads: both must get the checkpoint's stage."""
    simulation = fleet(**SHARED, spares=3, save_every=2, recovery={"strategy": "checkfree, checkpoint"})
    work_until(simulation, "run", 3)
    simulation.lose_node(1)
    simulation.lose_node(2)
    work_until(simulation, "link", 2)
    assert last(simulation, d.Form).outcome == "rolled back"
    loaded = simulation.state.holders[3]
    while loaded in simulation.pending():
        simulation.work(loaded)
    simulation.lose(loaded)
    work_until(simulation, "link", 2)
    sources = {m.node: m.source for m in last(simulation, d.Form).members}
    assert sources[3] == sources[4] == d.Load(folder="step-00000002")
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


@pytest.mark.parametrize("step", [0, 2])
def test_permanently_lost_nodes_are_planned_around(step: int) -> None:
    simulation = fleet(**SHARED, spares=0, replace=False, recovery={"meanwhile": "skip"})
    work_until(simulation, "run", step)
    simulation.lose_node(2)
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")
    assert [m.node for m in last(simulation, d.Form).members] == [0, 1, 3, 4, 5, 6]


def test_a_run_that_cannot_continue_names_the_stages_without_a_worker() -> None:
    simulation = fleet(**SHARED, spares=0, replace=False)
    work_until(simulation, "run", 2)
    simulation.lose_node(5)
    simulation.lose_node(2)
    simulation.behave()
    assert simulation.cannot is not None and simulation.cannot.lost == [3]


@pytest.mark.parametrize("bits", [32, 8])
def test_replicas_with_error_feedback_are_all_saved(bits: int) -> None:
    simulation = fleet(
        stages=1,
        save_every=1,
        arrangement=[[0, 2, 4], [1, 3, 5]],
        routes=[[0, 1, 0], [2, 3, 2], [4, 5, 4]],
        extra_edges=[(0, 2), (0, 4), (2, 4), (1, 3), (1, 5), (3, 5)],
        exchange={"replicas": 3, "options": {"bits": bits}},
    )
    work_until(simulation, "save", 1)
    saved = next(fact for fact in simulation.history if isinstance(fact, d.Save))
    assert saved.whole == ([] if bits == 32 else [0, 1]), "one file of each stage"
    assert saved.compared == [2, 3, 4, 5], "the others report the digest of their weights"
    assert simulation.state.waiting == {simulation.state.holders[node] for node in range(6)}
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")
    assert replay(simulation.history).problems == []
