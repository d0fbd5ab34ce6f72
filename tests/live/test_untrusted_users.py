"""A run on a machine with untrusted users: their connections to every port have no effect."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.runtime.fleet.joining import read_run_address
from planaria.runtime.transport.listener import MAX_UNPROVEN, EdgeListener, connect
from planaria.runtime.transport.secure import new_key
from support.live import keyless_client
from support.live.harness import checked, ending, facts, live, tiny

IDLE = 3 * MAX_UNPROVEN
Called = SimpleQueue[tuple[bytes, ssl.SSLSocket]]


@pytest.fixture
def called() -> Called:
    return SimpleQueue()


@pytest.fixture
def listener(called: Called) -> Iterator[EdgeListener]:
    listener = EdgeListener("127.0.0.1", 0, new_key(), lambda greeting, tls: called.put((greeting, tls)))
    yield listener
    listener.close()


def calls(listener: EdgeListener, called: Called, greeting: bytes) -> None:
    """Call with the key; the listener accepts."""
    with connect(listener.address, listener._key, greeting, 10.0):
        received, tls = called.get(timeout=10)
        assert received == greeting
        tls.close()


def test_idle_strangers_make_room_for_callers_with_the_key(listener: EdgeListener, called: Called) -> None:
    with ExitStack() as idle:
        for _ in range(IDLE):
            idle.enter_context(socket.create_connection((listener.host, listener.port)))
        calls(listener, called, b"one of us")
        assert len(listener._unproven) <= MAX_UNPROVEN


@pytest.mark.parametrize("attempt", keyless_client.CONNECTIONS, ids=lambda attempt: attempt.__name__)
def test_no_caller_without_the_key_is_accepted(
    listener: EdgeListener, called: Called, attempt: keyless_client.Connection
) -> None:
    assert keyless_client.bytes_received(attempt, listener.address) == 0
    calls(listener, called, b"one of us")
    assert called.empty()


def test_a_greeting_that_is_too_long_is_not_read(listener: EdgeListener, called: Called) -> None:
    with connect(listener.address, listener._key, b"x" * 5000, 10.0) as tls, contextlib.suppress(OSError):
        assert tls.recv(1) == b""
    assert called.empty()


def test_the_listener_survives_a_lack_of_descriptors(listener: EdgeListener, called: Called) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        highest = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(socket.create_connection((listener.host, listener.port)))
        time.sleep(0.3)  # it is turned away again and again meanwhile
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for end in taken:
            end.close()
    calls(listener, called, b"one of us")


@pytest.mark.slow
def test_a_run_recovers_beside_strangers_at_every_port(tmp_path: Path) -> None:
    with live(tiny(tmp_path, stages=3, steps=200)) as run, ExitStack() as idle:
        record = run.wait_until(lambda record: len(facts(record, d.Commit)) > 2)
        joined = facts(record, e.WorkerJoined)
        addresses = [read_run_address(run.folder).at, *(worker.at for worker in joined)]
        for address in addresses:
            host, _, port = address.rpartition(":")
            for _ in range(IDLE):
                idle.enter_context(socket.create_connection((host, int(port))))
            for attempt in keyless_client.CONNECTIONS:
                assert keyless_client.bytes_received(attempt, address) == 0
        (form,) = facts(record, d.Form)
        holder = next(member.worker for member in form.members if member.node == 2)
        os.kill(next(worker.pid for worker in joined if worker.worker == holder), signal.SIGKILL)
        assert run.end() == (0, "")
    record = checked(run.folder)
    assert ending(record).outcome == "finished"
    assert [lost.cause for lost in facts(record, e.WorkerLost)] == ["connection"], "the killed one alone"
    assert not facts(record, e.EdgeBroken) or all(form.outcome == "recovered" for form in facts(record, d.Form)[1:])
