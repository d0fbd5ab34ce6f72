"""Who is sent away because its offers are of no use, in rounds of pairs and of all; and when nobody is."""

from __future__ import annotations

from typing import Any

import pytest
from herd_steps import finished, herd, said
from pretend_herd import PretendHerd
from pydantic import ValidationError

from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control import decisions as d
from planaria.control.apply import apply
from planaria.control.apply_base import decided
from planaria.control.decide import decide
from planaria.runtime.engine.unused import unused


def misled(liar: int, accuser: int | None = None, **changed: Any) -> PretendHerd:
    """A run to its end in which all that hear ``liar`` refuse that: all, or one ``accuser``."""
    made = herd(changed.pop("replicas", 4), **changed)
    for turn in range(3000):
        if made.run.over:
            return made
        if pending := made.pending():
            made.work(pending[turn % len(pending)])
        elif made.mail:
            _, source, worker = made.mail[0]
            wrong = source == liar and accuser in (None, made.alive[worker].replica) if worker in made.alive else False
            made.deliver(0, "wrong" if wrong and not said(made, d.SendAway) else "arrives")
        elif impatient := made.impatient():
            made.lose_patience(impatient[0])
        else:
            break
    raise AssertionError(f"stands still: {made.run}")


def test_one_mistake_is_no_setting_and_nobody_counts_where_none_refuses() -> None:
    with pytest.raises(ValidationError, match="0 or at least 2: nobody is sent away for one mistake"):
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
def test_rounds_of_all_kinds_remember_whose_offers_are_of_no_use(kind: str) -> None:
    options = {"every": 1, "fragments": 1} if kind == "streaming_diloco" else {"every": 1}
    made = misled(1, kind=kind, exchange={"options": options, "strikes": 2}, steps=40, spares=2)
    (away,) = said(made, d.SendAway)
    assert (away.member, away.strikes) == (1, 2) and len(away.workers) == 2
    assert made.truth.ending == d.Finish(outcome="finished")
    assert made.run.live.keys() == {0, 1, 2, 3}, "others stand there"
    assert not {*away.workers} & {*made.run.holders.values()} or any(
        made.run.workers[worker].incarnation > 1 for worker in away.workers
    )


def test_one_who_accuses_has_nobody_sent_away() -> None:
    made = misled(1, accuser=2, kind="diloco", exchange={"options": {"every": 1}, "strikes": 2}, steps=20)
    assert not said(made, d.SendAway)


@pytest.mark.parametrize(("strikes", "replicas"), [(0, 4), (2, 2)])
def test_nobody_is_where_that_is_not_asked_for_or_one_word_stands_against_another(strikes: int, replicas: int) -> None:
    exchange = {"options": {"every": 1}, "strikes": strikes}
    made = misled(1, kind="diloco", replicas=replicas, exchange=exchange, steps=12)
    assert not said(made, d.SendAway)


@pytest.mark.slow
def test_without_others_the_replica_disbands_and_its_samples_are_used() -> None:
    exchange = {"options": {"every": 1}, "strikes": 2}
    made = misled(1, kind="diloco", exchange=exchange, steps=20, spares=0, replace=False)
    assert [fact.member for fact in said(made, d.SendAway)] == [1]
    assert [fact.replica for fact in said(made, d.Disband)] == [1] and made.run.allotment.done


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("replicas", "gone"), [(5, []), (6, [1])])
def test_whom_the_rule_needs_stays_unless_there_are_others(replicas: int, gone: list[int]) -> None:
    robust = {"rule": "median", "liars": 2}
    exchange = {"options": {"every": 1}, "strikes": 2, "robust": robust}
    made = misled(1, kind="diloco", replicas=replicas, exchange=exchange, steps=20, spares=0, replace=False)
    assert [fact.member for fact in said(made, d.SendAway)] == gone


@pytest.mark.slow
def test_nothing_is_begun_with_those_who_are_on_their_way_out() -> None:
    made = herd(4, "diloco", exchange={"options": {"every": 1}, "strikes": 2}, steps=20, spares=2)
    made.run = decided(made.run)
    workers = sorted(made.run.replicas[1].holders.values())
    run = apply(d.SendAway(member=1, workers=workers, strikes=2, reason="told"), made.run)
    while (decision := decide(run)) is not None:
        assert getattr(decision, "replica", None) != 1, decision
        run = apply(decision, run)
    assert finished(made)
