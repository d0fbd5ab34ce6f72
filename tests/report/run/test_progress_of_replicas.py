"""Progress of a run with several replicas, and the time of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.events import ReplicaPosition
from planaria.control.log.run_record import RunRecord
from planaria.report.run.checkpoint_times import CheckpointTimes, saves
from planaria.report.worker_assignments import WorkerAssignments
from support.report.synthetic_replicas import commit, run_step, started


@given(st.integers(2, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=40))))
def test_progress_never_decreases_because_a_replica_is_behind(run: tuple[int, list[int]]) -> None:
    replicas, order = run
    members, steps, seen = WorkerAssignments(), dict.fromkeys(range(replicas), 0), [0]
    members.apply(started(replicas, steps=50))
    for count, replica in enumerate(order, 1):
        members.apply(run_step(replica, steps[replica], block=count - 1))
        members.apply(commit(replica, steps[replica], block=count - 1, replicas=replicas))
        steps[replica] += 1
        assert members.progress == count // replicas, "committed blocks over the number of replicas"
        seen.append(members.progress)
    assert seen == sorted(seen)


def test_a_resumed_run_counts_earlier_steps() -> None:
    members = WorkerAssignments()
    positions = {0: ReplicaPosition(step=5), 1: ReplicaPosition(step=3)}
    members.apply(started(2, first_step=4, positions=positions, first_block=7, blocks_ahead=[8]))
    assert members.progress == 4
    members.apply(commit(1, 3, block=7, replicas=2))
    members.apply(commit(1, 4, block=9, replicas=2))
    assert members.progress == 5


def test_a_replica_executes_the_run_step_of_its_samples() -> None:
    members = WorkerAssignments()
    members.apply(started(2))
    assert members.run_step(0) == members.run_step() == 0
    members.apply(run_step(1, step=3, block=10))
    assert (members.run_step(1), members.run_step(0)) == (5, 0)


def record(*facts: Any) -> RunRecord:
    return RunRecord(Path(), RunConfig(), [(float(n), fact) for n, fact in enumerate(facts)], [], [])


def copied(step: int, seconds: float, stage: int = 1) -> e.StageCopied:
    return e.StageCopied(worker=f"w{stage}", stage=stage, generation=2, step=step, seconds=seconds)


def written(step: int, seconds: float, stage: int = 1) -> e.StageSaved:
    return e.StageSaved(worker=f"w{stage}", stage=stage, generation=2, step=step, bytes=9, seconds=seconds)


def seal(step: int) -> d.Seal:
    return d.Seal(step=step, folder="", stages=[0, 1])


def test_the_slowest_worker_counts_and_background_writes_are_separate() -> None:
    beside = [
        d.Save(generation=2, step=4, background=True), copied(4, 0.25), copied(4, 0.5, 0), written(4, 3.0, 0),
        written(4, 2.0), seal(4),
    ]  # fmt: skip
    last = [d.Save(generation=2, step=8), written(8, 1.0), written(8, 2.0, 0), seal(8)]
    assert saves(record(*beside, *last)) == CheckpointTimes(sealed=2, paused_s=2.5, background_s=3.0)


def test_a_checkpoint_that_could_not_be_sealed_does_not_count() -> None:
    failed = e.SaveFailed(worker=e.CONTROLLER, stage=-1, generation=-1, step=4, detail="full")
    assert saves(record(d.Save(generation=2, step=4), seal(4), failed)) == CheckpointTimes()
