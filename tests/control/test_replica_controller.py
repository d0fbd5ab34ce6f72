"""Several replicas under one controller: generations, checkpoints and copies."""

from __future__ import annotations

import pytest

from planaria.control.apply import apply
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.run import RunState
from support.control.replica_steps import facts, finished, relink, simulate, work_until
from support.control.simulated_replicas import SimulatedReplicas


def trained(run: RunState, spares: int = 0) -> bool:
    """Return whether every replica has committed a step and ``spares`` spares are ready."""
    return all(replica.step for replica in run.replicas.values()) and len(run.with_status("spare")) >= spares


def test_generations_are_unique_over_replicas() -> None:
    """A worker that changes replicas may still have reports of the first in transit."""
    simulation = simulate(3)
    assert finished(simulation)
    generations = [form.generation for form in facts(simulation, d.Form)]
    assert generations == sorted(set(generations)) and len(generations) == 3


def test_a_checkpoint_has_the_generations_of_its_saves() -> None:
    """One is saved, continues and is formed again before the other is saved."""
    simulation = simulate(2, "local", save_every=1)
    work_until(simulation, lambda run: run.replicas[0].saved > 0 and run.replicas[0].phase == "run", without=[1])
    relink(simulation, 0)
    assert simulation.run.saving > 0
    assert finished(simulation)


def test_a_replica_that_disbands_during_its_save_is_not_in_the_checkpoint() -> None:
    simulation = simulate(2, "local", save_every=1, spares=0, replace=False)
    work_until(simulation, lambda run: all(r.phase == "save" for r in run.replicas.values()))
    simulation.lose(simulation.run.holders[1])
    work_until(simulation, lambda run: run.replicas[1].phase == "left", without=[0])
    work_until(simulation, lambda run: run.saving < 0)
    assert list(facts(simulation, d.Seal)[-1].positions) == [0]
    assert finished(simulation)


@pytest.mark.parametrize("phase", ["run", "commit"])
def test_a_block_counts_as_used_if_its_commit_was_logged_before_the_replica_disbanded(phase: str) -> None:
    simulation = simulate(2, "local")
    work_until(simulation, lambda run: run.replicas[1].phase == phase)
    block = simulation.run.allocation.in_progress[1]
    workers = sorted(simulation.run.replicas[1].holders.values())
    allocation = apply(d.Disband(replica=1, workers=workers, reason="none left"), simulation.run).allocation
    assert 1 not in allocation.in_progress
    assert (block < allocation.used.floor or block in allocation.used.beyond) == (phase == "commit")


def test_a_second_request_does_not_make_a_prompt_stop_wait_for_repairs() -> None:
    run = simulate(2, "local").run
    for prompt in (True, False):
        run = apply(e.StopRequested(reason="SIGTERM", skip_repairs=prompt), run)
    assert run.stops_before_repair


def borrowing(simulation: SimulatedReplicas) -> None:
    """Let replica 0 lose the worker of its last stage and copy its state from replica 1."""
    work_until(simulation, lambda run: trained(run, spares=1))
    simulation.lose(simulation.run.holders[simulation.started.nodes_by_replica[0][-1]])
    work_until(simulation, lambda run: bool(run.replicas[0].donor_workers))


def test_a_donor_that_dies_after_sending_does_not_affect_the_receiver() -> None:
    """The replica's other workers still wait for their edges and would miss an order to run."""
    simulation = simulate(2, "local", stages=2, spares=2, steps=6)
    borrowing(simulation)
    lost, lender = simulation.run.holders[4], simulation.run.holders[5]
    while simulation.alive[lender].orders:
        simulation.work(lender)
    for worker in (simulation.run.holders[0], simulation.run.holders[2], lost):
        while simulation.alive[worker].orders:
            simulation.work(worker)
    simulation.work(lost)
    simulation.work(lost)
    assert simulation.run.replicas[0].phase == "link" and not simulation.run.replicas[0].lost
    simulation.lose(lender)
    assert finished(simulation)


