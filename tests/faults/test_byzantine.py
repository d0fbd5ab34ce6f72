"""A node that lies: when it begins and ends, what it knows, and that nothing is kept of an honest one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Offer
from planaria.exchange.compress.dense import PLAIN
from planaria.exchange.publisher import Publisher
from planaria.faults.byzantine import Byzantine, lie_of

CONFIG = ExchangeConfig(replicas=5, robust="multikrum")
HONEST = Offer(torch.tensor([1.0, -2.0, 0.5]))
OTHERS = (0, 2, 3, 4)
ME = 1


def liar(attack: str, until: int | None = None, strength: float | None = None, number: int = 0) -> Byzantine:
    return Byzantine(CONFIG, lie_of(attack, strength, until, seed=7, number=number))


def said(by: Publisher, step: int, honest: Offer = HONEST, **known: dict[int, Tensor]) -> dict[int, Tensor]:
    """To each, in a round of the step's number."""
    told = by.updates(honest, PLAIN, (step, step), ME, OTHERS, **known)
    return {peer: offer.blocking for peer, offer in told.items() if offer.blocking is not None}


def lied(by: Publisher, step: int) -> bool:
    told = said(by, step)
    assert told.keys() == {*OTHERS, ME}
    return any(message is not HONEST.blocking for message in told.values())


def test_who_is_honest_says_one_thing_to_all() -> None:
    assert not lied(Publisher(), 3)


def test_a_lie_lasts_until_its_step_and_one_that_is_for_one_offer_until_that_is_told() -> None:
    lasting = liar("zero", until=5)
    for step in (3, 3, 4):
        assert lied(lasting, step)
        lasting.sent()
    assert not lied(lasting, 5) and not lasting.lies(4), "it is over"
    once = liar("zero")
    once.sent()
    assert lied(once, 3), "what was committed before it said anything was no lie"
    assert lied(once, 3), "the step was dropped: it says the same again"
    once.sent()
    assert not lied(once, 4)


def test_without_others_a_liar_goes_by_its_own_and_by_what_it_heard_in_the_round_before() -> None:
    alone = liar("sign_flip", until=9, strength=1.0)
    assert torch.equal(said(alone, 3)[0], torch.tensor([-1.0, 2.0, -0.5]))
    alone.received({0: Offer(torch.tensor([3.0, 0.0, 0.5])), 2: Offer(torch.tensor([2.0, 2.0, 2.0]))}, PLAIN, 3)
    assert torch.equal(said(alone, 4)[0], torch.tensor([-2.0, 0.0, -1.0])), "the mean of three"
    known = {0: torch.tensor([1.0, 1.0, 1.0]), 4: torch.tensor([3.0, 3.0, 3.0])}
    assert torch.equal(said(alone, 4, known=known)[0], torch.full((3,), -2.0)), (
        "in one process, of those who are honest"
    )


def test_who_needs_nothing_of_others_keeps_nothing_of_them() -> None:
    deaf = liar("own_flip", until=9)
    deaf.received({0: Offer(torch.ones(3))}, PLAIN, 3)
    assert not deaf._received
    honest = Publisher()
    honest.received({0: Offer(torch.ones(3))}, PLAIN, 3)
    assert not lied(honest, 3) and not vars(honest)


def test_stale_counts_rounds_and_not_how_often_they_are_begun() -> None:
    stale = liar("stale", until=99, strength=2)
    heard = []
    for round in (3, 4, 4, 5, 6, 6, 7):
        heard.append(float(said(stale, round, Offer(torch.full((3,), float(round))))[0][0]))
    assert heard == [3, 3, 3, 3, 4, 4, 5]
    assert len(stale._past) == 3


@pytest.mark.parametrize("attack", ["random", "equivocate"])
def test_what_is_drawn_depends_on_who_lies_when_and_by_which_fault_and_on_nothing_else(attack: str) -> None:
    told = said(liar(attack, until=9), 3)
    again = said(liar(attack, until=99), 3)
    assert all(torch.equal(told[peer], again[peer]) for peer in told)
    different = {tuple(told[peer].tolist()) for peer in told}
    assert len(different) == (5 if attack == "equivocate" else 1)
    for other in (said(liar(attack, until=9), 4), said(liar(attack, until=9, number=1), 3)):
        assert not torch.equal(other[0], told[0])


def test_a_liar_lies_about_what_it_says_and_keeps_what_is_its_own() -> None:
    kept = {"residual": {"w": torch.ones(3)}}
    honest = Offer(HONEST.blocking, torch.ones(2), kept)
    told = liar("nan").updates(honest, PLAIN, (3, 3), ME, OTHERS)[0]
    assert told.prefetched is honest.prefetched and told.kept is kept
    assert told.blocking is not None and not torch.isfinite(told.blocking).any()
    nothing = Offer()
    assert liar("nan").updates(nothing, PLAIN, (3, 3), ME, OTHERS)[0] is nothing
