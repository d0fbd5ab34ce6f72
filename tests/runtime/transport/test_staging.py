"""Copies between a device and its host: a tensor is delivered, or its memory reused, only after its event."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from planaria.runtime.transport import wire
from planaria.runtime.transport.staging import Cuda, Staging, pinned
from support.fake_device import FakeCopier
from support.waiting import SOON_S, until

QUIET_S = 0.2


@pytest.fixture
def copier() -> FakeCopier:
    return FakeCopier()


def test_copies_are_delivered_whole_and_in_order_after_their_events(copier: FakeCopier) -> None:
    staging, received = Staging(copier, depth=3), list[float]()
    for number in range(3):
        staging.send(torch.full((5,), float(number)), lambda host: received.append(host.sum().item()))
    for number in (2, 1):  # a device would not, but a later copy may not pass an earlier one
        copier.events[number].happen()
    time.sleep(QUIET_S)
    assert received == [] and copier.in_use() == 6
    copier.events[0].happen()
    until(lambda: len(received) == 3)
    assert received == [0.0, 5.0, 10.0]
    until(lambda: not staging.under_way)
    until(lambda: not copier.in_use())


def test_the_depth_limits_the_copies_under_way(copier: FakeCopier) -> None:
    staging, received = Staging(copier, depth=2), list[Tensor]()
    sender = threading.Thread(
        target=lambda: [staging.send(torch.ones(3), received.append) for _ in range(5)], daemon=True
    )
    sender.start()
    for number in range(5):
        until(lambda: len(copier.events) == min(5, number + 2))  # noqa: B023
        time.sleep(0.05)
        assert len(copier.events) == min(5, number + 2) and staging.under_way <= 2
        copier.events[number].happen()
        until(lambda: len(received) == number + 1)  # noqa: B023
    sender.join(SOON_S)
    assert not sender.is_alive()


@pytest.mark.slow
def test_dropped_copies_are_not_delivered_and_their_memory_is_freed(copier: FakeCopier) -> None:
    """A neighbour is killed: the next generation begins while copies of the last are under way."""
    staging, received = Staging(copier, depth=4), list[float]()
    for number in range(2):
        staging.send(torch.full((2,), float(number)), lambda host: received.append(host[0].item()))
    staging.drop()
    staging.send(torch.full((2,), 7.0), lambda host: received.append(host[0].item()))
    assert copier.in_use() == 6, "the device still reads and writes them"
    for event in copier.events:
        event.happen()
    until(lambda: received)
    assert received == [7.0] and staging.under_way == 0
    until(lambda: not copier.in_use())


def test_a_failure_of_the_device_is_raised_at_the_next_send(copier: FakeCopier) -> None:
    staging, received = Staging(copier, depth=1), list[Tensor]()
    staging.send(torch.ones(3), received.append)
    copier.events[0].happen(RuntimeError("illegal memory access"))
    with pytest.raises(RuntimeError, match="a copy from the device failed") as caught:
        staging.send(torch.ones(3), received.append)
    assert "illegal memory access" in str(caught.value.__cause__) and not received


@pytest.mark.slow
def test_received_memory_stays_in_use_until_it_is_on_the_device(copier: FakeCopier) -> None:
    staging = Staging(copier, depth=2)
    landing = [staging.receive(torch.full((4,), float(number))) for number in range(2)]
    assert copier.in_use() == 4 and not copier.joined
    third = threading.Thread(target=lambda: landing.append(staging.receive(torch.full((4,), 2.0))), daemon=True)
    third.start()
    time.sleep(QUIET_S)
    assert len(copier.events) == 2, "no more than two at once"
    for number in range(2):
        copier.events[number].happen()
    third.join(SOON_S)
    assert len(landing) == 3
    copier.events[2].happen()
    for number, tensor in enumerate(landing):
        assert staging.join(tensor) is tensor and copier.joined[-1] is tensor
        assert tensor.tolist() == [number] * 4


def test_activations_are_received_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_take", wire._take)  # to be put back
    given: list[Tensor] = []

    def take(size: int) -> Tensor:
        given.append(torch.zeros(size, dtype=torch.uint8))
        return given[-1]

    wire.use_allocator(take, {200 * 2048})
    small, large, other = (wire.buffer(torch.bfloat16, (n, 1024), n * 2048) for n in (1, 200, 201))
    assert small.shape == (1, 1024) and large.shape == (200, 1024) and other.shape == (201, 1024)
    assert [tensor.data_ptr() for tensor in given] == [large.data_ptr()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_delivers_the_computed_tensors() -> None:
    staging, received = Staging(Cuda()), list[Tensor]()
    x = torch.randn(1024, 1024, device="cuda")
    sent = []
    for _ in range(20):
        x = x @ x / x.norm()
        sent.append(x.cpu())
        staging.send(x, lambda host: received.append(host.clone()))
    until(lambda: len(received) == 20)
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))
    frame = pinned(1 << 20).random_(0, 255)
    landed = staging.receive(frame)
    assert torch.equal(staging.join(landed).cpu(), frame)
