"""Rounds of the exchange: when and with which members replicas meet, and rounds with missing members."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from planaria.control.apply_base import mark_decided, with_replica
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.events import ReplicaPosition
from planaria.control.state.block_allocation import BlockSet
from planaria.control.state.run import RunState
from support.control.full_decide import decide_checked
from support.control.replica_steps import facts, finished, relink, simulate, work_until
from support.control.simulated_replicas import SimulatedReplicas

STREAMING = {"kind": "streaming_diloco", "options": {"every": 3, "fragments": 1, "delay": 2}}


@pytest.mark.parametrize("stop", [False, True])
def test_an_overlapped_round_is_settled_at_the_end_of_the_run(stop: bool) -> None:
    simulation = simulate(2, exchange=STREAMING, steps=9 if stop else 3)
    work_until(simulation, lambda run: all(r.open_round for r in run.replicas.values()))
    if stop:
        simulation.stop()
    simulation.behave()
    assert simulation.ending is not None
    assert [settle.members for settle in facts(simulation, d.Settle)] == [[0, 1]]


def test_replicas_meet_before_they_are_validated_and_saved() -> None:
    """As with the inline engine; also at the end."""
    simulation = simulate(2, "noloco", steps=4, eval_every=2, save_every=2)
    assert finished(simulation)
    assert facts(simulation, d.Seal)[-1].positions == dict.fromkeys((0, 1), ReplicaPosition(step=4, rounds=2, inner=0))
    settled = {f.round: n for n, f in enumerate(simulation.history) if isinstance(f, d.Settle)}
    for n, fact in enumerate(simulation.history):
        if isinstance(fact, d.RunStep) and fact.mode == "evaluate" and fact.step:
            assert n > settled[fact.step // 2 - 1]


def test_a_disbanded_replica_stays_disbanded_after_its_grace() -> None:
    simulation = simulate(2, "noloco", steps=9, spares=0, replace=False)
    work_until(simulation, lambda run: all(r.phase == "run" for r in run.replicas.values()))
    simulation.break_edge(simulation.run.replicas[1].holders[1], 0)
    generation = simulation.run.replicas[1].generation
    simulation.lose(simulation.run.replicas[1].holders[3])
    simulation.happened(e.GraceExpired(replica=1, generation=generation))
    assert simulation.run.replicas[1].phase == "left"
    assert finished(simulation)
    assert len(facts(simulation, d.Disband)) == 1


def all_due(run: RunState) -> bool:
    """Return whether all replicas have finished the steps before the first round."""
    return all(replica.steps_since_round >= 2 for replica in run.live.values())


def test_a_pair_meets_and_settles() -> None:
    simulation = simulate(2, "noloco", steps=2)
    assert finished(simulation)
    (meet,) = facts(simulation, d.BeginRound)
    assert (meet.round, meet.members) == (0, [0, 1])
    assert [(link.low, link.high) for link in meet.links] == [(0, 1), (2, 3)]
    (settle,) = facts(simulation, d.Settle)
    assert settle.members == [0, 1]


def test_a_replica_without_a_partner_settles_alone_at_once() -> None:
    simulation = simulate(2, "noloco", replace=False, spares=0)
    work_until(simulation, lambda run: run.replicas[0].step == 1)
    simulation.lose(simulation.run.holders[1])
    assert simulation.run.replicas[1].phase == "left"
    work_until(simulation, lambda run: run.replicas[0].rounds == 1)
    assert [settle.members for settle in facts(simulation, d.Settle)] == [[0]]
    assert finished(simulation)


def test_a_replica_settles_alone_after_waiting_for_a_late_partner() -> None:
    simulation = simulate(2, "noloco", steps=6)
    work_until(
        simulation, lambda run: run.replicas[0].steps_since_round == 2 and run.replicas[0].phase == "idle", without=[1]
    )
    assert simulation.impatient() == [(0, 0, False)]
    simulation.lose_patience((0, 0, False))
    assert [settle.members for settle in facts(simulation, d.Settle)] == [[0]]
    work_until(simulation, lambda run: run.replicas[1].rounds == 1)
    assert facts(simulation, d.Settle)[1].members == [1], "its partner has passed that round, so it waits for none"
    assert finished(simulation)


def test_one_of_an_odd_number_of_replicas_sits_out() -> None:
    simulation = simulate(3, "noloco", steps=2)
    assert finished(simulation)
    (draw,) = facts(simulation, d.DrawGroups)
    assert sorted(map(len, draw.groups)) == [1, 2]
    assert sorted(settle.members for settle in facts(simulation, d.Settle)) == sorted(draw.groups)


def test_a_member_that_receives_nothing_settles_alone() -> None:
    simulation = simulate(3, "pair_mean", steps=2, exchange={"options": {"every": 2, "group": 3}})
    work_until(simulation, lambda run: all(r.open_round for r in run.replicas.values()))
    for worker in [w for w in simulation.pending() if w]:
        simulation.work(worker)
    deaf = set(simulation.run.replicas[1].holders.values())
    simulation.mail = [mail for mail in simulation.mail if mail[2] not in deaf]
    while simulation.mail:
        simulation.deliver(0)
    assert not facts(simulation, d.Settle)
    simulation.lose_patience(simulation.impatient()[0])
    assert [settle.members for settle in facts(simulation, d.Settle)] == [[0, 2], [1]]
    assert finished(simulation)


def test_a_synchronized_replica_that_missed_a_round_becomes_a_copy() -> None:
    simulation = simulate(3, "diloco", steps=4)
    work_until(simulation, lambda run: all(run.replicas[n].steps_since_round == 2 for n in (0, 1)), without=[2])
    work_until(simulation, lambda run: len(simulation.impatient()) == 2, without=[2])
    simulation.lose_patience(simulation.impatient()[0])
    work_until(simulation, lambda run: run.replicas[2].lost != frozenset())
    (adopt,) = facts(simulation, d.Adopt)
    assert (adopt.replica, facts(simulation, d.Settle)[0].members) == (2, [0, 1])
    form = facts(simulation, d.Form)[-1]
    assert {type(member.source) for member in form.members} == {d.Rebuild}
    assert (form.rounds, form.step) == (1, 2)
    assert finished(simulation)


def test_a_replica_adopts_only_after_the_others_have_settled() -> None:
    """They may lose their updates and meet again with this one."""
    simulation = simulate(3, "diloco", steps=2)
    work_until(simulation, lambda run: all(run.replicas[n].steps_since_round == 2 for n in (0, 1)), without=[2])
    work_until(simulation, lambda run: len(simulation.impatient()) == 2, without=[2])
    simulation.lose_patience(simulation.impatient()[0])
    assert facts(simulation, d.BeginRound)[0].members == [0, 1]
    while simulation.run.replicas[2].steps_since_round < 2:
        simulation.work(next(w for w in simulation.pending() if w in simulation.run.replicas[2].holders.values()))
    relink(simulation, 0)
    relink(simulation, 1)
    assert finished(simulation)
    assert not facts(simulation, d.Adopt)
    assert [settle.members for settle in facts(simulation, d.Settle)] == [[0, 1, 2]]


@pytest.mark.parametrize("kind", ["noloco", "diloco"])
def test_a_replica_formed_again_in_a_round_does_not_settle_dropped_updates(kind: str) -> None:
    """Its edges broke, so its workers have dropped the received updates."""
    simulation = simulate(2, kind, steps=4)
    work_until(simulation, lambda run: bool(run.replicas[0].open_round and run.replicas[0].open_round.received))
    relink(simulation, 0)
    assert facts(simulation, d.Form)[-1].outcome == "relinked"
    assert finished(simulation)
    met = [settle.members for settle in facts(simulation, d.Settle) if settle.round == 0]
    assert sorted(met) == ([[1]] if kind == "noloco" else [[0, 1]])
    assert sum(meet.round == 0 for meet in facts(simulation, d.BeginRound)) == (1 if kind == "noloco" else 2)


def test_a_stage_lost_at_each_member_of_a_round_is_copied_from_the_other() -> None:
    simulation = simulate(2, "diloco", stages=2, steps=4, spares=2)
    work_until(
        simulation, lambda run: all(r.open_round for r in run.replicas.values()) and len(run.with_status("spare")) == 2
    )
    simulation.lose(simulation.run.holders[0], simulation.run.holders[3])
    assert finished(simulation)
    assert not facts(simulation, d.Adopt) and not facts(simulation, d.Disband)
    assert facts(simulation, d.Settle)[0].members == [0, 1], "they have met again"


def test_others_help_with_the_lane_of_a_straggler() -> None:
    simulation = simulate(2, "noloco", steps=20)
    work_until(simulation, lambda run: run.replicas[0].step >= 1)
    for _ in range(200):
        for wait in simulation.impatient():
            simulation.lose_patience(wait)
        pending = [w for w in simulation.pending() if w not in simulation.run.replicas[1].holders.values()]
        if pending:
            simulation.work(pending[0])
    left = 40 - sum(replica.step for replica in simulation.run.replicas.values())
    assert left == 1 + 4, "its current step and two rounds"
    assert finished(simulation)


def test_others_use_the_samples_of_a_disbanded_replica() -> None:
    simulation = simulate(3, "noloco", steps=4, replace=False, spares=0)
    work_until(simulation, lambda run: all(r.step for r in run.replicas.values()))
    simulation.lose(simulation.run.holders[2])
    assert finished(simulation)
    assert sum(replica.step for replica in simulation.run.replicas.values()) == 12


def test_a_replica_is_founded_again_once_workers_are_available() -> None:
    simulation = simulate(2, "noloco", steps=12, spares=2)
    work_until(simulation, lambda run: run.replicas[1].attempts == 0 and run.replicas[1].step > 0)
    while not facts(simulation, d.ReplicaRestarted):
        work_until(simulation, lambda run: run.replicas[1].phase == "run", without=[0])
        relink(simulation, 1)
    work_until(simulation, lambda run: run.replicas[1].phase == "run")
    assert {member.source.origin for member in facts(simulation, d.Form)[-1].members} == {"rebuild"}
    assert finished(simulation)


def settle_without(simulation: SimulatedReplicas, byzantine_member: int) -> None:
    """Run the first round, in which one replica's updates are invalid."""
    for _ in range(1000):
        if simulation.mail:
            simulation.deliver(0, "wrong" if simulation.mail[0][1] == byzantine_member else "arrives")
        elif facts(simulation, d.Settle):
            return
        else:
            simulation.work(simulation.pending()[0])
    raise AssertionError("never")


