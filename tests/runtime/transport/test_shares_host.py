"""Edges are plain text only between two processes of one host, whichever addresses the ends see."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from planaria.runtime.transport import secure
from planaria.runtime.transport.channel import Channel, LocalChannel, SecureChannel
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.secure import new_key
from support import other_host
from support.edge_ends import read
from support.other_host import MARKER, NOT_ALLOWED, pump

KEY = new_key()
SOON_S = 30.0


@pytest.fixture
def listening_port() -> Iterator[Port]:
    port = Port("127.0.0.1", KEY)
    yield port
    port.close()


def channel_types(listening_port: Port, at: str) -> list[type[Channel]]:
    """Return the channel types of an edge's listening and calling end; the calling end connects to ``at``."""
    calling = Port("127.0.0.1", KEY)
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[Channel | None] = pool.submit(listening_port.await_call, "edge", SOON_S, lambda: False)
        ends = calling.call(at, "edge", SOON_S, lambda: False), waiting.result(SOON_S)
    calling.close()
    assert None not in ends
    for end in ends:
        end.close()
    return [type(ends[1]), type(ends[0])]


def test_edges_within_one_host_are_plain(listening_port: Port) -> None:
    assert channel_types(listening_port, listening_port.address) == [LocalChannel, LocalChannel]


def test_a_listener_of_another_user_is_not_the_other_end(listening_port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure.os, "geteuid", lambda: os.getuid() + 1)
    assert channel_types(listening_port, listening_port.address) == [SecureChannel, SecureChannel]


@pytest.mark.parametrize("name", [lambda: bytes(200), lambda: b"\0" + os.urandom(16)], ids=["bind", "connect"])
def test_an_error_in_the_proof_keeps_the_edge_inside_tls(
    listening_port: Port, monkeypatch: pytest.MonkeyPatch, name: Callable[[], bytes]
) -> None:
    monkeypatch.setattr(secure, "_meeting_name", lambda *_: name())
    assert channel_types(listening_port, listening_port.address) == [SecureChannel, SecureChannel]


def test_a_forwarder_on_the_way_keeps_the_edge_inside_tls(listening_port: Port) -> None:
    """Even on one host: the forwarder may send the data elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = listening_port.address.split(":")

        def forward() -> None:
            connection, _ = server.accept()
            way = socket.create_connection((host, int(port)))
            threading.Thread(target=pump, args=(way, connection), daemon=True).start()
            pump(connection, way)

        threading.Thread(target=forward, daemon=True).start()
        assert channel_types(listening_port, f"127.0.0.1:{server.getsockname()[1]}") == [SecureChannel, SecureChannel]


@pytest.mark.slow
def test_two_hosts_that_see_equal_addresses_send_nothing_in_clear(listening_port: Port, tmp_path: Path) -> None:
    """Two network namespaces, a forwarder on the loopback of each, and both ends see the same two addresses."""
    host, port = listening_port.address.split(":")
    seen = bytearray()

    def bridge(server: socket.socket) -> None:
        connection, _ = server.accept()
        source = int(b"".join(iter(lambda: connection.recv(1), b"\n")))
        way = socket.socket()
        way.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        way.bind((host, source))
        way.connect((host, int(port)))
        threading.Thread(target=pump, args=(way, connection, seen), daemon=True).start()
        pump(connection, way, seen)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "bridge"))
        server.listen()
        threading.Thread(target=bridge, args=(server,), daemon=True).start()
        command = [sys.executable, other_host.__file__, port, str(tmp_path / "bridge")]
        with subprocess.Popen([*command, KEY.hex()], stdin=-1, stdout=-1, text=True) as other:
            if (output := other.stdout.readline().strip()) != "here":
                assert other.wait(SOON_S) == NOT_ALLOWED
                pytest.skip(output)
            channel = listening_port.await_call("edge", SOON_S, lambda: False)
            assert channel is not None
            assert read(channel, len(MARKER)) == MARKER
            other.stdin.close()
            kind = other.stdout.readline().strip()
            assert other.wait(SOON_S) == 0
    assert (kind, type(channel)) == ("SecureChannel", SecureChannel)
    assert len(seen) > len(MARKER) and b"SECRET" not in seen
