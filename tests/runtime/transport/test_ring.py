"""Shared memory between processes of one machine: sharing and reuse of slots, and malformed input."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.runtime.transport import ring as rings
from planaria.runtime.transport.channel import LocalChannel
from planaria.runtime.transport.edge import EdgeFailed, EdgeOpened, EdgeSpec, FrameArrived
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.ring import Ring, RingReader, Rings, RingSize, SharedSlot
from planaria.runtime.transport.secure import new_key
from planaria.runtime.transport.wire import (
    Activation,
    FrameContent,
    Ping,
    State,
    TensorHeader,
    WireError,
    pack,
    unpack,
)
from support.edge_ends import SOON_S, End

KEY = new_key()
SLOTS, BYTES = 3, 1 << 16
NUMBERS = BYTES // 4


class RingEnd(End):
    """One end of an edge with its own port, and a ring for the other end to read."""

    def __init__(self, ring: Ring | None, at: str) -> None:
        port = Port("127.0.0.1", KEY)
        port.rings, self.ring = Rings(ring), ring
        super().__init__(EdgeSpec("edge", at, 1, 1 << 20, SOON_S), port)

    def write(self, value: float, numbers: int = NUMBERS) -> Tensor:
        """Return a tensor in the ring."""
        return self.ring.allocate(4 * numbers).view(torch.float32).fill_(value)


@pytest.fixture
def ends() -> Iterator[tuple[RingEnd, RingEnd]]:
    """Two ends of an edge: the first has a ring, the second reads it."""
    low = RingEnd(Ring(SLOTS, BYTES), "")
    pair = low, RingEnd(None, low.port.address)
    for end in pair:
        end.next(EdgeOpened)
    yield pair
    for end in pair:
        end.edge.abandon()
        end.port.close()


def header(slot: int, ticket: int, numbers: int = NUMBERS) -> TensorHeader:
    return TensorHeader(Ping(0, FrameContent.PING), torch.float32, (numbers,), slot=slot, ticket=ticket)


def test_a_slot_is_reused_only_when_no_tensor_refers_to_it(ends: tuple[RingEnd, RingEnd]) -> None:
    low, high = ends
    held = []
    for value in range(SLOTS):
        low.send(low.write(float(value)))
        arrived = high.next(FrameArrived)
        assert arrived.header.slot
        held.append(arrived.payload)
    del arrived
    assert low.ring is not None and low.ring.allocate(BYTES) is None
    assert [float(payload[-1]) for payload in held] == [0.0, 1.0, 2.0]
    del held[1]
    gc.collect()
    mine = low.write(7.0)
    assert low.ring.allocate(BYTES) is None and [float(payload[-1]) for payload in held] == [0.0, 2.0]
    del mine
    assert low.ring.allocate(BYTES) is not None


def test_tensors_outside_the_ring_use_the_socket(ends: tuple[RingEnd, RingEnd]) -> None:
    """A tensor outside the ring, and one from the end that has no ring."""
    low, high = ends
    low.send(torch.arange(5.0))
    assert high.next(FrameArrived).header.slot == 0
    high.send(torch.full((NUMBERS,), 3.0))
    arrived = low.next(FrameArrived)
    assert arrived.header.slot == 0 and torch.equal(arrived.payload, torch.full((NUMBERS,), 3.0))


def test_frames_by_ring_and_by_socket_keep_their_order(ends: tuple[RingEnd, RingEnd]) -> None:
    low, high = ends
    for n in range(8):
        payload = low.write(float(n), 16) if n % 2 and n < 2 * SLOTS else torch.full((16,), float(n))
        low.send(payload, n)
    assert [float(high.next(FrameArrived).payload[0]) for _ in range(8)] == [float(n) for n in range(8)]


def test_slots_of_a_dead_receiver_become_free_after_the_grace_period(
    ends: tuple[RingEnd, RingEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high = ends
    low.send(low.write(1.0))
    held = high.next(FrameArrived)
    assert low.ring.allocate(BYTES) is not None
    high.edge.reset()
    low.next(EdgeFailed)
    now = time.monotonic()
    for later, free in ((rings.GRACE_S / 2, SLOTS - 1), (2 * rings.GRACE_S, SLOTS)):
        monkeypatch.setattr(rings.time, "monotonic", lambda later=later: now + later)
        taken = [low.ring.allocate(BYTES) for _ in range(SLOTS)]
        assert sum(one is not None for one in taken) == free
        del taken
    assert held.payload is not None


def test_a_ring_outlives_its_owner() -> None:
    """A shared tensor can still be read after its owner's process has ended."""
    ours, theirs = socket.socketpair()
    if not (child := os.fork()):
        ring = Ring(1, BYTES)
        room = ring.allocate(BYTES)
        ring.share(room.view(torch.float32).fill_(5.0))
        Rings(ring).exchange(theirs)
        os._exit(0)
    _, reader = Rings().exchange(ours)
    assert os.waitpid(child, 0)[1] == 0 and reader is not None
    assert torch.equal(reader.tensor(header(1, 1)), torch.full((NUMBERS,), 5.0))


