"""Machines that join and leave a run: handovers, releases and new replicas."""

from __future__ import annotations

from typing import Any

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.spares import workers_to_join
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState
from support.control.open_replicas import OpenReplicas
from support.control.replica_steps import facts, finished, started, work_until


def simulate_open(replicas: int, kind: str = "local", stages: int = 1, **changed: Any) -> OpenReplicas:
    """Start a run without spares that machines may join."""
    exchange = {"kind": kind, "options": {} if kind == "local" else {"every": 2}}
    return OpenReplicas(started(replicas, stages, exchange, **({"spares": 0} | changed)))


def joined(simulation: OpenReplicas, room: int) -> str:
    """Let a machine join after the first commits; return its name once its workers are ready."""
    work_until(simulation, moving)
    host = simulation.join(room)
    work_until(simulation, lambda run: all(simulation.alive[worker].joined for worker in simulation.workers_of(host)))
    return host


def moving(run: RunState) -> bool:
    """Return whether every replica has committed a step."""
    return all(replica.step for replica in run.live.values())


def handing(simulation: OpenReplicas, node: int) -> str:
    """Drain the worker at a node; return its name once its stage is being handed over."""
    old = simulation.run.holders[node]
    simulation.drain(old)
    work_until(simulation, lambda run: old not in run.holders.values())
    return old


def test_a_leaving_worker_hands_its_stage_over_unchanged() -> None:
    simulation = simulate_open(2, stages=2)
    joined(simulation, 1)
    old = handing(simulation, 2)
    form = facts(simulation, d.Form)[-1]
    assert form.outcome == "handed over" and form.replica == 0
    assert [m.source for m in form.members if m.node == 2] == [d.Handover(worker=old)]
    content = simulation.alive[old].content
    work_until(simulation, lambda run: run.replicas[0].phase != "link")
    assert simulation.alive[simulation.run.holders[2]].content == content and content.blocks
    assert [release.worker for release in facts(simulation, d.Release)] == [old]
    assert finished(simulation)


def test_leaving_spares_are_released() -> None:
    simulation = simulate_open(2)
    simulation.join(2)
    work_until(simulation, lambda run: run.workers["w5"].status == "spare")
    simulation.leave("g1")
    simulation.behave()
    assert {release.worker for release in facts(simulation, d.Release)} == {"w4", "w5"}


def test_a_dead_successor_is_replaced_by_another_with_the_same_state() -> None:
    """The first data node's stage cannot be rebuilt from others."""
    simulation = simulate_open(2)
    joined(simulation, 2)
    old = handing(simulation, 0)
    simulation.lose(simulation.run.holders[0])
    assert [m.source for m in facts(simulation, d.Form)[-1].members if m.node == 0] == [d.Handover(worker=old)]
    assert finished(simulation)
    assert not facts(simulation, d.Disband)


def test_a_leaving_worker_resumes_its_node_if_its_only_successor_dies() -> None:
    simulation = simulate_open(1, replace=False)
    joined(simulation, 1)
    old = handing(simulation, 0)
    simulation.lose(simulation.run.holders[0])
    assert simulation.run.holders[0] == old
    assert finished(simulation)


def test_a_stage_whose_handover_fails_is_rebuilt() -> None:
    simulation = simulate_open(2)
    joined(simulation, 1)
    handing(simulation, 1)
    new = simulation.run.holders[1]
    work_until(simulation, lambda run: simulation.alive[new].forming, without=[0])
    simulation.break_edge(new, 0)
    simulation.expire_grace(1)
    sources = [m.source for m in facts(simulation, d.Form)[-1].members if m.node == 1]
    assert [source.origin for source in sources] == ["rebuild"]
    assert finished(simulation)


def test_a_whole_replica_is_handed_over_although_one_worker_dies() -> None:
    simulation = simulate_open(2, stages=2)
    joined(simulation, 4)
    for worker in [simulation.run.holders[node] for node in (0, 2, 4)]:
        simulation.drain(worker)
    work_until(simulation, lambda run: bool(run.replicas[0].handover_from))
    old = dict(simulation.run.replicas[0].handover_from)
    assert old.keys() == {0, 2, 4}
    simulation.lose(old[2])
    origins = {m.node: m.source.origin for m in facts(simulation, d.Form)[-1].members}
    assert origins == {0: "handover", 2: "rebuild", 4: "handover"}
    assert finished(simulation)
    assert not facts(simulation, d.Disband)


