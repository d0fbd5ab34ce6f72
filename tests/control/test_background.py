"""Checkpoints written during training: sealing, abandoning and waiting."""

from __future__ import annotations

import pytest

from planaria.config.schema import RunConfig
from planaria.control.apply import apply
from planaria.control.checkpoint_cadence import CheckpointCadence
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.stuck_workers import ActionDeadlines
from planaria.recovery.checkpoint import best_steps
from support.control.replica_steps import facts, finished, simulate
from support.control.replica_steps import work_until as herd_until
from support.control.scenarios import STAGES, fleet, last, seals, work_until
from support.control.simulated_fleet import SimulatedFleet
from support.control.simulation import DISK


def behind(**changed: object) -> SimulatedFleet:
    return fleet(save_every=2, save_in_background=True, **changed)


def train_on(simulation: SimulatedFleet, phase: str, step: int) -> None:
    """Run workers, but no writing threads, until the phase of this step."""
    for turn in range(1000):
        if (simulation.state.phase, simulation.state.step) == (phase, step):
            return
        busy = [worker for worker in simulation.pending() if not worker.endswith(DISK)]
        simulation.work(busy[turn % len(busy)])
    raise AssertionError(f"never in {phase} at step {step}")


def saves(simulation: SimulatedFleet) -> list[tuple[int, bool]]:
    return [(fact.step, fact.background) for fact in simulation.history if isinstance(fact, d.Save)]


def test_training_continues_and_the_next_save_waits_for_the_current_one() -> None:
    simulation = behind(steps=8)
    train_on(simulation, "run", 5)
    assert saves(simulation) == [(2, True)] and seals(simulation) == []
    for stage in range(STAGES + 1):
        simulation.work(simulation.state.holders[stage] + DISK)
    assert seals(simulation) == [2] and simulation.run.durable.step == simulation.run.durable.positions[0].step == 2
    assert (last(simulation, d.Seal).first_block, last(simulation, d.Seal).blocks_ahead) == (2, []), (
        "not the current step"
    )
    simulation.behave()
    assert saves(simulation)[1] == (6, True), "when the step under way is committed"
    assert saves(simulation)[-1] == (8, False) and seals(simulation) == [step for step, _ in saves(simulation)]
    assert simulation.ending == d.Finish(outcome="finished")


@pytest.mark.parametrize("strategy", ["checkfree", "checkfree, checkpoint"])
def test_a_worker_dying_while_it_writes_invalidates_that_checkpoint(strategy: str) -> None:
    simulation = behind(steps=8, recovery={"strategy": strategy})
    train_on(simulation, "run", 4)
    simulation.lose_node(2)
    assert simulation.run.saving < 0 and simulation.run.writing
    train_on(simulation, "run", 5)
    assert saves(simulation) == [(2, True)], "the others still write, and get no second file to write"
    simulation.behave()
    assert 2 not in seals(simulation) and simulation.ending == d.Finish(outcome="finished")


def test_a_rollback_waits_for_a_checkpoint_that_lacks_only_files() -> None:
    simulation = behind(steps=8, recovery={"strategy": "checkpoint"})
    work_until(simulation, "save", 4)
    train_on(simulation, "run", 6)
    simulation.work(simulation.state.holders[2] + DISK)
    simulation.lose_node(2)
    forms = len([fact for fact in simulation.history if isinstance(fact, d.Form)])
    assert seals(simulation) == [2] and forms == 1, "no rollback is ordered yet"
    for stage in (0, 1, 3, 4):
        simulation.work(simulation.state.holders[stage] + DISK)
    assert seals(simulation) == [2, 4] and (last(simulation, d.Form).outcome, last(simulation, d.Form).step) == (
        "rolled back",
        4,
    )
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_a_rollback_does_not_wait_for_a_checkpoint_that_cannot_complete() -> None:
    simulation = behind(steps=8, recovery={"strategy": "checkpoint"})
    work_until(simulation, "save", 4)
    train_on(simulation, "run", 6)
    simulation.lose_node(2)
    assert (last(simulation, d.Form).outcome, last(simulation, d.Form).step) == ("rolled back", 2)
    simulation.behave()
    assert seals(simulation) == [2, 8] and simulation.ending == d.Finish(outcome="finished")


def test_an_unrecoverable_loss_waits_for_the_checkpoint_to_resume_from() -> None:
    simulation = behind(steps=8, recovery={"strategy": "checkfree"})
    train_on(simulation, "run", 4)
    simulation.work(simulation.state.holders[1] + DISK)
    simulation.lose_node(1)
    assert simulation.cannot is None
    for stage in (0, 2, 3, 4):
        simulation.work(simulation.state.holders[stage] + DISK)
    assert simulation.cannot is not None and simulation.run.durable.step == 2
    simulation.behave()
    assert seals(simulation) == [2, 4], "and what is left is saved as well"


def test_a_failed_write_invalidates_that_checkpoint() -> None:
    simulation = behind(steps=8)
    train_on(simulation, "run", 3)
    simulation.full = 1
    simulation.work(simulation.state.holders[3] + DISK)
    assert simulation.run.unsaved is not None and d.Discard(step=2) not in simulation.history, "the others write yet"
    for stage in (0, 1, 2, 4):
        simulation.work(simulation.state.holders[stage] + DISK)
    assert d.Discard(step=2) in simulation.history
    simulation.behave()
    assert seals(simulation)[0] == 4 and simulation.ending == d.Finish(outcome="finished")


