"""Machines that join and leave a run: handovers, releases and new replicas."""

from __future__ import annotations

from typing import Any

from open_replicas import OpenReplicas
from replica_steps import facts, finished, started, work_until

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState
from planaria.control.worker_assignment import workers_to_join


def simulate_open(replicas: int, kind: str = "local", stages: int = 1, **changed: Any) -> OpenReplicas:
    """Start a run without spares that machines may join."""
    exchange = {"kind": kind, "options": {} if kind == "local" else {"every": 2}}
    return OpenReplicas(started(replicas, stages, exchange, **({"spares": 0} | changed)))


def joined(made: OpenReplicas, room: int) -> str:
    """Let a machine join after the first commits; return its name once its workers are ready."""
    work_until(made, moving)
    host = made.join(room)
    work_until(made, lambda run: all(made.alive[worker].joined for worker in made.workers_of(host)))
    return host


def moving(run: RunState) -> bool:
    """Return whether every replica has committed a step."""
    return all(replica.step for replica in run.live.values())


def handing(made: OpenReplicas, node: int) -> str:
    """Drain the worker at a node; return its name once its stage is being handed over."""
    old = made.run.holders[node]
    made.drain(old)
    work_until(made, lambda run: old not in run.holders.values())
    return old


def test_a_leaving_worker_hands_its_stage_over_unchanged() -> None:
    made = simulate_open(2, stages=2)
    joined(made, 1)
    old = handing(made, 2)
    form = facts(made, d.Form)[-1]
    assert form.outcome == "handed over" and form.replica == 0
    assert [m.source for m in form.members if m.node == 2] == [d.Handover(worker=old)]
    content = made.alive[old].content
    work_until(made, lambda run: run.replicas[0].phase != "link")
    assert made.alive[made.run.holders[2]].content == content and content.blocks
    assert [release.worker for release in facts(made, d.Release)] == [old]
    assert finished(made)


def test_leaving_spares_are_released() -> None:
    made = simulate_open(2)
    made.join(2)
    work_until(made, lambda run: run.workers["w5"].status == "spare")
    made.leave("g1")
    made.behave()
    assert {release.worker for release in facts(made, d.Release)} == {"w4", "w5"}


def test_a_dead_successor_is_replaced_by_another_with_the_same_state() -> None:
    """The first data node's stage cannot be rebuilt from others."""
    made = simulate_open(2)
    joined(made, 2)
    old = handing(made, 0)
    made.lose(made.run.holders[0])
    assert [m.source for m in facts(made, d.Form)[-1].members if m.node == 0] == [d.Handover(worker=old)]
    assert finished(made)
    assert not facts(made, d.Disband)


def test_a_leaving_worker_resumes_its_node_if_its_only_successor_dies() -> None:
    made = simulate_open(1, replace=False)
    joined(made, 1)
    old = handing(made, 0)
    made.lose(made.run.holders[0])
    assert made.run.holders[0] == old
    assert finished(made)


def test_a_stage_whose_handover_fails_is_rebuilt() -> None:
    made = simulate_open(2)
    joined(made, 1)
    handing(made, 1)
    new = made.run.holders[1]
    work_until(made, lambda run: made.alive[new].forming, without=[0])
    made.break_edge(new, 0)
    made.expire_grace(1)
    sources = [m.source for m in facts(made, d.Form)[-1].members if m.node == 1]
    assert [source.origin for source in sources] == ["rebuild"]
    assert finished(made)


def test_a_whole_replica_is_handed_over_although_one_worker_dies() -> None:
    made = simulate_open(2, stages=2)
    joined(made, 4)
    for worker in [made.run.holders[node] for node in (0, 2, 4)]:
        made.drain(worker)
    work_until(made, lambda run: bool(run.replicas[0].handover_from))
    old = dict(made.run.replicas[0].handover_from)
    assert old.keys() == {0, 2, 4}
    made.lose(old[2])
    origins = {m.node: m.source.origin for m in facts(made, d.Form)[-1].members}
    assert origins == {0: "handover", 2: "rebuild", 4: "handover"}
    assert finished(made)
    assert not facts(made, d.Disband)