def test_a_late_report_of_a_broken_transfer_edge_changes_nothing() -> None:
    simulation = simulate(2, "local", stages=2, spares=2, steps=6)
    borrowing(simulation)
    worker = simulation.run.holders[4]
    work_until(simulation, lambda run: simulation.alive[worker].forming, without=[1])
    broken = e.EdgeBroken(worker=worker, node=4, peer=5, generation=simulation.alive[worker].generation, detail="late")
    simulation.happened(broken)
    work_until(simulation, lambda run: run.replicas[0].phase == "run")
    before = simulation.run.replicas[0]
    simulation.expire_grace(0)
    assert (simulation.run.replicas[0].phase, simulation.run.replicas[0].waiting) == ("run", before.waiting)
    assert finished(simulation)


def test_a_replica_waits_to_copy_another_that_is_still_loading() -> None:
    """It must not be disbanded and founded in a loop."""
    simulation = simulate(2, "local", spares=4)
    work_until(simulation, lambda run: run.replicas[0].step == 1 and len(run.with_status("spare")) > 2, without=[1])
    simulation.lose(simulation.run.holders[0])
    assert finished(simulation)
    assert not facts(simulation, d.Disband)


@pytest.mark.parametrize("kind", ["noloco", "diloco"])
def test_replicas_with_different_lost_stages_copy_from_each_other(kind: str) -> None:
    """They must not wait for each other to be complete."""
    simulation = simulate(2, kind, stages=2, spares=2, steps=6)
    work_until(simulation, lambda run: trained(run, spares=2))
    simulation.lose(simulation.run.holders[0], simulation.run.holders[3])
    assert finished(simulation)
    assert not facts(simulation, d.Disband)


def test_of_synchronized_replicas_one_rebuilds_and_one_copies_a_stage_that_both_lost() -> None:
    simulation = simulate(2, "diloco", stages=3, spares=2, steps=6)
    work_until(simulation, lambda run: trained(run, spares=2))
    simulation.lose(simulation.run.holders[4], simulation.run.holders[5])
    assert finished(simulation)
    ways = [m.source.by for f in facts(simulation, d.Form) for m in f.members if isinstance(m.source, d.Rebuild)]
    assert ways.count("checkfree") == 1 and ways[-1] == d.PEER


def test_a_replica_without_state_disbands_before_one_with_state() -> None:
    simulation = simulate(2, "noloco", stages=2, spares=2, steps=8)
    work_until(simulation, trained)
    simulation.lose(*(w for n, w in simulation.run.holders.items() if n % 2 == 1))
    simulation.lose(simulation.run.holders[0])
    simulation.behave()
    assert [disband.replica for disband in facts(simulation, d.Disband)] == [1]
    assert facts(simulation, d.Seal)[-1].stages == [1, 2]


def test_files_of_an_abandoned_checkpoint_do_not_count_for_the_next() -> None:
    """The last replica cannot continue while it is being saved; then it is saved again in the same generation."""
    simulation = simulate(2, "local", stages=2, spares=0, replace=False, save_every=1)
    work_until(simulation, lambda run: run.replicas[0].step == 2 and run.replicas[0].phase == "save")
    work_until(simulation, lambda run: run.progress > run.saving, without=[0])
    old = next(w for w in simulation.run.replicas[0].waiting if w != simulation.run.holders[0])
    simulation.lose(*simulation.run.replicas[1].holders.values())
    simulation.lose(simulation.run.holders[0])
    assert not simulation.run.replicas[0].unrecoverable_reason, "others still write"
    work_until(simulation, lambda run: bool(run.replicas[0].unrecoverable_reason))
    assert simulation.run.saving != facts(simulation, d.Save)[-2].step
    simulation.work(old)
    simulation.behave()
    assert facts(simulation, d.Seal)[-1].partial
