"""Dismissal of replicas with invalid updates, in rounds of pairs and of all."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.apply import apply
from planaria.control.apply_base import mark_decided
from planaria.control.decide import decide
from planaria.control.facts import decisions as d
from planaria.runtime.preparation.unused_settings import unused
from support.control.open_replicas import OpenReplicas
from support.control.replica_steps import facts, finished, simulate, started
from support.control.simulated_replicas import SimulatedReplicas


def misled(byzantine_member: int, accuser: int | None = None, **changed: Any) -> SimulatedReplicas:
    """Run to the end; all receivers, or only ``accuser``, reject the updates of ``byzantine_member``."""
    return mislead(simulate(changed.pop("replicas", 4), **changed), byzantine_member, accuser)


def mislead(simulation: SimulatedReplicas, byzantine_member: int, accuser: int | None = None) -> SimulatedReplicas:
    for turn in range(3000):
        if simulation.run.over:
            return simulation
        if pending := simulation.pending():
            simulation.work(pending[turn % len(pending)])
        elif simulation.mail:
            _, source, worker = simulation.mail[0]
            wrong = (
                source == byzantine_member and accuser in (None, simulation.alive[worker].replica)
                if worker in simulation.alive
                else False
            )
            simulation.deliver(0, "wrong" if wrong and not facts(simulation, d.ExcludeMember) else "arrives")
        elif impatient := simulation.impatient():
            simulation.lose_patience(impatient[0])
        else:
            break
    raise AssertionError(f"no progress: {simulation.run}")


def test_strikes_must_exceed_one_and_need_an_exchange_that_rejects() -> None:
    with pytest.raises(ValidationError, match="0 or at least 2: one rejection excludes no replica"):
        ExchangeConfig(strikes=1)
    for exchange, used in (
        ({}, False),
        ({"robust": "median"}, True),
        ({"kind": "diloco"}, True),
        ({"kind": "local"}, False),
    ):
        config = RunConfig.model_validate({"exchange": {"replicas": 3, "strikes": 5, **exchange}})
        assert ("exchange.strikes" in dict(unused(config))) is not used


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["noloco", "diloco", "monna", "streaming_diloco"])
def test_a_replica_with_repeated_invalid_updates_is_excluded(kind: str) -> None:
    options = {"every": 1, "fragments": 1} if kind == "streaming_diloco" else {"every": 1}
    simulation = misled(1, kind=kind, exchange={"options": options, "strikes": 2}, steps=40, spares=2)
    (away,) = facts(simulation, d.ExcludeMember)
    assert (away.member, away.strikes) == (1, 2) and len(away.workers) == 2
    assert simulation.ending == d.Finish(outcome="finished")
    assert simulation.run.live.keys() == {0, 1, 2, 3}, "other workers replace them"
    assert not {*away.workers} & {*simulation.run.holders.values()} or any(
        simulation.run.workers[worker].incarnation > 1 for worker in away.workers
    )


def test_a_single_accuser_excludes_no_replica() -> None:
    simulation = misled(1, accuser=2, kind="diloco", exchange={"options": {"every": 1}, "strikes": 2}, steps=20)
    assert not facts(simulation, d.ExcludeMember)


@pytest.mark.parametrize(("strikes", "replicas"), [(0, 4), (2, 2)])
def test_no_replica_is_excluded_without_strikes_or_a_majority(strikes: int, replicas: int) -> None:
    exchange = {"options": {"every": 1}, "strikes": strikes}
    simulation = misled(1, kind="diloco", replicas=replicas, exchange=exchange, steps=12)
    assert not facts(simulation, d.ExcludeMember)


@pytest.mark.slow
def test_without_spares_the_replica_disbands_and_its_samples_are_used() -> None:
    exchange = {"options": {"every": 1}, "strikes": 2}
    simulation = misled(1, kind="diloco", exchange=exchange, steps=20, spares=0, replace=False)
    assert [fact.member for fact in facts(simulation, d.ExcludeMember)] == [1]
    assert [fact.replica for fact in facts(simulation, d.Disband)] == [1] and simulation.run.allocation.done


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("replicas", "gone"), [(5, []), (6, [1])])
def test_a_replica_that_the_robust_rule_needs_stays(replicas: int, gone: list[int]) -> None:
    robust = {"rule": "median", "byzantine": 2}
    exchange = {"options": {"every": 1}, "strikes": 2, "robust": robust}
    simulation = misled(1, kind="diloco", replicas=replicas, exchange=exchange, steps=20, spares=0, replace=False)
    assert [fact.member for fact in facts(simulation, d.ExcludeMember)] == gone


@pytest.mark.parametrize(("rooms", "gone"), [([4], []), ([2, 2], [4])])
def test_spares_on_the_machine_of_a_replica_do_not_replace_it(rooms: list[int], gone: list[int]) -> None:
    """The machine leaves with its spares, and the robust rule needs every replica."""
    exchange = {
        "kind": "diloco",
        "options": {"every": 1},
        "strikes": 2,
        "robust": {"rule": "median", "byzantine": 2},
    }
    simulation = OpenReplicas(started(5, 1, exchange, local_workers=8, spares=0, replace=False, steps=20))
    for room in [0, *rooms]:  # the other four replicas are on the run's own machine
        if room:
            simulation.join(room)
        for worker in simulation.pending():
            simulation.work(worker)
    mislead(simulation, 4)
    assert simulation.ending == d.Finish(outcome="finished")
    assert [fact.member for fact in facts(simulation, d.ExcludeMember)] == gone


@pytest.mark.slow
def test_excluded_workers_get_no_orders() -> None:
    simulation = simulate(4, "diloco", exchange={"options": {"every": 1}, "strikes": 2}, steps=20, spares=2)
    simulation.run = mark_decided(simulation.run)
    workers = sorted(simulation.run.replicas[1].holders.values())
    run = apply(d.ExcludeMember(member=1, workers=workers, strikes=2, reason="ordered"), simulation.run)
    while (decision := decide(run)) is not None:
        assert getattr(decision, "replica", None) != 1, decision
        run = apply(decision, run)
    assert finished(simulation)
