"""Where two ends of an edge meet that cannot reach each other: both call the controller, which carries their bytes.

Both ends prove the run's key to the relay, as to anybody else. What it carries it sees: it is a member of the run.
Bytes that are relayed travel twice, and through the controller's links; ``docs/machines.md`` has what that costs.
"""

from __future__ import annotations

import select
import ssl
import threading
import time
from typing import Literal

from planaria.runtime.transport.channel import Channel, Closed, channel, wait_for
from planaria.runtime.transport.listener import CALLED_FOR, GREETING_S, Listener, greeted, greeting, hung_up
from planaria.runtime.transport.secure import prepare

READY = b"\x01"
"""said to an end when the other is there"""
_MOST_WAITING = 1024
_WAITS_S = 60.0
"""an end that has waited for so long has given up, or its machine has vanished"""
_AT_ONCE = 1 << 18
"""bytes that are carried in one go"""
_LOOK_S = 1.0
"""seconds after which an end is tried again, whatever the system reports"""

End = Literal["waits", "calls"]


def end_greeting(edge: str, end: End) -> bytes:
    """Return an end's greeting to the relay."""
    return greeting(f"{end} {edge}", CALLED_FOR)


class Relay:
    """Pairs ends by the names of their edges. Its methods may be called by several threads."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], tuple[ssl.SSLSocket, float]] = {}
        self._guarded = threading.Lock()

    def meet(self, wanted: str, tls: ssl.SSLSocket) -> None:
        """An end has called, with what :func:`end_greeting` returns; returns at once."""
        end, _, edge = wanted.partition(" ")
        if end not in ("waits", "calls"):
            tls.close()
            return
        tls.setblocking(False)
        with self._guarded:
            self._drop_dead()
            before = self._waiting.pop((end, edge), None)
            other = self._waiting.pop(("calls" if end == "waits" else "waits", edge), None)
            room = len(self._waiting) < _MOST_WAITING
            if other is None and room:
                self._waiting[end, edge] = tls, time.monotonic()
        if before is not None:  # the later call is the one that counts
            before[0].close()
        if other is not None:
            if not _connect(other[0], tls):
                self.meet(wanted, tls)
        elif not room:
            tls.close()

    def close(self) -> None:
        """Turn away who still waits; edges that are connected stay until an end closes them."""
        with self._guarded:
            for tls, _ in self._waiting.values():
                tls.close()
            self._waiting.clear()

    def _drop_dead(self) -> None:
        for key, (tls, since) in list(self._waiting.items()):
            if hung_up(tls) or time.monotonic() - since > _WAITS_S:
                self._waiting.pop(key)[0].close()


def relay_at(host: str, port: int, key: bytes) -> tuple[Listener, Relay]:
    """A relay that listens at ``host``:``port`` for nothing but ends of edges that prove ``key``.

    :raises UserError: when it cannot listen there.
    """
    relay = Relay()

    def heard(raw: bytes, tls: ssl.SSLSocket) -> None:
        try:
            wanted, called_for, _ = greeted(raw)
        except ValueError:
            called_for = None
        if called_for != CALLED_FOR:
            tls.close()
            return
        relay.meet(wanted, tls)

    prepare(key)
    return Listener(host, port, key, heard), relay


def _connect(first: ssl.SSLSocket, newcomer: ssl.SSLSocket) -> bool:
    """Connect two ends, and carry their bytes from then on; return whether the first was still there.

    The end that has waited may be about to give up, so the newcomer gets READY only after the first has answered.
    """
    one = _ready(first)
    if one is None:
        return False
    other = _ready(newcomer)
    if other is None:
        one.close()
        return True
    for source, sink in ((one, other), (other, one)):
        threading.Thread(target=_carry, args=(source, sink), name="relay", daemon=True).start()
    return True


def _ready(end: ssl.SSLSocket) -> Channel | None:
    """Send READY to an end and return its channel; close it and return None if it is gone."""
    try:
        end.settimeout(GREETING_S)
        end.sendall(READY)
        return channel(end)
    except OSError:
        end.close()
        return None


def _carry(source: Channel, sink: Channel) -> None:
    """One direction, until either end closes; then both are closed."""
    buffer = memoryview(bytearray(_AT_ONCE))
    try:
        while True:
            got = source.read_some(buffer)
            if got is None:
                wait_for(source, select.POLLIN, _LOOK_S)
                continue
            rest = buffer[:got]
            while rest:
                sent = sink.write_some(rest, rest[:0])
                rest = rest[sent:]
                if not sent:
                    wait_for(sink, select.POLLOUT, _LOOK_S)
    except (Closed, OSError, ValueError):
        source.hang_up()
        sink.hang_up()
    finally:
        source.close()