@pytest.mark.parametrize("kind", ["noloco", "diloco"])
@pytest.mark.parametrize("byzantine_member", [0, 1])
def test_a_replica_with_an_invalid_update_is_excluded_without_waiting(kind: str, byzantine_member: int) -> None:
    simulation = simulate(2, kind=kind)
    settle_without(simulation, byzantine_member)
    simulation.behave()
    first = [settle for settle in facts(simulation, d.Settle) if settle.round == 0]
    honest = 1 - byzantine_member
    if kind == "noloco":
        assert [settle.members for settle in first] == [[honest], [byzantine_member]]
    else:
        assert [settle.members for settle in first] == [[honest]]
        assert [adopt.replica for adopt in facts(simulation, d.Adopt)] == [byzantine_member], (
            "a synchronized replica adopts the result"
        )
    assert not facts(simulation, e.RoundWaitExpired)
    assert any(len(settle.members) == 2 for settle in facts(simulation, d.Settle)), "the next round is normal"


@pytest.mark.parametrize("kind", ["diloco", "monna"])
def test_a_replica_that_rejects_all_updates_is_excluded(kind: str) -> None:
    """Otherwise each honest replica would be left alone."""
    simulation = simulate(4, kind=kind, steps=4)
    for _ in range(3000):
        if simulation.mail:
            _, _, worker = simulation.mail[0]
            simulation.deliver(0, "wrong" if worker in simulation.run.replicas[1].holders.values() else "arrives")
        elif facts(simulation, d.Settle):
            break
        else:
            simulation.work(simulation.pending()[0])
    assert facts(simulation, d.Settle)[0].members == [0, 2, 3]
    assert simulation.run.suspicion.strikes(0, simulation.run.exchange) == 0 and finished(simulation)