def test_a_donor_is_not_released_before_its_state_has_arrived() -> None:
    simulation = simulate_open(2, stages=2, steps=6)
    joined(simulation, 3)
    simulation.lose(simulation.run.holders[4])
    work_until(simulation, lambda run: bool(run.replicas[0].donor_workers))
    lender = simulation.run.holders[5]
    assert lender in simulation.run.replicas[0].donor_workers.values()
    simulation.drain(lender)
    work_until(simulation, lambda run: run.holders[5] != lender and not run.replicas[1].handover_from, without=[0])
    assert not facts(simulation, d.Release)
    assert finished(simulation)
    assert [release.worker for release in facts(simulation, d.Release)] == [lender]


def test_a_replica_is_founded_when_a_machine_joins() -> None:
    simulation = simulate_open(2, more=1, steps=30, kind="diloco")
    joined(simulation, 2)
    work_until(simulation, lambda run: 2 in run.live and run.replicas[2].step > run.replicas[2].formed_at_step >= 0)
    assert [found.replica for found in facts(simulation, d.ReplicaRestarted)] == [2]
    assert {simulation.alive[w].host for w in simulation.run.replicas[2].holders.values()} == {"g1"}
    assert finished(simulation)


def test_a_replica_disbands_if_its_machine_leaves_without_successors() -> None:
    """Its committed steps count; their samples are not used again."""
    simulation = simulate_open(2, more=1, steps=30, kind="noloco")
    host = joined(simulation, 2)
    work_until(simulation, lambda run: 2 in run.live and run.replicas[2].step > run.replicas[2].formed_at_step >= 0)
    simulation.leave(host)
    work_until(simulation, lambda run: 2 not in run.live)
    work_until(simulation, lambda run: not simulation.workers_of(host))
    assert simulation.truth.ledger[2]
    assert finished(simulation)


def test_the_last_replica_stays_although_its_machine_is_leaving() -> None:
    simulation = simulate_open(1, replace=False, steps=6)
    host = joined(simulation, 1)
    handing(simulation, 0)
    work_until(simulation, lambda run: run.replicas[0].phase == "run")
    simulation.leave(host)
    last = simulation.workers_of(host)
    assert last == [simulation.run.holders[0]]
    assert finished(simulation)
    assert last[0] not in [release.worker for release in facts(simulation, d.Release)]


def test_a_machine_whose_workers_die_at_start_is_rejected() -> None:
    simulation = simulate_open(2)
    host = simulation.join(1)
    for _ in range(MAX_FAILED_STARTS):
        simulation.lose(*simulation.workers_of(host))
    assert [away.host for away in facts(simulation, d.RemoveMachine)] == [host]
    assert not simulation.workers_of(host)
    assert finished(simulation)


def test_a_machine_with_a_failed_worker_is_rejected_and_the_run_continues() -> None:
    simulation = simulate_open(2)
    joined(simulation, 1)
    handing(simulation, 1)
    work_until(simulation, lambda run: run.replicas[1].phase == "run")
    simulation.fail(simulation.run.holders[1])
    assert [away.host for away in facts(simulation, d.RemoveMachine)] == ["g1"]
    assert finished(simulation)


def test_a_failed_worker_is_no_donor() -> None:
    """It may have missed part of a commit, so it must not send its stage to others."""
    simulation = simulate_open(2, stages=3, steps=6)
    joined(simulation, 2)
    old = handing(simulation, 5)
    work_until(simulation, lambda run: old not in simulation.alive)
    work_until(
        simulation, lambda run: run.replicas[1].phase == "commit" and bool(simulation.alive[run.holders[5]].orders)
    )
    simulation.fail(simulation.run.holders[5])
    simulation.lose(simulation.run.holders[4])
    lent = [
        m
        for f in facts(simulation, d.Form)
        for m in f.members
        if isinstance(m.source, d.Rebuild) and m.source.donors == [5]
    ]
    assert 5 not in simulation.run.holders and not lent
    assert finished(simulation)


def test_a_leaving_machine_with_a_failed_worker_is_rejected() -> None:
    """It takes no more workers, but its replica would wait forever for the failed one."""
    simulation = simulate_open(1, replace=False)
    joined(simulation, 1)
    handing(simulation, 1)
    work_until(simulation, lambda run: run.replicas[0].phase == "run")
    simulation.leave("g1")
    assert not facts(simulation, d.RemoveMachine)
    simulation.fail(simulation.run.holders[1])
    assert [away.host for away in facts(simulation, d.RemoveMachine)] == ["g1"]
    simulation.behave()
    assert simulation.ending


