"""A Byzantine node: start and end of attacks, its knowledge, and its random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Update
from planaria.exchange.compress.dense import UNCOMPRESSED
from planaria.exchange.update_publisher import UpdatePublisher
from planaria.faults.byzantine import Byzantine, make_misbehaviour

CONFIG = ExchangeConfig(replicas=5, robust="multikrum")
HONEST = Update(torch.tensor([1.0, -2.0, 0.5]))
OTHERS = (0, 2, 3, 4)
ME = 1


def byzantine(attack: str, until: int | None = None, strength: float | None = None, number: int = 0) -> Byzantine:
    return Byzantine(CONFIG, make_misbehaviour(attack, strength, until, seed=7, number=number))


def sent(by: UpdatePublisher, step: int, honest: Update = HONEST, **known: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the update to each peer, in the round of the step's number."""
    updates = by.updates(honest, UNCOMPRESSED, (step, step), ME, OTHERS, **known)
    return {peer: update.blocking for peer, update in updates.items() if update.blocking is not None}


def attacks(by: UpdatePublisher, step: int) -> bool:
    updates = sent(by, step)
    assert updates.keys() == {*OTHERS, ME}
    return any(message is not HONEST.blocking for message in updates.values())


def test_an_attack_ends_at_its_step_or_after_one_sent_update() -> None:
    lasting = byzantine("zero", until=5)
    for step in (3, 3, 4):
        assert attacks(lasting, step)
        lasting.sent()
    assert not attacks(lasting, 5) and not lasting.is_byzantine(4), "it has ended"
    once = byzantine("zero")
    once.sent()
    assert attacks(once, 3), "a commit before the first update does not end it"
    assert attacks(once, 3), "a dropped step is repeated"
    once.sent()
    assert not attacks(once, 4)


def test_an_attack_uses_its_own_update_and_those_of_the_last_round() -> None:
    alone = byzantine("sign_flip", until=9, strength=1.0)
    assert torch.equal(sent(alone, 3)[0], torch.tensor([-1.0, 2.0, -0.5]))
    alone.received(
        {0: Update(torch.tensor([3.0, 0.0, 0.5])), 2: Update(torch.tensor([2.0, 2.0, 2.0]))}, UNCOMPRESSED, 3
    )
    assert torch.equal(sent(alone, 4)[0], torch.tensor([-2.0, 0.0, -1.0])), "the mean of three"
    known = {0: torch.tensor([1.0, 1.0, 1.0]), 4: torch.tensor([3.0, 3.0, 3.0])}
    assert torch.equal(sent(alone, 4, known=known)[0], torch.full((3,), -2.0)), (
        "in one process, the honest updates are known"
    )


def test_updates_of_others_are_kept_only_if_needed() -> None:
    unaware = byzantine("own_flip", until=9)
    unaware.received({0: Update(torch.ones(3))}, UNCOMPRESSED, 3)
    assert not unaware._received
    honest = UpdatePublisher()
    honest.received({0: Update(torch.ones(3))}, UNCOMPRESSED, 3)
    assert not attacks(honest, 3) and not vars(honest)


def test_staleness_counts_rounds_not_attempts() -> None:
    stale = byzantine("stale", until=99, strength=2)
    values = []
    for round in (3, 4, 4, 5, 6, 6, 7):
        values.append(float(sent(stale, round, Update(torch.full((3,), float(round))))[0][0]))
    assert values == [3, 3, 3, 3, 4, 4, 5]
    assert len(stale._past) == 3


@pytest.mark.parametrize("attack", ["random", "equivocate"])
def test_random_numbers_depend_on_node_round_and_fault_only(attack: str) -> None:
    drawn = sent(byzantine(attack, until=9), 3)
    again = sent(byzantine(attack, until=99), 3)
    assert all(torch.equal(drawn[peer], again[peer]) for peer in drawn)
    different = {tuple(drawn[peer].tolist()) for peer in drawn}
    assert len(different) == (5 if attack == "equivocate" else 1)
    for other in (sent(byzantine(attack, until=9), 4), sent(byzantine(attack, until=9, number=1), 3)):
        assert not torch.equal(other[0], drawn[0])


def test_only_the_sent_update_is_corrupted() -> None:
    kept = {"residual": {"w": torch.ones(3)}}
    honest = Update(HONEST.blocking, torch.ones(2), kept)
    update = byzantine("nan").updates(honest, UNCOMPRESSED, (3, 3), ME, OTHERS)[0]
    assert update.prefetched is honest.prefetched and update.kept is kept
    assert update.blocking is not None and not torch.isfinite(update.blocking).any()
    nothing = Update()
    assert byzantine("nan").updates(nothing, UNCOMPRESSED, (3, 3), ME, OTHERS)[0] is nothing