def test_two_of_three_settle_without_an_invalid_update() -> None:
    simulation = simulate(3, kind="diloco")
    settle_without(simulation, 0)
    simulation.behave()
    assert next(settle.members for settle in facts(simulation, d.Settle)) == [1, 2]
    assert [adopt.replica for adopt in facts(simulation, d.Adopt)] == [0]


def test_a_rejected_member_settles_alone_as_soon_as_the_others_have_settled() -> None:
    """The others rejected its update; no other event concerns it."""
    simulation = simulate(3, "pair_mean", exchange={"options": {"every": 2, "group": 3}}, steps=6)
    work_until(simulation, lambda run: all(r.open_round for r in run.replicas.values()) and len(simulation.mail) == 12)
    refusing = next(n for n, (_, source, _) in enumerate(simulation.mail) if source == 2)
    simulation.deliver(refusing, "wrong")
    work_until(simulation, lambda run: bool(facts(simulation, d.Settle)))
    assert [settle.members for settle in facts(simulation, d.Settle)] == [[0, 1], [2]]
    assert finished(simulation)


def test_a_replica_without_samples_is_not_waited_for_in_the_next_round() -> None:
    """Others took the last blocks while it waited for updates."""
    simulation = simulate(4, "pair_mean", steps=6)
    work_until(simulation, lambda run: all(r.open_round and r.phase == "idle" for r in run.replicas.values()))
    settling, others = simulation.run.groups[0]
    work_until(simulation, lambda run: all((n, 1, False) in simulation.impatient() for n in others), without=settling)
    last = simulation.run.allocation.total - 1
    none_left = replace(simulation.run.allocation, used=BlockSet(last), in_progress=MappingProxyType({others[1]: last}))
    run = mark_decided(replace(simulation.run, allocation=none_left))
    decision = decide_checked(with_replica(run, run.replicas[others[1]]))
    assert isinstance(decision, d.Settle) and decision.members == [others[0]]


