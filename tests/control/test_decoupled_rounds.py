"""Rounds of a decoupled exchange: who begins them, who takes part, and who catches up."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.run import RunState
from support.control.replica_steps import facts, simulate
from support.control.simulated_replicas import SimulatedReplicas


def decoupled(replicas: int, steps: int = 40, **options: int) -> SimulatedReplicas:
    exchange = {"options": {"every": 4, "fragments": 1, "delay": 1, **options}}
    return simulate(replicas, "decoupled", steps=steps, exchange=exchange)


def run_until(
    simulation: SimulatedReplicas, done: Callable[[RunState], bool], without: Collection[int] = (), deaf: bool = False
) -> None:
    """Run all replicas but ``without`` at one speed until ``done``; updates arrive at once, or never if ``deaf``."""
    for _ in range(3000):
        stopped = {worker for n in without for worker in simulation.run.replicas[n].holders.values()}
        for worker in simulation.pending():
            if done(simulation.run):
                return
            if worker not in stopped and worker in simulation.pending():
                simulation.work(worker)
            if deaf:
                simulation.mail.clear()
            for place in reversed(range(len(simulation.mail))):
                if simulation.mail[place][2] not in stopped:
                    simulation.deliver(place)
        if done(simulation.run):
            return
        lasting = [wait for wait in simulation.impatient() if wait[0] not in without]
        if lasting and not any(worker not in stopped for worker in simulation.pending()):
            simulation.lose_patience(lasting[0])
    raise AssertionError("never")


def finished(simulation: SimulatedReplicas) -> bool:
    """Run to the end at one speed; return whether the run finished."""
    run_until(simulation, lambda run: run.over)
    return simulation.ending == d.Finish(outcome="finished")


def have_settled(run: RunState, rounds: int, replicas: Collection[int]) -> bool:
    return all(run.replicas[n].rounds >= rounds and not run.replicas[n].open_round for n in replicas)


def test_the_first_replica_that_is_due_begins_a_round_with_all_others() -> None:
    simulation = decoupled(3)
    run_until(simulation, lambda run: bool(facts(simulation, d.BeginRound)))
    (begun,) = facts(simulation, d.BeginRound)
    assert begun.members == [0, 1, 2]
    assert {simulation.run.replicas[n].phase for n in (1, 2)} != {"idle"}, "the others take part within their steps"
    assert finished(simulation)
    assert not facts(simulation, d.Adopt)
    assert {tuple(settle.contributors) for settle in facts(simulation, d.Settle)} == {(0, 1, 2)}


@pytest.mark.parametrize("min_due", [2, 3])
def test_a_round_waits_until_enough_replicas_are_due(min_due: int) -> None:
    simulation = decoupled(3, min_due=min_due)
    run_until(simulation, lambda run: run.replicas[0].steps_since_round == 4, without=[1, 2])
    assert not facts(simulation, d.BeginRound)
    run_until(simulation, lambda run: bool(facts(simulation, d.BeginRound)), without=[2] if min_due == 2 else [])
    assert finished(simulation)


def test_a_stopped_replica_is_not_waited_for_and_catches_up() -> None:
    simulation = decoupled(3, steps=60)
    run_until(simulation, lambda run: all(run.replicas[n].step for n in range(3)))
    run_until(simulation, lambda run: have_settled(run, 3, (0, 1)), without=[2])
    assert {tuple(settle.contributors) for settle in facts(simulation, d.Settle)} == {(0, 1)}
    step, own = simulation.run.replicas[2].step, simulation.alive[simulation.run.replicas[2].holders[2]].content
    assert finished(simulation)
    assert [adopt.replica for adopt in facts(simulation, d.Adopt)] == [2]
    form = next(form for form in facts(simulation, d.Form) if form.replica == 2 and form.rounds)
    assert all(isinstance(member.source, d.CatchUp) for member in form.members)
    assert form.step - step <= 1 and own is not None


def test_a_late_member_settles_with_the_updates_that_counted() -> None:
    simulation = decoupled(3)
    run_until(simulation, lambda run: {me.round for me in simulation.alive.values() if me.replica == 2} == {0})
    run_until(simulation, lambda run: have_settled(run, 1, (0, 1)), without=[2])
    assert simulation.run.replicas[2].open_round is not None
    assert finished(simulation)
    first = [settle for settle in facts(simulation, d.Settle) if settle.round == 0]
    assert len({tuple(settle.contributors) for settle in first}) == 1 and 2 in first[-1].members
    assert not facts(simulation, d.Adopt)


@pytest.mark.parametrize("fragments", [1, 3])
def test_weights_are_the_steps_since_the_fragment_was_received(fragments: int) -> None:
    simulation = decoupled(3, steps=60, every=4 * fragments, fragments=fragments)
    run_until(simulation, lambda run: have_settled(run, 2, (0, 1)), without=[2])
    assert finished(simulation)
    step = dict.fromkeys(range(3), 0)
    began: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}
    checked = 0
    for fact in simulation.history:
        if isinstance(fact, d.Commit):
            step[fact.replica] = fact.step + 1
        elif isinstance(fact, d.BeginRound):
            began |= {(fact.round, n): step[n] for n in fact.members}
        elif isinstance(fact, d.Settle):
            for member, weight in fact.counted[fact.members[0]].items():
                last = received.get((fact.round - fragments, member), 0 if fact.round < fragments else None)
                if last is not None:
                    assert weight == began[fact.round, member] - last
                    checked += 1
            received |= {(fact.round, n): step[n] for n in fact.members}
    assert checked > 10


def test_a_resumed_replica_knows_when_it_received_each_fragment() -> None:
    simulation = decoupled(3, steps=60, every=12, fragments=3)
    run_until(simulation, lambda run: have_settled(run, 5, (0, 1, 2)))
    run = simulation.run
    positions = {n: replica.position for n, replica in run.replicas.items()}
    resumed = RunState.start(run.started.model_copy(update={"positions": positions}))
    for number, replica in run.replicas.items():
        rounds = range(replica.rounds - 3, replica.rounds)
        received = [replica.received_at(round) for round in rounds]
        assert received == [resumed.replicas[number].received_at(round) for round in rounds]
        assert len(set(received)) == 3 and received[0] > 0


def test_a_member_lost_in_the_round_does_not_hold_up_the_others() -> None:
    simulation = decoupled(3, steps=60)
    run_until(simulation, lambda run: all(r.open_round for r in run.replicas.values()))
    simulation.lose(simulation.run.replicas[2].holders[2])
    assert finished(simulation)
    assert facts(simulation, d.Settle)[0].contributors == [0, 1]
    assert len([fact for fact in simulation.history if isinstance(fact, e.WorkerLost)]) == 1


@pytest.mark.parametrize("stopped", [0, 1])
def test_one_of_two_replicas_does_not_wait_for_the_other(stopped: int) -> None:
    simulation = decoupled(2)
    run_until(simulation, lambda run: all(run.replicas[n].step for n in range(2)))
    run_until(simulation, lambda run: have_settled(run, 3, [1 - stopped]), without=[stopped])
    assert not facts(simulation, e.RoundWaitExpired)
    assert finished(simulation)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_round_whose_first_settler_is_lost_is_settled_by_the_rest(replicas: int) -> None:
    simulation = decoupled(replicas, steps=60)
    others = range(1, replicas)
    run_until(simulation, lambda run: all(r.open_round for r in run.replicas.values()))
    run_until(simulation, lambda run: have_settled(run, 1, [0]), without=others, deaf=True)
    assert facts(simulation, d.Settle)[0].contributors == [0]
    simulation.lose(*simulation.run.replicas[0].holders.values())
    assert finished(simulation)
    assert len({tuple(settle.contributors) for settle in facts(simulation, d.Settle) if settle.round == 0}) == 2


@pytest.mark.parametrize("linked", [0, 1])
def test_a_replica_keeps_its_weights_if_those_ahead_die_before_it_catches_up(linked: int) -> None:
    """One of its workers may have caught up by then."""
    simulation = decoupled(2, steps=60)
    run_until(simulation, lambda run: all(run.replicas[n].step for n in range(2)))
    run_until(simulation, lambda run: have_settled(run, 3, [0]), without=[1])
    run_until(
        simulation,
        lambda run: run.replicas[1].phase == "link" and len(run.replicas[1].lost) == 2 - linked,
        without=[] if linked else [0],
    )
    step = simulation.run.replicas[1].step
    simulation.lose(*simulation.run.replicas[0].holders.values())
    assert finished(simulation)
    forms = [form for form in facts(simulation, d.Form) if form.replica == 1]
    assert forms[-1].step >= step and not any(form.is_rollback for form in facts(simulation, d.Form))
