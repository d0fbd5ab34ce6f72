"""Assignments folded from a log equal the controller's, for random histories."""

from __future__ import annotations

import random
from functools import cache

import pytest
from open_replicas import OpenReplicas
from replica_steps import started

from planaria.control.apply import apply
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.run import RunState
from planaria.report.worker_assignments import WorkerAssignments

KINDS = [("noloco", 1), ("diloco", 2), ("local", None)]


@cache
def troubled(seed: int) -> OpenReplicas:
    """Return simulated replicas after a random history of faults."""
    rng = random.Random(seed)
    kind, every = rng.choice(KINDS)
    replicas = rng.choice([1, 2, 3])
    sim = OpenReplicas(
        started(
            replicas,
            rng.choice([1, 2, 3]),
            {"kind": kind, "options": {"every": every} if every else {}},
            more=rng.choice([0, 1]) if replicas > 1 else 0,
            steps=6,
            spares=rng.randrange(3),
            replace=rng.random() < 0.7,
            save_every=rng.choice([0, 2]),
            recovery={"strategy": rng.choice(["checkfree", "checkfree, checkpoint", "checkpoint"])},
        )
    )
    for _ in range(400):
        if sim.run.over:
            break
        if pending := sim.pending():
            sim.work(rng.choice(pending))
        elif sim.mail:
            sim.deliver(0)
        if rng.random() < 0.06 and sim.alive:
            _trouble(sim, rng)
    return sim


def _trouble(sim: OpenReplicas, rng: random.Random) -> None:
    worker, there = rng.choice(list(sim.alive)), [h for h in sim.machines if sim.workers_of(h)]
    match rng.choice(["dies", "breaks", "leaves", "joins", "goes", "grace", "patience"]):
        case "dies":
            sim.lose(worker)
        case "breaks" if sim.alive[worker].node >= 0:
            sim.break_edge(worker, rng.randrange(4))
        case "leaves":
            sim.drain(worker)
        case "joins" if len(sim.machines) < 3:
            sim.join(rng.randint(1, 3))
        case "goes" if there:
            rng.choice([sim.leave, sim.vanish])(rng.choice(there))
        case "grace" if sim.suspicious():
            sim.expire_grace(sim.suspicious()[0])
        case "patience" if sim.impatient():
            sim.lose_patience(sim.impatient()[0])


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