def test_a_worker_that_dies_during_a_stop_is_replaced_on_the_same_machine() -> None:
    """Otherwise the run would wait for a worker that is never started."""
    simulation = simulate_open(2, more=1, steps=30, kind="noloco")
    host = joined(simulation, 2)
    work_until(simulation, lambda run: 2 in run.live and run.replicas[2].phase == "run")
    simulation.stop()
    simulation.lose(simulation.workers_of(host)[0])
    simulation.behave()
    assert simulation.ending and simulation.ending.outcome == "stopped"


def test_failing_starts_are_limited_while_a_worker_is_leaving() -> None:
    simulation = simulate_open(2, steps=30)
    work_until(simulation, moving)
    simulation.drain(simulation.run.holders[0])
    for _ in range(2 * MAX_FAILED_STARTS):
        if starting := [name for name, worker in simulation.alive.items() if not worker.joined]:
            simulation.lose(starting[0])
        work_until(simulation, lambda run: any(r.phase == "run" for r in run.live.values()))
    assert len(facts(simulation, d.Spawn)) == 4 + MAX_FAILED_STARTS
    assert finished(simulation)


def test_a_replica_is_not_founded_with_designated_successors() -> None:
    simulation = simulate_open(2, more=1, steps=30, replace=False)
    work_until(simulation, lambda run: moving(run) and all(replica.phase == "run" for replica in run.live.values()))
    host = simulation.join(2)
    for node in (0, 1):
        simulation.drain(simulation.run.holders[node])
    for worker in simulation.workers_of(host):
        simulation.work(worker)
    work_until(simulation, lambda run: all(run.workers[worker].host for worker in (run.holders[0], run.holders[1])))
    assert not facts(simulation, d.Disband)
    assert finished(simulation)


def test_a_checkpoint_within_a_round_precedes_that_round() -> None:
    """After a rollback to it, the round is not settled yet."""
    exchange = {"kind": "streaming_diloco", "options": {"every": 2, "fragments": 1, "delay": 1}}
    simulation = OpenReplicas(started(2, 1, exchange, save_every=1, steps=8, spares=1))
    work_until(simulation, lambda run: any(r.open_round and r.phase == "save" for r in run.live.values()))
    replica = next(r for r in simulation.run.live.values() if r.open_round and r.phase == "save")
    assert replica.open_round
    assert simulation.run.positions[replica.number].rounds == replica.open_round.round
    assert finished(simulation)


def test_a_run_without_own_workers_waits_for_machines_and_trains_on_them() -> None:
    simulation = simulate_open(1, stages=2, local_workers=0)
    simulation.behave()
    assert not facts(simulation, d.Spawn) and workers_to_join(simulation.run) == 3
    simulation.join(2)
    simulation.behave()
    assert workers_to_join(simulation.run) == 1 and not facts(simulation, d.Form)
    simulation.join(1)
    assert workers_to_join(simulation.run) == 0, "the rest is about to start"
    assert finished(simulation)
    assert {spawn.host for spawn in facts(simulation, d.Spawn)} == {"g1", "g2"}


def test_the_run_starts_as_many_own_workers_as_fit() -> None:
    simulation = simulate_open(1, stages=2, local_workers=1)
    simulation.join(2)
    assert finished(simulation)
    assert sorted(spawn.host for spawn in facts(simulation, d.Spawn)) == ["", "g1", "g1"]


def test_a_run_that_no_machine_joins_ends_with_the_reason() -> None:
    simulation = simulate_open(1, stages=2, local_workers=1)
    simulation.behave()
    simulation.happened(e.JoinTimedOut(missing_workers=2))
    simulation.behave()
    ending = simulation.ending
    assert ending is not None and ending.outcome == "failed" and "no machine has joined in time" in ending.reason


def abandoned() -> OpenReplicas:
    """Start a run on a machine that vanishes after the first commits."""
    simulation = simulate_open(1, stages=2, local_workers=1, recovery={"strategy": "checkpoint"})
    host = simulation.join(2)
    work_until(simulation, moving)
    simulation.vanish(host)
    simulation.behave()
    return simulation


def test_a_run_whose_machines_left_waits_and_then_saves_the_rest() -> None:
    simulation = abandoned()
    assert workers_to_join(simulation.run) == 2 and not facts(simulation, d.Finish)
    simulation.happened(e.JoinTimedOut(missing_workers=2))
    simulation.behave()
    ending = simulation.ending
    assert ending is not None and ending.outcome == "cannot"


def test_a_machine_that_joins_late_is_used() -> None:
    simulation = abandoned()
    simulation.join(2)
    assert finished(simulation)
