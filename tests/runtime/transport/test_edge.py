"""Two ends of real edges, both in this process."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from planaria.pipeline.codecs import make_codec
from planaria.pipeline.codecs.base import Leg, Visit
from planaria.runtime.transport import channel
from planaria.runtime.transport.edge import EdgeFailed, EdgeOpened, EdgeSpec, FrameArrived
from planaria.runtime.transport.emulated_link import EmulatedLink
from planaria.runtime.transport.pieces import PIECE_BYTES, Outgoing
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.secure import new_key
from planaria.runtime.transport.wire import HEADER_BYTES, FrameContent, Piece, Ping
from support.edge_ends import SOON_S, End

KEY = new_key()


@pytest.fixture(scope="module")
def port() -> Iterator[Port]:
    port = Port("127.0.0.1", KEY)
    yield port
    port.close()


@pytest.fixture(params=["plain", "tls"])
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EdgeSpec:
    """Return the spec of an end that waits to be called, within one machine and between machines."""
    if request.param == "tls":
        monkeypatch.setattr(channel, "meet_here", lambda _: None)
    return EdgeSpec(request.node.name, "", 2, 1 << 20, SOON_S)


@pytest.fixture
def ends(spec: EdgeSpec, port: Port) -> Iterator[tuple[End, End]]:
    yield from opened(spec, port)


def opened(
    spec: EdgeSpec, port: Port, link: Callable[[], EmulatedLink | None] = lambda: None
) -> Iterator[tuple[End, End]]:
    low = End(replace(spec, link=link()), port)
    high = End(replace(spec, at=port.address, peer=1, link=link()), port)
    for end in (low, high):
        assert end.next(EdgeOpened).seconds < SOON_S
    yield low, high
    low.edge.abandon()
    high.edge.abandon()
    assert fully_closed(low, high), "an abandoned edge leaves something behind"


def fully_closed(*ends: End) -> bool:
    """Return whether all threads and sockets of these edges end, without waiting for them otherwise."""
    deadline, names = time.monotonic() + SOON_S, {f"open {end.edge.spec.link_id}" for end in ends}
    while any(thread.name in names for thread in threading.enumerate()) or any(end.edge.fileno() >= 0 for end in ends):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    for end in ends:
        end.inbox.close()
    return True


def test_frames_arrive_intact_and_in_order_both_ways(ends: tuple[End, End]) -> None:
    generator = torch.Generator().manual_seed(1)
    frames = [torch.randn(n + 1, 7, generator=generator) for n in range(20)]
    frames += [
        torch.randn(300, 301, generator=generator),
        torch.arange(5),
        torch.tensor(2.5),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.randn(6, 4).T,
    ]
    for number, frame in enumerate(frames):
        for end in ends:
            end.send(frame, number)
    for end in ends:
        for number, frame in enumerate(frames):
            arrived = end.next(FrameArrived)
            assert arrived.edge is end.edge
            assert arrived.header.label == Ping(number, FrameContent.PING)
            assert arrived.payload.dtype == frame.dtype
            assert torch.equal(arrived.payload, frame)
        assert end.edge.sent_bytes == sum(frame.nbytes for frame in frames)


def sent_by_kernel(end: End) -> int:
    """Return the bytes that this end's TCP connection sent once, without TCP and IP headers (Linux 4.19 and newer)."""
    with socket.socket(fileno=os.dup(end.edge.fileno())) as tcp:
        info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, repeated = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
    return int(sent - repeated)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="counted by Linux")
@pytest.mark.parametrize("spec", ["tls"], indirect=True)
@pytest.mark.parametrize("wire", ["bf16", "6/4"])
def test_a_message_between_machines_costs_its_bytes_a_header_and_little_for_tls(
    ends: tuple[End, End], wire: str
) -> None:
    low, high = ends
    shape, codec = (2, 128, 512), make_codec(wire)
    size, before = codec.bytes(shape), sent_by_kernel(low)
    for number in range(8):
        leg: Leg = "forward" if number % 2 else "backward"
        message = codec.encode(torch.randn(shape), leg, Visit(1, number, 2))
        assert message.nbytes == size.of(leg)
        low.send(message, number)
        high.next(FrameArrived)
    stated = 4 * (size.forward + size.backward + 2 * HEADER_BYTES)
    assert stated < sent_by_kernel(low) - before <= 1.002 * stated


def test_a_frame_larger_than_the_edge_allows_breaks_it_at_the_receiver(ends: tuple[End, End]) -> None:
    low, high = ends
    low.send(torch.zeros((1 << 18) + 1))
    broken = high.next(EdgeFailed)
    assert broken.edge is high.edge
    assert "at most 1048576" in broken.detail
    assert high.receives_nothing()


def test_bytes_that_are_no_frame_break_the_edge(spec: EdgeSpec, port: Port) -> None:
    end = End(spec, port)
    other = port.call(port.address, spec.link_id, SOON_S, lambda: False)
    end.next(EdgeOpened)
    no_frame = memoryview(bytes(HEADER_BYTES))
    assert other.write_some(no_frame, no_frame[:0]) == HEADER_BYTES
    assert "not a planaria frame" in end.next(EdgeFailed).detail
    other.close()
    assert fully_closed(end)