def test_one_ring_is_mapped_once() -> None:
    readers, ring, mine = [], Ring(1, BYTES), Rings()
    for _ in range(2):
        ours, theirs = socket.socketpair()
        shown = threading.Thread(target=Rings(ring).exchange, args=(theirs,))
        shown.start()
        readers.append(mine.exchange(ours)[1])
        shown.join()
    assert readers[0] is not None and readers[0] is readers[1]


@given(st.integers(0, 255), st.integers(0, 3 * NUMBERS))
def test_a_frame_cannot_name_memory_beyond_its_slot(slot: int, numbers: int) -> None:
    ring = Ring(SLOTS, BYTES)
    rooms = [ring.allocate(BYTES) for _ in range(SLOTS)]
    tickets = {share.slot: share.ticket for room in rooms if room is not None and (share := ring.share(room))}
    try:
        found = RingReader(ring.fd, ring.size).tensor(header(slot, tickets.get(slot, 1), numbers))
    except WireError:
        assert not (0 < slot <= SLOTS and 0 < numbers <= NUMBERS)
    else:
        assert 0 < slot <= SLOTS and found.shape == (numbers,) and found.nbytes <= BYTES


def test_only_activations_and_pings_may_be_in_a_ring() -> None:
    """A state may be read for longer than its edge lasts."""
    here = Activation(1, 2, 3, 4, FrameContent.FORWARD)
    assert unpack(pack(TensorHeader(here, torch.float32, (4,), slot=1)), 1 << 20).slot == 1
    for label, announced in ((State(1), False), (here, True)):
        with pytest.raises(WireError, match="slot 1 of a ring"):
            unpack(pack(TensorHeader(label, torch.float32, (4,), announced=announced, slot=1)), 1 << 20)


def test_a_frame_in_a_ring_that_was_not_shown_breaks_the_edge(ends: tuple[RingEnd, RingEnd]) -> None:
    low, high = ends
    high.edge._channel.share = lambda _: SharedSlot(1, 1)
    high.send(torch.ones(4))
    broken = low.next(EdgeFailed)
    assert broken.received_invalid_frame and "slot 1 of a ring" in broken.detail


@pytest.mark.parametrize("wrong", ["short", "unsealed", "no file", "sizes"])
def test_a_descriptor_that_is_no_ring_is_not_mapped(wrong: str) -> None:
    """Reading a file that shrinks would kill this process."""
    size = RingSize(SLOTS, BYTES)
    ring = Ring(*size)
    fd, ends = ring.fd, None
    if wrong in ("short", "unsealed"):
        fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size.whole - (wrong == "short"))
    elif wrong == "no file":
        ends = os.pipe()
        fd = ends[0]
    elif wrong == "sizes":
        size = RingSize(1 << 40, 1 << 40)
    with pytest.raises(OSError, match="a ring"):
        RingReader(fd, size)
    for one in ends or ([fd] if fd != ring.fd else []):
        os.close(one)


@pytest.mark.parametrize("sent", [b"", b"\0" * 16, b"\xff" * 40])
def test_an_end_that_sends_no_ring_leaves_the_edge_without_one(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.2)
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    assert Rings(Ring(1, BYTES)).exchange(ours) == (None, None)


@pytest.mark.slow
def test_a_late_receiver_frees_no_slot_that_is_shared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its edge has closed, and another edge uses the slot."""
    ring = Ring(1, BYTES)
    reader = RingReader(ring.fd, ring.size)
    shares: list[SharedSlot] = []

    def shared() -> Tensor:
        room = ring.allocate(BYTES)
        shares.append(ring.share(room))
        return reader.tensor(header(*shares[-1]))

    late = shared()
    gc.collect()
    ring.expire(shares[0])
    now = time.monotonic()
    monkeypatch.setattr(rings.time, "monotonic", lambda: now + 2 * rings.GRACE_S)
    second = shared()
    del late
    gc.collect()
    ring.expire(shares[0])
    assert ring.shared(shares[1]) and ring.allocate(BYTES) is None, "the first edge freed the second edge's slot"
    with pytest.raises(WireError, match="ticket"):
        reader.tensor(header(1, shares[0].ticket))
    del second
    gc.collect()
    assert not ring.shared(shares[1])


def test_some_tensors_cannot_be_shared() -> None:
    """A transposed view, a slot that is shared already, memory outside the ring."""
    ring = Ring(1, BYTES)
    room = ring.allocate(BYTES)
    grid = room.view(torch.float32)[:6].view(2, 3)
    assert ring.share(grid.T) is None and ring.share(room[4:]) is None and ring.share(torch.zeros(4)) is None
    assert ring.share(grid) is not None and ring.share(grid) is None


def test_closing_one_edge_leaves_the_slots_of_another() -> None:
    ring = Ring(1, BYTES)
    first, second = (LocalChannel(socket.socketpair()[0], ring) for _ in range(2))
    room = ring.allocate(BYTES)
    share = first.share(room)
    RingReader(ring.fd, ring.size).tensor(header(*share))
    gc.collect()
    again = second.share(room)
    assert not ring.shared(share) and again is not None
    first.close()
    assert not ring._expiring and ring.shared(again)
    second.close()
    assert ring._expiring


def test_a_ring_larger_than_the_free_memory_is_an_error() -> None:
    """Reserving more than is free would make the system kill processes."""
    assert 1 << 20 < rings.available() < 1 << 50
    with pytest.raises(OSError, match="available"):
        Ring(255, 1 << 50)
