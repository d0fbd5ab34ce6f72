"""Control connections over TCP deliver whole messages in order, also with split packets and hostile connections."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.runtime.fleet.control_connections import ControlConnection, ControlListener, call
from planaria.runtime.transport.channel import SecureChannel
from planaria.runtime.transport.listener import ConnectingPeer
from planaria.runtime.transport.secure import StrangerError, begin, new_key, prove

Answered = SimpleQueue[tuple[ConnectingPeer, ControlConnection]]


@pytest.fixture
def answered() -> Answered:
    return SimpleQueue()


@pytest.fixture
def control_listener(answered: Answered) -> Iterator[ControlListener]:
    listener = ControlListener("127.0.0.1", 0, new_key(), 1000, lambda *peer: answered.put(peer))
    yield listener
    listener.close()


def receive(line: ControlConnection, messages: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < messages:
        found += line.receive()
    return found


def test_a_worker_is_known_by_its_name_and_messages_go_both_ways(
    control_listener: ControlListener, answered: Answered
) -> None:
    worker = call(control_listener.address, control_listener.key, "w3", 2)
    peer, line = answered.get(timeout=10)
    assert (peer.worker, peer.incarnation) == ("w3", 2)
    line.send(b"order")
    assert worker.recv_bytes() == b"order"
    for text in (b"first", b"", b"x" * 1000):
        worker.send_bytes(text)
    assert receive(line, 3) == [b"first", b"", b"x" * 1000]
    worker.close()
    with pytest.raises(EOFError):
        receive(line, 1)


def test_callers_without_the_key_get_no_answer_and_delay_no_other(
    control_listener: ControlListener, answered: Answered
) -> None:
    host, port = control_listener.address.split(":")
    silent = socket.create_connection((host, int(port)))
    with pytest.raises(StrangerError):
        call(control_listener.address, new_key(), "w0", 1)
    worker = call(control_listener.address, control_listener.key, "w1", 1)
    assert answered.get(timeout=10)[0].worker == "w1" and answered.empty()
    silent.close()
    worker.close()


def test_a_call_without_an_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(TimeoutError, match="in 1 s"):
        call(f"127.0.0.1:{mute.getsockname()[1]}", new_key(), "w0", 1, patience_s=1)


def test_a_hang_up_during_a_proof_is_a_connection_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing:
        threading.Thread(target=lambda: closing.accept()[0].shutdown(socket.SHUT_WR), daemon=True).start()
        with pytest.raises(ConnectionError, match="hung up while the key"):
            call(f"127.0.0.1:{closing.getsockname()[1]}", new_key(), "w0", 1)


def test_an_accepted_worker_waits_without_limit(control_listener: ControlListener, answered: Answered) -> None:
    worker = call(control_listener.address, control_listener.key, "w0", 1, patience_s=1)
    _, line = answered.get(timeout=10)
    threading.Timer(1.5, line.send, (b"late",)).start()
    assert worker.recv_bytes() == b"late"
    worker.close()


def ends() -> tuple[socket.socket, ControlConnection]:
    """Return a line and its other end, both proved."""
    key, (one, two) = new_key(), socket.socketpair()
    theirs, ours = begin(one, key, calling=True), begin(two, key, calling=False)
    proving = threading.Thread(target=prove, args=(theirs, key, 10.0))
    proving.start()
    prove(ours, key, 10.0)
    proving.join()
    theirs.settimeout(10.0)
    return theirs, ControlConnection(SecureChannel(ours), 1000)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_messages_are_whole_wherever_the_network_cuts_them(texts: list[bytes], cuts: list[int]) -> None:
    theirs, line = ends()
    found = []
    stream = b"".join(struct.pack("!i", len(text)) + text for text in texts)
    while stream:
        for cut in cuts:
            theirs.sendall(stream[:cut])
            stream = stream[cut:]
            found += line.receive()
    assert found == texts
    theirs.close()
    line.close()


def test_a_worker_waits_for_the_rest_of_a_message(control_listener: ControlListener, answered: Answered) -> None:
    worker = call(control_listener.address, control_listener.key, "w0", 1)
    _, line = answered.get(timeout=10)
    line._channel.write(memoryview(struct.pack("!i", 8) + b"half"))
    threading.Timer(0.5, line._channel.write, (memoryview(b"more"),)).start()
    assert not worker.poll(0.1)
    assert worker.poll(10.0)
    assert worker.recv_bytes() == b"halfmore"
    worker.close()


def test_half_a_message_blocks_nothing_and_is_never_delivered() -> None:
    theirs, line = ends()
    theirs.sendall(struct.pack("!i", 10) + b"half")
    assert line.receive() == [] and line.receive() == []
    theirs.close()
    with pytest.raises(EOFError):
        line.receive()
    line.close()


@pytest.mark.parametrize("length", [-1, 1001])
def test_an_invalid_length_breaks_the_line(length: int) -> None:
    theirs, line = ends()
    theirs.sendall(struct.pack("!i", length))
    with pytest.raises(OSError, match="a message of"):
        line.receive()
    theirs.close()
    line.close()


def test_a_blocked_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.runtime.fleet.control_connections._SEND_LIMIT_S", 0.05)
    theirs, line = ends()
    for _ in range(200):
        line.send(b"x" * 10_000)
    with pytest.raises((EOFError, OSError)):
        line.receive()
    theirs.close()
    line.close()