def test_a_waiting_replica_is_introduced_again_after_its_edges_are_replaced() -> None:
    """It waits for a replica that is not ready to meet."""
    simulation = simulate(2, exchange={"options": {"every": 2, "prefetch": True}}, steps=6)
    work_until(simulation, lambda run: run.replicas[1].step == 1)
    work_until(simulation, lambda run: bool(simulation.impatient()), without=[1])
    relink(simulation, 0)
    work_until(simulation, lambda run: bool(simulation.impatient()), without=[1])
    now = [replica.generation for replica in simulation.run.replicas.values()]
    assert facts(simulation, d.OpenPrefetchLinks)[-1].generations == now
    assert finished(simulation)


def test_a_round_is_settled_without_a_member_that_leaves_it_during_its_commit() -> None:
    """Its edge has broken; it is formed again only after the commit, which the others need not wait for."""
    simulation = simulate(3, exchange=STREAMING, steps=6)
    work_until(simulation, lambda run: all(r.open_round for r in run.replicas.values()))
    work_until(
        simulation,
        lambda run: all((n, 0, True) in simulation.impatient() for n in (0, 1)) and updates_received(run),
        without=[2],
    )
    work_until(simulation, lambda run: run.replicas[2].phase == "commit")
    assert not facts(simulation, d.Settle)
    relink(simulation, 2)
    assert simulation.run.replicas[2].phase == "commit"
    assert [settle.members for settle in facts(simulation, d.Settle)] == [[0, 1]]
    assert finished(simulation)


def updates_received(run: RunState) -> bool:
    """Return whether the first two replicas have received each other's updates."""
    return run.replicas[0].has_received(1) and run.replicas[1].has_received(0)
