"""A worker's part in a round: its update, sent ahead and in the end, and what it makes of the updates it receives."""

from __future__ import annotations

import pytest
import torch

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, ModelConfig, RunConfig
from planaria.exchange.base import Update
from planaria.runtime.transport.wire import FrameContent
from planaria.runtime.worker.exchange_round import RoundMember
from planaria.runtime.worker.runner import StageRunner

RECIPE = RunConfig(model=ModelConfig(vocab=64, dim=16, layers=4, heads=2, hidden=32, context=8))
PAIRS = ExchangeConfig(replicas=2, kind="noloco", options=Options({"every": 2}))
CODED = ExchangeConfig(replicas=2, kind="noloco", options=Options({"every": 2, "bits": 8}))


def worker(config: ExchangeConfig, shift: float = 0.0) -> tuple[RoundMember, StageRunner]:
    """A block stage that has trained: its weights have moved by ``shift`` since the last round."""
    runner, circle = StageRunner(RECIPE, 1), RoundMember(config)
    circle.begin({}, runner, rounds=3)
    runner.set_weights({name: weight + shift for name, weight in runner.state().weights.items()})
    return circle, runner


def pass_on(update: Update, circle: RoundMember, node: int) -> None:
    for content, part in ((FrameContent.PREFETCHED, update.prefetched), (FrameContent.BLOCKING, update.blocking)):
        if part is not None:
            circle.receive(node, content, part)


def held(circle: RoundMember) -> dict[str, torch.Tensor]:
    """The outer state."""
    return circle.outer.settled.state()


def some_weight(runner: StageRunner) -> torch.Tensor:
    return next(iter(runner.state().weights.values())).clone()


@pytest.mark.parametrize("config", [PAIRS, CODED], ids=["one part", "two parts"])
def test_two_replicas_that_meet_move_towards_each_other(config: ExchangeConfig) -> None:
    (one, low), (other, high) = worker(config, 0.0), worker(config, 0.1)
    before = some_weight(low)
    first, second = one.update(3, low), other.update(3, high)
    one.updates_for(0, 0, [1])
    pass_on(second, one, node=7)
    pass_on(first, other, node=5)
    assert (one.newly_complete_peers(), other.newly_complete_peers()) == ([7], [5])
    assert one.newly_complete_peers() == [], "reported once"
    made = one.settle(3, 0, {1: 7}, low)
    other.settle(3, 1, {0: 5}, high)
    assert torch.allclose(some_weight(low), some_weight(high), atol=1e-3)
    assert torch.allclose(some_weight(low), before + 0.7 * 0.05, atol=1e-3), "β times the mean drift"
    assert made.spread == pytest.approx(0.1 / 2**0.5, rel=0.05)
    assert made.blocking_bytes == (first.blocking.nbytes if first.blocking is not None else 0)
    assert one.rounds == 4


def test_a_prefetched_part_is_sent_once_and_kept() -> None:
    circle, runner = worker(CODED, 0.1)
    early = circle.prefetch(3)
    assert early is not None
    circle.receive(7, FrameContent.PREFETCHED, early)
    circle.receive(7, FrameContent.BLOCKING, torch.zeros(3, dtype=torch.uint8))  # the peer is ahead
    assert circle.newly_complete_peers() == [], "it has not made its own offer yet"
    update = circle.update(3, runner)
    assert update.prefetched is early
    assert circle.newly_complete_peers() == [], "of another version of the program, perhaps"
    assert "its blocking part: torch.uint8 [3], not torch.uint8 [" in circle.newly_rejected_peers()[7]


def spoiled(kind: str, update: Update) -> list[tuple[FrameContent, torch.Tensor]]:
    """Return the parts of an update, one of which is invalid, in the order in which they arrive."""
    late = update.blocking.clone()
    match kind:
        case "short":
            late = late[:-1]
        case "of another type":
            late = late.to(torch.float16)
        case "not finite":  # a number, or the scale of a group of coded ones
            late[:2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8) if late.dtype == torch.uint8 else torch.nan
    early = [] if update.prefetched is None else [(FrameContent.PREFETCHED, update.prefetched)]
    if kind == "too much":
        early = [(FrameContent.PREFETCHED, torch.full((5,), 1.0))]
    return [*early, (FrameContent.BLOCKING, late)]


@pytest.mark.parametrize("config", [PAIRS, CODED], ids=["one part", "two parts"])
@pytest.mark.parametrize("kind", ["short", "of another type", "not finite", "too much"])
def test_an_invalid_update_is_refused_once_and_left_out(config: ExchangeConfig, kind: str) -> None:
    (one, low), (other, high), (third, mid) = worker(config, 0.0), worker(config, 0.1), worker(config, 0.2)
    one.update(3, low)
    for content, part in spoiled(kind, other.update(3, high)):
        one.receive(7, content, part)
    pass_on(third.update(3, mid), one, node=9)
    assert one.newly_rejected_peers().keys() == {7} and one.newly_rejected_peers() == {}, "reported once"
    assert one.newly_complete_peers() == [9]
    pass_on(other.update(3, high), one, node=7)
    assert (one.newly_complete_peers(), one.newly_rejected_peers()) == ([], {}), (
        "a second try in the same round comes too late"
    )
    one.settle(3, 0, {2: 9}, low)
    assert all(torch.isfinite(weight).all() for weight in low.state().weights.values())
    one.update(4, low)
    pass_on(other.update(4, high), one, node=7)
    assert one.newly_complete_peers() == [7], "an invalid update does not affect the next round"


def test_a_dropped_round_leaves_no_trace() -> None:
    circle, runner = worker(CODED, 0.1)
    outer = {name: tensor.clone() for name, tensor in held(circle).items()}
    circle.update(3, runner)
    circle.drop()
    assert held(circle).keys() == outer.keys()
    assert all(torch.equal(held(circle)[name], tensor) for name, tensor in outer.items())


def test_a_successor_keeps_the_residual_and_a_copy_does_not() -> None:
    circle, runner = worker(CODED, 0.1)
    peer, theirs = worker(CODED, 0.2)
    circle.update(3, runner)
    pass_on(peer.update(3, theirs), circle, node=7)
    circle.newly_complete_peers()
    circle.settle(3, 0, {1: 7}, runner)
    assert any(name.startswith("residual/") and tensor.any() for name, tensor in held(circle).items())
    copy = RoundMember(CODED)
    copy.begin(circle.outer.state_for_transfer(to_successor=False), runner, rounds=4)
    assert not any(name.startswith("residual/") and tensor.any() for name, tensor in held(copy).items())
    slow = [name for name in held(circle) if name.startswith("slow/")]
    assert slow and all(torch.equal(held(copy)[name], held(circle)[name]) for name in slow)
    successor = RoundMember(CODED)
    successor.begin(circle.outer.state_for_transfer(to_successor=True), runner, rounds=4)
    assert held(successor).keys() == held(circle).keys()
    assert all(torch.equal(held(successor)[name], tensor) for name, tensor in held(circle).items())


def test_a_lone_replica_follows_its_own_drift() -> None:
    circle, runner = worker(PAIRS, 0.1)
    before = some_weight(runner) - 0.1
    made = circle.settle(3, 0, {}, runner)
    assert torch.allclose(some_weight(runner), before + 0.7 * 0.1, atol=1e-5)
    assert (made.blocking_bytes, made.prefetched_bytes, made.spread) == (0, 0, 0.0)