def test_a_donor_is_not_released_before_its_state_has_arrived() -> None:
    made = simulate_open(2, stages=2, steps=6)
    joined(made, 3)
    made.lose(made.run.holders[4])
    work_until(made, lambda run: bool(run.replicas[0].donor_workers))
    lender = made.run.holders[5]
    assert lender in made.run.replicas[0].donor_workers.values()
    made.drain(lender)
    work_until(made, lambda run: run.holders[5] != lender and not run.replicas[1].handover_from, without=[0])
    assert not facts(made, d.Release)
    assert finished(made)
    assert [release.worker for release in facts(made, d.Release)] == [lender]


def test_a_replica_is_founded_when_a_machine_joins() -> None:
    made = simulate_open(2, more=1, steps=30, kind="diloco")
    joined(made, 2)
    work_until(made, lambda run: 2 in run.live and run.replicas[2].step > run.replicas[2].formed_at_step >= 0)
    assert [found.replica for found in facts(made, d.ReplicaRestarted)] == [2]
    assert {made.alive[w].host for w in made.run.replicas[2].holders.values()} == {"g1"}
    assert finished(made)


def test_a_replica_disbands_if_its_machine_leaves_without_successors() -> None:
    """Its committed steps count; their samples are not used again."""
    made = simulate_open(2, more=1, steps=30, kind="noloco")
    host = joined(made, 2)
    work_until(made, lambda run: 2 in run.live and run.replicas[2].step > run.replicas[2].formed_at_step >= 0)
    made.leave(host)
    work_until(made, lambda run: 2 not in run.live)
    work_until(made, lambda run: not made.workers_of(host))
    assert made.truth.ledger[2]
    assert finished(made)


def test_the_last_replica_stays_although_its_machine_is_leaving() -> None:
    made = simulate_open(1, replace=False, steps=6)
    host = joined(made, 1)
    handing(made, 0)
    work_until(made, lambda run: run.replicas[0].phase == "run")
    made.leave(host)
    last = made.workers_of(host)
    assert last == [made.run.holders[0]]
    assert finished(made)
    assert last[0] not in [release.worker for release in facts(made, d.Release)]


def test_a_machine_whose_workers_die_at_start_is_rejected() -> None:
    made = simulate_open(2)
    host = made.join(1)
    for _ in range(MAX_FAILED_STARTS):
        made.lose(*made.workers_of(host))
    assert [away.host for away in facts(made, d.RemoveMachine)] == [host]
    assert not made.workers_of(host)
    assert finished(made)


def test_a_machine_with_a_failed_worker_is_rejected_and_the_run_continues() -> None:
    made = simulate_open(2)
    joined(made, 1)
    handing(made, 1)
    work_until(made, lambda run: run.replicas[1].phase == "run")
    made.fail(made.run.holders[1])
    assert [away.host for away in facts(made, d.RemoveMachine)] == ["g1"]
    assert finished(made)


def test_a_failed_worker_is_no_donor() -> None:
    """It may have missed part of a commit, so it must not send its stage to others."""
    made = simulate_open(2, stages=3, steps=6)
    joined(made, 2)
    old = handing(made, 5)
    work_until(made, lambda run: old not in made.alive)
    work_until(made, lambda run: run.replicas[1].phase == "commit" and bool(made.alive[run.holders[5]].orders))
    made.fail(made.run.holders[5])
    made.lose(made.run.holders[4])
    lent = [
        m for f in facts(made, d.Form) for m in f.members if isinstance(m.source, d.Rebuild) and m.source.donors == [5]
    ]
    assert 5 not in made.run.holders and not lent
    assert finished(made)


def test_a_leaving_machine_with_a_failed_worker_is_rejected() -> None:
    """It takes no more workers, but its replica would wait forever for the failed one."""
    made = simulate_open(1, replace=False)
    joined(made, 1)
    handing(made, 1)
    work_until(made, lambda run: run.replicas[0].phase == "run")
    made.leave("g1")
    assert not facts(made, d.RemoveMachine)
    made.fail(made.run.holders[1])
    assert [away.host for away in facts(made, d.RemoveMachine)] == ["g1"]
    made.behave()
    assert made.ending


