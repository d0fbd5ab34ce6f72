"""A relay for edges whose ends cannot reach each other: both connect to it, and it forwards their bytes.

Both ends prove the run's key to the relay, which sees what it forwards; it is a member of the run. Relayed bytes travel
twice, through the controller's links; see ``docs/machines.md`` for the cost.
"""

from __future__ import annotations

import logging
import select
import ssl
import threading
import time
from typing import Literal

from planaria.runtime.transport.channel import Channel, ChannelClosed, channel, wait_for
from planaria.runtime.transport.listener import (
    CALLED_FOR,
    GREETING_S,
    EdgeListener,
    greeting,
    has_disconnected,
    parse_greeting,
)
from planaria.runtime.transport.secure import prepare

log = logging.getLogger(__name__)
READY = b"\x01"
"""sent to an end when the other has connected"""
_MAX_WAITING = 1024
_WAITS_S = 60.0
"""seconds after which a waiting end counts as gone"""
_AT_ONCE = 1 << 18
"""bytes forwarded per read"""
_LOOK_S = 1.0
"""seconds between attempts, whatever the system reports"""

End = Literal["waits", "calls"]


def end_greeting(edge: str, end: End) -> bytes:
    return greeting(f"{end} {edge}", CALLED_FOR)


class Relay:
    """Pairs ends by the names of their edges. Methods are thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], tuple[ssl.SSLSocket, float]] = {}
        self._guarded = threading.Lock()

    def pair(self, wanted: str, tls: ssl.SSLSocket) -> None:
        """Process a connected end with its :func:`end_greeting`; returns immediately."""
        end, _, edge = wanted.partition(" ")
        if end not in ("waits", "calls"):
            tls.close()
            return
        tls.setblocking(False)
        with self._guarded:
            self._drop_dead()
            before = self._waiting.pop((end, edge), None)
            partner = self._waiting.pop(("calls" if end == "waits" else "waits", edge), None)
            room = len(self._waiting) < _MAX_WAITING
            if partner is None and room:
                self._waiting[end, edge] = tls, time.monotonic()
        if before is not None:  # superseded by the later call
            before[0].close()
        if partner is not None:
            if _connect(partner[0], tls):
                log.info("connected both ends of edge %s", edge)
            else:
                self.pair(wanted, tls)
        elif not room:
            log.warning("rejected an end of edge %s: %d ends wait already", edge, _MAX_WAITING)
            tls.close()
        else:
            log.debug("an end of edge %s waits for the other", edge)

    def close(self) -> None:
        """Close waiting ends; connected edges stay until an end closes them."""
        with self._guarded:
            for tls, _ in self._waiting.values():
                tls.close()
            self._waiting.clear()

    def _drop_dead(self) -> None:
        for key, (tls, since) in list(self._waiting.items()):
            if has_disconnected(tls) or time.monotonic() - since > _WAITS_S:
                self._waiting.pop(key)[0].close()


def relay_at(host: str, port: int, key: bytes) -> tuple[EdgeListener, Relay]:
    """Start a relay at ``host``:``port``, only for ends of edges that prove ``key``.

    :raises UserError: if it cannot listen there.
    """
    relay = Relay()

    def greet(raw: bytes, tls: ssl.SSLSocket) -> None:
        try:
            wanted, called_for, _ = parse_greeting(raw)
        except ValueError:
            called_for = None
        if called_for != CALLED_FOR:
            tls.close()
            return
        relay.pair(wanted, tls)

    prepare(key)
    return EdgeListener(host, port, key, greet), relay


def _connect(first: ssl.SSLSocket, newcomer: ssl.SSLSocket) -> bool:
    """Connect two ends and forward their bytes; return whether the first was still connected.

    The newcomer gets READY only after the first has answered, since that may be about to time out.
    """
    waiting = _ready(first)
    if waiting is None:
        return False
    new = _ready(newcomer)
    if new is None:
        waiting.close()
        return True
    for source, sink in ((waiting, new), (new, waiting)):
        threading.Thread(target=_carry, args=(source, sink), name="relay", daemon=True).start()
    return True


def _ready(end: ssl.SSLSocket) -> Channel | None:
    """Send READY to an end and return its channel; close it and return None if it has disconnected."""
    try:
        end.settimeout(GREETING_S)
        end.sendall(READY)
        return channel(end)
    except OSError:
        end.close()
        return None


def _carry(source: Channel, sink: Channel) -> None:
    """Forward one direction until an end closes; then close both."""
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
    except (ChannelClosed, OSError, ValueError):
        source.shut_down()
        sink.shut_down()
    finally:
        source.close()
