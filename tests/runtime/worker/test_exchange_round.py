"""A worker in a round: the parts of its update, the updates that it receives, and its state afterwards."""

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
    runner, member = StageRunner(RECIPE, 1), RoundMember(config)
    member.begin({}, runner, rounds=3)
    runner.set_weights({name: weight + shift for name, weight in runner.state().weights.items()})
    return member, runner


def deliver(update: Update, member: RoundMember, node: int) -> None:
    for content, part in ((FrameContent.PREFETCHED, update.prefetched), (FrameContent.BLOCKING, update.blocking)):
        if part is not None:
            member.receive(node, content, part)


def outer_state(member: RoundMember) -> dict[str, torch.Tensor]:
    """The outer state."""
    return member.outer.settled.state()


def some_weight(runner: StageRunner) -> torch.Tensor:
    return next(iter(runner.state().weights.values())).clone()


@pytest.mark.parametrize("config", [PAIRS, CODED], ids=["one part", "two parts"])
def test_two_replicas_that_meet_move_towards_each_other(config: ExchangeConfig) -> None:
    (member, low), (peer, high) = worker(config, 0.0), worker(config, 0.1)
    before = some_weight(low)
    own, received = member.update(3, low), peer.update(3, high)
    member.updates_for(0, 0, [1])
    deliver(received, member, node=7)
    deliver(own, peer, node=5)
    assert (member.newly_complete_peers(), peer.newly_complete_peers()) == ([7], [5])
    assert member.newly_complete_peers() == [], "reported once"
    outcome = member.settle(3, 0, {1: 7}, low)
    peer.settle(3, 1, {0: 5}, high)
    assert torch.allclose(some_weight(low), some_weight(high), atol=1e-3)
    assert torch.allclose(some_weight(low), before + 0.7 * 0.05, atol=1e-3), "β times the mean drift"
    assert outcome.spread == pytest.approx(0.1 / 2**0.5, rel=0.05)
    assert outcome.blocking_bytes == (own.blocking.nbytes if own.blocking is not None else 0)
    assert member.rounds == 4


@pytest.mark.parametrize(
    ("kind", "options", "during_steps"),
    [
        ("diloco", {}, False),
        ("streaming_diloco", {"fragments": 1}, False),
        ("streaming_diloco", {"fragments": 1, "delay": 1}, True),
        ("decoupled", {"fragments": 1, "delay": 1}, True),
        ("eager", {}, True),
        ("noloco", {}, False),
    ],
)
def test_bytes_of_an_overlapping_exchange_are_sent_during_inner_steps(
    kind: str, options: dict[str, int], during_steps: bool
) -> None:
    (member, low), (peer, high) = (
        worker(ExchangeConfig(replicas=2, kind=kind, options=Options({"every": 2, **options})), shift)
        for shift in (0.0, 0.1)
    )
    own, received = member.update(3, low), peer.update(3, high)
    member.updates_for(0, 0, [1])
    deliver(received, member, node=7)
    member.newly_complete_peers()
    outcome = member.settle(3, 0, {1: 7}, low)
    sent = sum(part.nbytes for part in (own.blocking, own.prefetched) if part is not None)
    assert sent and (outcome.blocking_bytes, outcome.prefetched_bytes) == ((0, sent) if during_steps else (sent, 0))


def test_a_prefetched_part_is_sent_once_and_kept() -> None:
    member, runner = worker(CODED, 0.1)
    early = member.prefetch(3)
    assert early is not None
    member.receive(7, FrameContent.PREFETCHED, early)
    member.receive(7, FrameContent.BLOCKING, torch.zeros(3, dtype=torch.uint8))  # the peer is ahead
    assert member.newly_complete_peers() == [], "its own update is not complete yet"
    update = member.update(3, runner)
    assert update.prefetched is early
    assert member.newly_complete_peers() == [], "the blocking part has the wrong shape"
    assert "its blocking part: torch.uint8 [3], not torch.uint8 [" in member.newly_rejected_peers()[7]


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
    deliver(third.update(3, mid), one, node=9)
    assert one.newly_rejected_peers().keys() == {7} and one.newly_rejected_peers() == {}, "reported once"
    assert one.newly_complete_peers() == [9]
    deliver(other.update(3, high), one, node=7)
    assert (one.newly_complete_peers(), one.newly_rejected_peers()) == ([], {}), (
        "a second try in the same round comes too late"
    )
    one.settle(3, 0, {2: 9}, low)
    assert all(torch.isfinite(weight).all() for weight in low.state().weights.values())
    one.update(4, low)
    deliver(other.update(4, high), one, node=7)
    assert one.newly_complete_peers() == [7], "an invalid update does not affect the next round"


def test_a_dropped_round_leaves_no_trace() -> None:
    member, runner = worker(CODED, 0.1)
    outer = {name: tensor.clone() for name, tensor in outer_state(member).items()}
    member.update(3, runner)
    member.drop()
    assert outer_state(member).keys() == outer.keys()
    assert all(torch.equal(outer_state(member)[name], tensor) for name, tensor in outer.items())


def test_a_successor_keeps_the_residual_and_a_copy_does_not() -> None:
    member, runner = worker(CODED, 0.1)
    peer, theirs = worker(CODED, 0.2)
    member.update(3, runner)
    deliver(peer.update(3, theirs), member, node=7)
    member.newly_complete_peers()
    member.settle(3, 0, {1: 7}, runner)
    assert any(name.startswith("residual/") and tensor.any() for name, tensor in outer_state(member).items())
    copy = RoundMember(CODED)
    copy.begin(member.outer.state_for_transfer(to_successor=False), runner, rounds=4)
    assert not any(name.startswith("residual/") and tensor.any() for name, tensor in outer_state(copy).items())
    slow = [name for name in outer_state(member) if name.startswith("slow/")]
    assert slow and all(torch.equal(outer_state(copy)[name], outer_state(member)[name]) for name in slow)
    successor = RoundMember(CODED)
    successor.begin(member.outer.state_for_transfer(to_successor=True), runner, rounds=4)
    assert outer_state(successor).keys() == outer_state(member).keys()
    assert all(torch.equal(outer_state(successor)[name], tensor) for name, tensor in outer_state(member).items())


def test_a_lone_replica_follows_its_own_drift() -> None:
    member, runner = worker(PAIRS, 0.1)
    before = some_weight(runner) - 0.1
    outcome = member.settle(3, 0, {}, runner)
    assert torch.allclose(some_weight(runner), before + 0.7 * 0.1, atol=1e-5)
    assert (outcome.blocking_bytes, outcome.prefetched_bytes, outcome.spread) == (0, 0, 0.0)