def test_a_worker_that_dies_during_a_stop_is_replaced_on_the_same_machine() -> None:
    """Otherwise the run would wait for a worker that is never started."""
    made = simulate_open(2, more=1, steps=30, kind="noloco")
    host = joined(made, 2)
    work_until(made, lambda run: 2 in run.live and run.replicas[2].phase == "run")
    made.stop()
    made.lose(made.workers_of(host)[0])
    made.behave()
    assert made.ending and made.ending.outcome == "stopped"


def test_failing_starts_are_limited_while_a_worker_is_leaving() -> None:
    made = simulate_open(2, steps=30)
    work_until(made, moving)
    made.drain(made.run.holders[0])
    for _ in range(2 * MAX_FAILED_STARTS):
        if born := [name for name, worker in made.alive.items() if not worker.joined]:
            made.lose(born[0])
        work_until(made, lambda run: any(r.phase == "run" for r in run.live.values()))
    assert len(facts(made, d.Spawn)) == 4 + MAX_FAILED_STARTS
    assert finished(made)


def test_a_replica_is_not_founded_with_designated_successors() -> None:
    made = simulate_open(2, more=1, steps=30, replace=False)
    work_until(made, lambda run: moving(run) and all(replica.phase == "run" for replica in run.live.values()))
    host = made.join(2)
    for node in (0, 1):
        made.drain(made.run.holders[node])
    for worker in made.workers_of(host):
        made.work(worker)
    work_until(made, lambda run: all(run.workers[worker].host for worker in (run.holders[0], run.holders[1])))
    assert not facts(made, d.Disband)
    assert finished(made)


def test_a_checkpoint_within_a_round_precedes_that_round() -> None:
    """After a rollback to it, the round is not settled yet."""
    exchange = {"kind": "streaming_diloco", "options": {"every": 2, "fragments": 1, "delay": 1}}
    made = OpenReplicas(started(2, 1, exchange, save_every=1, steps=8, spares=1))
    work_until(made, lambda run: any(r.open_round and r.phase == "save" for r in run.live.values()))
    replica = next(r for r in made.run.live.values() if r.open_round and r.phase == "save")
    assert replica.open_round
    assert made.run.positions[replica.number].rounds == replica.open_round.round
    assert finished(made)


def test_a_run_without_own_workers_waits_for_machines_and_trains_on_them() -> None:
    made = simulate_open(1, stages=2, own=0)
    made.behave()
    assert not facts(made, d.Spawn) and workers_to_join(made.run) == 3
    made.join(2)
    made.behave()
    assert workers_to_join(made.run) == 1 and not facts(made, d.Form)
    made.join(1)
    assert workers_to_join(made.run) == 0, "the rest is about to start"
    assert finished(made)
    assert {spawn.host for spawn in facts(made, d.Spawn)} == {"g1", "g2"}


def test_the_run_starts_as_many_own_workers_as_fit() -> None:
    made = simulate_open(1, stages=2, own=1)
    made.join(2)
    assert finished(made)
    assert sorted(spawn.host for spawn in facts(made, d.Spawn)) == ["", "g1", "g1"]


def test_a_run_that_no_machine_joins_ends_with_the_reason() -> None:
    made = simulate_open(1, stages=2, own=1)
    made.behave()
    made.happened(e.JoinTimedOut(missing_workers=2))
    made.behave()
    ending = made.ending
    assert ending is not None and ending.outcome == "failed" and "no machine has joined in time" in ending.reason


def abandoned() -> OpenReplicas:
    """Start a run on a machine that vanishes after the first commits."""
    made = simulate_open(1, stages=2, own=1, recovery={"strategy": "checkpoint"})
    host = made.join(2)
    work_until(made, moving)
    made.vanish(host)
    made.behave()
    return made


def test_a_run_whose_machines_left_waits_and_then_saves_the_rest() -> None:
    made = abandoned()
    assert workers_to_join(made.run) == 2 and not facts(made, d.Finish)
    made.happened(e.JoinTimedOut(missing_workers=2))
    made.behave()
    ending = made.ending
    assert ending is not None and ending.outcome == "cannot"


def test_a_machine_that_joins_late_is_used() -> None:
    made = abandoned()
    made.join(2)
    assert finished(made)
