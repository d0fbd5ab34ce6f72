"""The system calls and TLS records that a frame costs, on sockets that count them."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

import pytest

from planaria.runtime.transport.channel import LocalChannel, SecureChannel
from planaria.runtime.transport.wire import HEADER_BYTES

RECORD = 1 << 14


class Socket:
    """Accepts ``room`` bytes per call, plain or TLS, and records the bytes each call was offered and accepted."""

    def __init__(self, room: Iterable[int]) -> None:
        self._room = iter(room)
        self.calls: list[bytes] = []
        self.offered: list[bytes] = []

    def setblocking(self, whether: bool) -> None:
        assert not whether

    def fileno(self) -> int:
        return -1

    def sendmsg(self, views: Iterable[memoryview]) -> int:
        return self._take(b"".join(views), BlockingIOError())

    def send(self, view: memoryview) -> int:
        return self._take(bytes(view), ssl.SSLWantWriteError())

    def _take(self, offered: bytes, full: Exception) -> int:
        self.offered.append(offered)
        if not (room := next(self._room)):
            raise full
        self.calls.append(offered[:room])
        return len(self.calls[-1])


def sent(channel: Any, header: bytes, payload: bytes) -> list[int]:
    """Return the number of bytes each call accepted until a frame was sent."""
    first, second, taken = memoryview(header), memoryview(payload), []
    while first or second:
        taken.append(channel.write_some(first, second))
        first, second = first[taken[-1] :], second[max(0, taken[-1] - len(first)) :]
    return taken


HEADER = bytes(range(HEADER_BYTES))


@pytest.mark.parametrize("size", [0, 1, 4096, RECORD, 256 << 10, 1 << 20])
def test_header_and_payload_are_one_message(size: int) -> None:
    socket, payload = Socket([1 << 30] * 9), bytes(n % 251 for n in range(size))
    assert sent(LocalChannel(socket), HEADER, payload) == [HEADER_BYTES + size]
    assert socket.calls == [HEADER + payload]


@pytest.mark.parametrize(
    ("size", "calls"), [(0, 1), (1, 1), (4096, 1), (RECORD - HEADER_BYTES, 1), (RECORD, 2), (256 << 10, 3)]
)
def test_inside_tls_a_small_frame_is_one_record(size: int, calls: int) -> None:
    """A larger frame has the fewest records for its bytes: the first holds the header too."""
    socket, payload = Socket([1 << 30] * 9), bytes(n % 251 for n in range(size))
    assert sum(sent(SecureChannel(socket), HEADER, payload)) == HEADER_BYTES + size
    assert b"".join(socket.calls) == HEADER + payload and len(socket.calls) == calls
    assert sum(-(-len(call) // RECORD) for call in socket.calls) == -(-(HEADER_BYTES + size) // RECORD)


def test_inside_tls_refused_bytes_are_offered_again_unchanged() -> None:
    """OpenSSL requires it; nothing is lost or sent twice."""
    socket, payload = Socket([0, 0, 1 << 30, 0, 1 << 14, 0, 1 << 30, 1 << 30]), bytes(n % 251 for n in range(200_000))
    taken = sent(SecureChannel(socket), HEADER, payload)
    assert b"".join(socket.calls) == HEADER + payload and 0 in taken
    assert socket.offered[0] == socket.offered[1] == socket.offered[2]
    assert socket.offered[3] == socket.offered[4] and socket.offered[5] == socket.offered[6]