def test_an_abandoned_edge_reports_nothing_at_either_end(spec: EdgeSpec, port: Port) -> None:
    low, high = End(spec, port), End(replace(spec, at=port.address), port)
    low.next(EdgeOpened), high.next(EdgeOpened)
    low.edge.abandon()
    high.send(torch.ones(3))  # it may still be on its way to an end that no longer reads
    assert low.receives_nothing() and high.receives_nothing()
    high.edge.abandon()
    assert low.receives_nothing()
    assert fully_closed(low, high)


@pytest.mark.parametrize("calling", [False, True])
def test_an_unanswered_end_is_reported_after_its_timeout(spec: EdgeSpec, port: Port, calling: bool) -> None:
    start = time.monotonic()
    alone = End(replace(spec, open_timeout_s=0.5, at=port.address if calling else ""), port)
    broken = alone.next(EdgeFailed)
    assert "could not be opened" in broken.detail
    assert "\n" not in broken.detail
    assert time.monotonic() - start >= 0.45
    assert fully_closed(alone)


@pytest.mark.parametrize("calling", [False, True])
def test_an_edge_that_is_abandoned_before_it_opens_stays_silent(spec: EdgeSpec, port: Port, calling: bool) -> None:
    alone = End(replace(spec, at=port.address if calling else ""), port)
    alone.edge.abandon()
    assert alone.receives_nothing()
    assert fully_closed(alone)


def test_emulated_latency_and_bandwidth_are_lower_bounds(spec: EdgeSpec, port: Port) -> None:
    """Frames queue for the bandwidth, and their latencies overlap: 3 frames of 0.1 s each, and 0.2 s once."""
    for low, high in opened(spec, port, lambda: EmulatedLink(0.2, 4000.0)):
        start = time.monotonic()
        for number in range(3):
            low.send(torch.zeros(100), number)
        for place in range(1, 4):
            high.next(FrameArrived)
            assert 0.2 + 0.1 * place <= time.monotonic() - start
        assert time.monotonic() - start < 3 * 0.3 + SOON_S / 10
        high.send(torch.zeros(100))  # each direction has its own bandwidth
        start = time.monotonic()
        low.next(FrameArrived)
        assert time.monotonic() - start > 0.25


def test_frames_sent_before_an_edge_was_abandoned_still_arrive(spec: EdgeSpec, port: Port) -> None:
    """A state is sent over an edge that its owner abandons at once, long before the other end opens."""
    state = torch.randn(1 << 17)
    sender = End(replace(spec, at=port.address), port)
    sender.send(state)
    sender.edge.abandon()
    receiver = End(spec, port)
    receiver.next(EdgeOpened)
    assert torch.equal(receiver.next(FrameArrived).payload, state)
    receiver.edge.abandon()
    assert fully_closed(sender, receiver)


def test_an_end_that_dies_breaks_the_edge_at_once(ends: tuple[End, End]) -> None:
    low, high = ends
    low.edge._channel.shut_down()  # as the system does for a process that is killed
    assert high.next(EdgeFailed).edge is high.edge


def test_frames_larger_than_any_buffer_keep_their_order(ends: tuple[End, End]) -> None:
    low, high = ends
    frames = [torch.full(((1 << 18) - number % 3,), float(number)) for number in range(24)]
    for number, frame in enumerate(frames):
        low.send(frame, number)
        high.send(frame[:5], number)
    for number, frame in enumerate(frames):
        assert torch.equal(high.next(FrameArrived).payload, frame)
        assert low.next(FrameArrived).header.label.number == number


def test_several_threads_may_send(ends: tuple[End, End]) -> None:
    """Two threads send frames that do not fit the buffer at once."""
    low, high = ends
    frames = [torch.full((50_000 + number,), float(number)) for number in range(40)]

    def send(first: int) -> None:
        for number in range(first, len(frames), 2):
            low.send(frames[number], number)

    other = threading.Thread(target=send, args=(1,))
    other.start()
    send(0)
    other.join(SOON_S)
    arrived = [high.next(FrameArrived) for _ in frames]
    numbers = [item.header.label.number for item in arrived]
    assert sorted(numbers) == list(range(40)) and all(
        torch.equal(item.payload, frames[number]) for item, number in zip(arrived, numbers, strict=True)
    )
    for parity in (0, 1):
        assert [number for number in numbers if number % 2 == parity] == list(range(parity, 40, 2))
    assert low.edge.sent_bytes == sum(frame.nbytes for frame in frames)


def test_sent_frames_arrive_while_the_other_end_continues_to_send(ends: tuple[End, End]) -> None:
    """Closing a connection with unread data would discard sent data that has not arrived."""
    low, high = ends
    frames = [torch.full((1 << 18,), float(number)) for number in range(8)]
    for number, frame in enumerate(frames):
        high.send(frame[:5])
        low.send(frame, number)
    low.edge.abandon()
    for number, frame in enumerate(frames):
        high.send(frame[:5])
        arrived = high.next(FrameArrived)
        assert arrived.header.label.number == number and torch.equal(arrived.payload, frame)
    assert high.receives_nothing(), "a goodbye is no break"


