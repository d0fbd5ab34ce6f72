"""Two ends that cannot call each other meet at a relay: transport, timeouts and broken connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from planaria.common.address import Reach
from planaria.runtime.transport.channel import Channel, ChannelClosed
from planaria.runtime.transport.listener import connect, no_answer, unreachable
from planaria.runtime.transport.port import PeerUnreachable, Port, RelayUnanswered
from planaria.runtime.transport.relay import READY, Relay, end_greeting, relay_at
from planaria.runtime.transport.secure import new_key
from support.edge_ends import read, write
from support.waiting import until

KEY = new_key()
NEVER = lambda: False  # noqa: E731
RELAYS: list[Relay] = []


@pytest.fixture
def relay() -> Iterator[str]:
    """Yield the address of a relay."""
    listener, meeting = relay_at("127.0.0.1", 0, KEY)
    RELAYS.append(meeting)
    yield listener.address
    listener.close()
    meeting.close()
    RELAYS.clear()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def until_known(end: str) -> None:
    """Wait until an end that has called is known to the relay."""
    until(lambda: (end, "edge") in RELAYS[0]._waiting)


def hidden(machine: str, relay: str) -> Port:
    return Port("127.0.0.1", KEY, Reach(machine=machine, reachable=False, relay=relay))


def met(pool: ThreadPoolExecutor, one: Port, other: Port, at: str = "") -> tuple[Any, Any]:
    """Return both ends of an edge at which ``one`` waits and that ``other`` calls."""
    waiting = pool.submit(one.await_call, "edge", 30.0, NEVER)
    return called(other, waiting, at or one.address)


def called(caller: Port, waiting: Future[Channel | None], at: str) -> tuple[Any, Any]:
    channel = caller.call(at, "edge", 30.0, NEVER)
    ends = waiting.result(30), channel
    assert None not in ends
    return ends


def assert_carries(one: Channel, other: Channel) -> None:
    write(one, b"to the right one")
    assert read(other, 16) == b"to the right one"


def test_bytes_arrive_both_ways(pool: ThreadPoolExecutor, relay: str) -> None:
    one, other = met(pool, hidden("g1", relay), hidden("g2", relay))
    data = bytes(range(256)) * 12_000
    sending = [pool.submit(write, one, data), pool.submit(write, other, data[::-1])]
    assert read(other, len(data)) == data and read(one, len(data)) == data[::-1]
    for sent in sending:
        sent.result(10)
    one.close()
    with pytest.raises((ChannelClosed, OSError)):
        read(other, 1)
    other.close()


@pytest.mark.slow
def test_an_end_that_cannot_be_called_directly_is_met_at_the_relay(pool: ThreadPoolExecutor, relay: str) -> None:
    """The caller's address for the other is wrong: it tries both ways."""
    one, other = (Port("127.0.0.1", KEY, Reach(machine=machine, relay=relay)) for machine in ("g1", "g2"))
    met(pool, one, other, f"127.0.0.1:1 {closed_address()} g1")


def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_an_unanswered_end_gives_up_after_its_timeout(relay: str) -> None:
    one = hidden("g1", relay)
    with pytest.raises(PeerUnreachable, match=r"within 0\.5 s"):
        one.await_call("edge", 0.5, NEVER)
    with pytest.raises(PeerUnreachable, match=r"within 0\.5 s"):
        one.call("10.0.0.1:1 - g2", "edge", 0.5, NEVER)


def test_the_error_of_an_edge_that_does_not_open_is_known_early(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planaria.runtime.transport.port._REPORT_S", 0.0)
    one, over = Port("127.0.0.1", KEY), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    calling = pool.submit(one.reach, closed, "", "edge", 600.0, over.is_set)
    until(lambda: one.trouble, 60.0)
    assert one.trouble == f"{closed}: Connection refused"
    over.set()
    assert calling.result(60) is None and not one.trouble
    assert unreachable(closed) == f"cannot connect to {closed}: Connection refused"
    assert no_answer(closed, KEY) == "Connection refused"
    with pytest.raises(RelayUnanswered, match=rf"the relay {closed} did not answer \(Connection refused\)"):
        one.reach("", closed, "edge", 0.1, NEVER)


def test_giving_up_ends_the_wait(pool: ThreadPoolExecutor, relay: str) -> None:
    one, over = hidden("g1", relay), threading.Event()
    waiting = pool.submit(one.await_call, "edge", 30.0, over.is_set)
    until_known("waits")
    over.set()
    assert waiting.result(5) is None


def test_a_later_call_of_an_end_replaces_the_earlier(pool: ThreadPoolExecutor, relay: str) -> None:
    """A worker that died while it waited is replaced, and its successor calls again."""
    before = connect(relay, KEY, end_greeting("edge", "waits"), 5.0)
    until_known("waits")
    first, successor, caller = RELAYS[0]._waiting["waits", "edge"], hidden("g1", relay), hidden("g2", relay)
    waiting: Future[Channel | None] = pool.submit(successor.await_call, "edge", 20.0, NEVER)
    until(lambda: RELAYS[0]._waiting["waits", "edge"] is not first)
    assert_carries(*called(caller, waiting, successor.address))
    before.settimeout(5.0)
    with pytest.raises(OSError, match="EOF"):
        before.recv(1)
    before.close()


def test_an_end_that_has_closed_is_not_connected(pool: ThreadPoolExecutor, relay: str) -> None:
    closed = connect(relay, KEY, end_greeting("edge", "calls"), 5.0)
    until_known("calls")
    closed.close()
    one, other = met(pool, hidden("g1", relay), hidden("g2", relay))
    assert_carries(other, one)


def test_an_end_that_closes_as_it_is_met_leaves_the_other_waiting(pool: ThreadPoolExecutor, relay: str) -> None:
    """It is still connected when the relay looks, and never answers."""
    giving_up = connect(relay, KEY, end_greeting("edge", "calls"), 5.0)
    until_known("calls")
    one, later = hidden("g1", relay), hidden("g2", relay)
    waiting: Future[Channel | None] = pool.submit(one.await_call, "edge", 20.0, NEVER)
    assert giving_up.recv(1) == READY
    giving_up.close()
    until_known("waits")
    found, other = called(later, waiting, one.address)
    assert_carries(other, found)


def test_a_probe_tells_whether_an_address_can_be_reached() -> None:
    port = Port("127.0.0.1", KEY)
    assert not no_answer(port.address, KEY)
    assert no_answer(port.address, new_key())
    port.close()
    assert no_answer(port.address, KEY, 0.5) and no_answer("nonsense", KEY)
