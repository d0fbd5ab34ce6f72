"""Assignments folded from a log equal the controller's, for random histories."""

from __future__ import annotations

import pytest

from planaria.control.apply import apply
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.run import RunState
from planaria.report.worker_assignments import WorkerAssignments
from support.control.random_histories import troubled
from support.control.replica_steps import started


def agree(members: WorkerAssignments, run: RunState) -> None:
    assert members.holders == run.holders
    assert members.node_of == {worker: node for node, worker in run.holders.items()}
    assert members.live == run.live.keys()
    assert members.generation.items() <= {n: replica.generation for n, replica in run.replicas.items()}.items()
    assert members.alive == {w for w, known in run.workers.items() if known.status not in ("starting", "dead")}
    assert members.spares == sum(known.status in ("spare", "released") for known in run.workers.values())
    assert {w for w, known in run.workers.items() if known.status == "released"} <= members.released
    assert members.machine_of == {w: known.host for w, known in run.workers.items()}
    if all(replica.phase != "commit" for replica in run.replicas.values()):  # WorkerAssignments counts ordered commits
        assert all(step == run.replicas[number].step for number, step in members.steps.items())
        assert members.progress == run.progress


@pytest.mark.parametrize("seed", range(40))
def test_the_log_gives_the_controllers_assignments(seed: int) -> None:
    history = troubled(seed).history
    assert isinstance(history[0], e.RunStarted)
    run, members = RunState.start(history[0]), WorkerAssignments()
    for fact in history:
        before = dict(members.holders)
        run, changed = apply(fact, run), members.apply(fact)
        other = {node for node in before | members.holders if before.get(node) != members.holders.get(node)}
        assert set(changed) == other and len(changed) == len(other)
        if run.over:
            break
        agree(members, run)


def test_the_histories_cover_all_relevant_facts() -> None:
    kinds = {type(fact) for seed in range(40) for fact in troubled(seed).history}
    assert kinds >= {
        e.WorkerJoined,
        e.WorkerLost,
        d.Spawn,
        d.Release,
        d.Form,
        d.Disband,
        d.ReplicaRestarted,
        d.RunStep,
        d.Commit,
    }
    assert {"rolled back", "handed over"} <= {
        fact.outcome for seed in range(40) for fact in troubled(seed).history if isinstance(fact, d.Form)
    }


def test_a_resumed_run_starts_without_workers() -> None:
    members = WorkerAssignments()
    for fact in troubled(3).history:
        members.apply(fact)
    again = started(
        2,
        1,
        {"kind": "noloco", "options": {"every": 1}},
        positions={0: e.ReplicaPosition(step=5), 1: e.ReplicaPosition(step=3)},
    )
    left = set(members.holders)
    assert set(members.apply(again)) == left
    assert not members.alive and not members.holders and not members.released and not members.machine_of
    assert (members.steps, members.own_step(0), members.own_step(1)) == ({0: 5, 1: 3}, 5, 3)