def test_a_stop_saves_the_current_step() -> None:
    simulation = behind(steps=8)
    train_on(simulation, "run", 3)
    simulation.stop()
    simulation.behave()
    assert saves(simulation) == [(2, True), (4, False)] and seals(simulation) == [2, 4]
    assert simulation.ending == d.Finish(outcome="stopped", reason="someone asked")


def test_reports_of_an_earlier_file_are_ignored() -> None:
    simulation = behind(steps=8)
    work_until(simulation, "save", 4)
    train_on(simulation, "run", 5)
    earlier = [fact for fact in simulation.history if isinstance(fact, e.StageSaved) and fact.step == 2]
    assert len(simulation.run.writing) == STAGES + 1 == len(earlier)
    for fact in earlier:
        assert apply(fact, simulation.run) == simulation.run


def test_a_worker_of_a_leaving_machine_is_released_once_its_file_is_written() -> None:
    """Its stage trains elsewhere, but its file is still being written."""
    simulation = simulate(1, "local", stages=1, save_every=2, save_in_background=True, steps=8, spares=1)

    def training(run: object) -> bool:
        return simulation.run.replicas[0].step == 3 and bool(simulation.run.spares)

    for turn in range(500):
        if training(simulation.run):
            break
        busy = [worker for worker in simulation.pending() if not worker.endswith(DISK)]
        simulation.work(busy[turn % len(busy)])
    leaver = simulation.run.holders[0]
    simulation.happened(e.WorkerLeaving(worker=leaver, incarnation=1, detail="drained"))
    for turn in range(500):
        busy = [worker for worker in simulation.pending() if not worker.endswith(DISK)]
        if not busy or simulation.run.replicas[0].step == 5:
            break
        simulation.work(busy[turn % len(busy)])
    assert leaver in simulation.run.writing and simulation.run.holders[0] != leaver
    assert not facts(simulation, d.Release)
    simulation.work(leaver + DISK)
    simulation.work(simulation.run.holders[1] + DISK)
    assert [seal.step for seal in facts(simulation, d.Seal)] == [2]
    assert facts(simulation, d.Release) == [d.Release(worker=leaver)]


def test_a_rolled_back_replica_voids_the_checkpoint_in_progress() -> None:
    """Both lose a stage when only one has been saved: the checkpoint is void."""
    simulation = simulate(
        2, "local", stages=1, save_every=2, save_in_background=True, steps=10, recovery={"strategy": "checkpoint"}
    )
    herd_until(simulation, lambda run: all(replica.step for replica in run.replicas.values()) and bool(run.spares))
    herd_until(
        simulation, lambda run: run.replicas[0].saved == run.saving > 0 and run.replicas[0].phase == "run", without=[1]
    )
    for worker in sorted(simulation.run.writing):
        simulation.work(worker + DISK)
    assert (
        simulation.run.saving > 0
        and simulation.run.replicas[1].saved != simulation.run.saving
        and not simulation.run.writing
    )
    simulation.lose(
        *(
            simulation.run.holders[node]
            for node in simulation.started.nodes_by_replica[0][1:] + simulation.started.nodes_by_replica[1][1:]
        )
    )
    herd_until(simulation, lambda run: any(f.outcome == "rolled back" for f in facts(simulation, d.Form)))
    assert simulation.run.saving < 0
    assert finished(simulation)


def test_the_save_interval_depends_on_pauses_and_exceeds_the_writing_time() -> None:
    def chosen(write_s: float) -> e.IntervalChosen:
        cadence, found = CheckpointCadence(0.1, 5), None
        for step in range(11):
            cadence.on_decision(float(step), d.RunStep(generation=1, step=step))
        cadence.on_decision(11.0, d.Save(generation=1, step=11, background=True))
        for step in range(11, 11 + int(write_s)):
            cadence.on_decision(step + 0.25, d.RunStep(generation=1, step=step))
        found = cadence.on_decision(11.25 + write_s, d.Seal(step=11, folder="", stages=[]))
        assert found is not None
        return found

    short, best = chosen(3.0), best_steps(0.1, 5, 1.0, 0.25)
    assert (short.steps, short.step_s, short.save_s, short.write_s) == (best, 1.0, 0.25, 3.25)
    assert chosen(best + 40.0).steps == best + 41


def test_a_hanging_file_is_reported_but_a_disk_that_hangs_for_all_is_waited_for() -> None:
    config = RunConfig.model_validate({"fleet": {"disk_timeout_s": 2.0}})
    deadlines = ActionDeadlines(config)
    deadlines.record_order(0.0, ["w1", "w2"], to_write=True)
    deadlines.record_order(1.0, ["w1", "w2"])  # and to train on

    def why(seconds: float, *writing: str) -> str:
        return deadlines.overdue_write_reason(
            "w1", e.Heartbeat(doing="forward", checkpoint_being_written=8, writing_s=seconds), writing
        )

    assert why(2.1, "w1") == "its file of checkpoint 8 has not been written for 2.1 s (limit 2 s)"
    assert not why(1.9, "w1") and not why(2.1, "w1", "w2") and "limit 20 s" in why(20.1, "w1", "w2")
    assert not why(99.0), "it is written: the beat is older than that"
    slow = e.WorkReport(
        worker="w2", node=2, stage=2, generation=1, step=8, sent_bytes={},
        spans=[e.Span(action="write", start=0.0, end=1.0)],
    )  # fmt: skip
    deadlines.record_durations(slow)
    assert not why(9.9, "w1") and "limit 10 s" in why(10.1, "w1")
