"""Flows over relays with limited rates, by real TCP connections of this machine: how long until the last is through."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

PIECE = 16 << 10
"""bytes that a relay carries for one connection before the next has its turn"""
WINDOW = 64 << 10
"""bytes that may wait in a socket: little, so that what is sent has gone over the relay"""
LONGEST_S = 60.0


class LimitedRelay:
    """Carries connections to ``target``, all together at ``rate`` bytes per second, taking turns."""

    def __init__(self, target: tuple[str, int], rate: float) -> None:
        self._target, self._rate = target, rate
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> LimitedRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(LONGEST_S)
        self._server.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            free = time.monotonic()
            while not self._over.is_set():
                for key, _ in selector.select(0.05):
                    if key.fileobj is self._server:
                        source, _ = self._server.accept()
                        _narrow(source)
                        sink = socket.create_connection(self._target)
                        _narrow(sink)
                        selector.register(source, selectors.EVENT_READ, sink)
                        continue
                    piece = key.fileobj.recv(PIECE)  # type: ignore[union-attr]
                    if not piece:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                        key.data.close()
                        continue
                    free = max(free, time.monotonic()) + len(piece) / self._rate
                    key.data.sendall(piece)
                    time.sleep(max(0.0, free - time.monotonic()))


def _narrow(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)


def completion(chosen: Sequence[int], relays: int, size: int, rate: float) -> float:
    """Seconds until the last of equal flows of ``size`` bytes has arrived; flow n goes over relay ``chosen[n]``."""
    with ExitStack() as open_:
        sink = open_.enter_context(socket.create_server(("127.0.0.1", 0)))
        sink.settimeout(LONGEST_S)
        there = [open_.enter_context(LimitedRelay(sink.getsockname(), rate)) for _ in range(relays)]
        ends = [open_.enter_context(socket.create_connection(there[relay].address)) for relay in chosen]
        for end in ends:
            _narrow(end)
        received = threading.Thread(target=_receive, args=(sink, size, len(ends)), daemon=True)
        began = time.monotonic()
        received.start()
        senders = [threading.Thread(target=_send, args=(end, size), daemon=True) for end in ends]
        for sender in senders:
            sender.start()
        received.join(LONGEST_S)
        if received.is_alive():
            raise TimeoutError(f"not through within {LONGEST_S:g} s")
        return time.monotonic() - began


def _send(end: socket.socket, size: int) -> None:
    end.sendall(bytes(size))
    end.shutdown(socket.SHUT_WR)


def _receive(sink: socket.socket, size: int, count: int) -> None:
    """Take in ``count`` connections with ``size`` bytes each, or raise."""
    left = 0
    with selectors.DefaultSelector() as selector:
        for _ in range(count):
            end, _ = sink.accept()
            selector.register(end, selectors.EVENT_READ)
            left += size
        while left:
            for key, _ in selector.select(LONGEST_S):
                got = len(key.fileobj.recv(1 << 18))  # type: ignore[union-attr]
                left -= got
                if not got:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