def test_frames_are_held_no_longer_than_the_fault_lasts(ends: tuple[End, End]) -> None:
    low, high = ends
    high.edge.hold_s, high.edge.hold_until = 0.1, time.monotonic() + 0.5
    start = time.monotonic()
    for number in range(100):
        low.send(torch.zeros(3), number)
    assert [high.next(FrameArrived).header.label.number for _ in range(100)] == list(range(100))
    assert 0.45 < time.monotonic() - start < 5.0, "one hold after the other would take 10 s"


def test_other_edges_are_served_while_a_large_frame_arrives(spec: EdgeSpec, port: Port) -> None:
    for low, high in opened(replace(spec, max_bytes=1 << 26), port):
        before = high.inbox.rounds
        low.send(torch.zeros(1 << 24))
        assert high.next(FrameArrived).payload.nbytes == 1 << 26
        assert high.inbox.rounds - before > 5, "4 MB at a time, and the content of the socket's buffer"


def test_deferred_frames_arrive_whole_and_in_order(ends: tuple[End, End]) -> None:
    low, high = ends
    large = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (900_000, 0, 1, 1 << 20)]
    for number, payload in enumerate(large):
        low.send(payload, number, later=True)
        high.send(payload, number, later=True)
        low.send(torch.tensor([number]), 10 + number)
    for end, numbers in ((high, [0, 1, 2, 3, 10, 11, 12, 13]), (low, [0, 1, 2, 3])):
        arrived = [end.next(FrameArrived) for _ in numbers]
        assert sorted(item.header.label.number for item in arrived) == numbers
        waited = [item for item in arrived if item.header.label.number < 10]
        assert [item.header.label.number for item in waited] == [0, 1, 2, 3]
        assert all(torch.equal(item.payload, whole) for item, whole in zip(waited, large, strict=True))


def test_on_a_slow_link_a_frame_passes_deferred_ones(spec: EdgeSpec, port: Port) -> None:
    """A megabyte takes a second; a later frame arrives after the few pieces that are on their way."""
    for low, high in opened(spec, port, lambda: EmulatedLink(0.0, 1e6)):
        low.send(torch.zeros(1 << 20, dtype=torch.uint8), 0, later=True)
        time.sleep(0.05)
        began = time.monotonic()
        low.send(torch.zeros(1000, dtype=torch.uint8), 1)
        assert high.next(FrameArrived).header.label.number == 1
        assert time.monotonic() - began < 0.5, "too many pieces were ahead of it"
        assert high.next(FrameArrived).header.label.number == 0


def test_an_abandoned_edge_discards_deferred_frames(spec: EdgeSpec, port: Port) -> None:
    for low, high in opened(spec, port, lambda: EmulatedLink(0.0, 1e6)):
        low.send(torch.zeros(1 << 20, dtype=torch.uint8), 0, later=True)
        low.send(torch.zeros(10), 1)
        assert high.next(FrameArrived).header.label.number == 1


@pytest.mark.parametrize("piece", [b"", b"x" * 600])
def test_a_piece_that_was_not_announced_breaks_the_edge(ends: tuple[End, End], piece: bytes) -> None:
    low, high = ends
    low.edge.send(Piece(), torch.frombuffer(bytearray(piece or b"y"), dtype=torch.uint8))
    assert "exceeds the 0 missing bytes" in high.next(EdgeFailed).detail


def test_the_window_grows_while_acknowledgements_are_fast_and_shrinks_when_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link of 50 ms each way, then one on which pieces queue."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = Outgoing()
    out.add(Ping(0, FrameContent.PING), torch.zeros(1000 * PIECE_BYTES, dtype=torch.uint8))

    def sent() -> int:
        count = 0
        while out.next() is not None:
            count += 1
        return count

    counts = []
    for took in [0.1] * 20 + [0.2] * 20:
        counts.append(sent())
        now[0] += took
        for _ in range(counts[-1]):
            out.on_ack()
    assert counts[19] >= 15 and counts[-1] <= 2
    out.lift_limit()
    assert sent() > 100, "there is nothing else to send"


@pytest.mark.parametrize(
    ("link", "arrivals"),
    [
        (EmulatedLink(0.2, 100.0), [1.2 + 0.5, 1.2 + 1.0, 1.2 + 1.25, 5.0 + 0.2 + 0.5]),
        (EmulatedLink(0.2, 100.0, latency_queued=True), [1.7, 2.4, 2.85, 5.7]),
        (EmulatedLink(0.2, None), [1.2, 1.2, 1.2, 5.2]),
        (EmulatedLink(0.2, None, latency_queued=True), [1.2, 1.4, 1.6, 5.2]),
    ],
)
def test_frames_queue_for_the_bandwidth(link: EmulatedLink, arrivals: list[float]) -> None:
    """Three frames of 50, 50 and 25 bytes at once, and one after a pause."""
    sent = [(1.0, 50), (1.0, 50), (1.0, 25), (5.0, 50)]
    assert [link.arrival(ready, nbytes) for ready, nbytes in sent] == pytest.approx(arrivals)
