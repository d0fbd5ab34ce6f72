"""Where the edges of one process come in, and where it finds those of others.

Each process of a run listens at an address of its own, which the controller passes on. Of the two ends of an edge one
waits and the other calls, naming the edge; who comes first waits for the other.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable

from planaria.transport.channel import Channel, channel
from planaria.transport.listener import GREETING_S, Listener, connect
from planaria.transport.secure import StrangerError, prepare

_READY = b"\x01"
_MOST_WAITING = 1024
"""edges for which somebody has called too early; more are turned away, to call again"""
_GLANCE_S = 0.2
"""between two looks of a caller that waits whether its edge was given up"""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
"""between two calls where nobody listens"""


class Unmet(Exception):
    """The other end of an edge did not come, or cannot be reached."""


class Port:
    """One process's listener for edges. Its methods may be called by several threads."""

    def __init__(self, host: str, key: bytes) -> None:
        """Listen at ``host``, an address of this machine; only ends that prove ``key`` are heard."""
        self._key = key
        self._changed = threading.Condition()
        self._callers: dict[str, tuple[ssl.SSLSocket, float]] = {}
        self._shut_until = 0.0
        prepare(key)
        self._listener = Listener(host, 0, key, self._called)
        self.address = self._listener.address

    def close(self) -> None:
        self._listener.close()
        with self._changed:
            for tls, _ in self._callers.values():
                tls.close()
            self._callers.clear()

    def meet(self, name: str, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """Wait for the call for the edge ``name``; None once it is ``given_up`` (then see :meth:`look_up`).

        :raises Unmet: when nobody has called in ``seconds``.
        """
        until = time.monotonic() + seconds
        while True:
            with self._changed:
                while name not in self._callers or time.monotonic() < self._shut_until:
                    if given_up():
                        return None
                    patience_s = until - time.monotonic()
                    if self._shut_until:
                        patience_s = min(patience_s, _LONGEST_WAIT_S)
                    if not self._changed.wait(patience_s) and time.monotonic() >= until:
                        raise Unmet(f"the other end did not come within {seconds:g} s")
                tls, _ = self._callers.pop(name)
            try:
                tls.settimeout(GREETING_S)
                tls.sendall(_READY)
                return channel(tls)
            except OSError:
                tls.close()  # it has gone meanwhile, and may call again

    def call(self, address: str, name: str, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """Call for the edge ``name`` at another process's ``address`` until it answers; None once it is ``given_up``.

        :raises Unmet: when it has not answered in ``seconds``, or is a stranger.
        """
        until, pause = time.monotonic() + seconds, _FIRST_WAIT_S
        while not given_up():
            try:
                if time.monotonic() < self._shut_until:
                    raise ConnectionError("cut off")
                return self._try(address, name, until, given_up)
            except StrangerError as error:
                raise Unmet(f"{address}: {error}") from None
            except OSError as error:
                if time.monotonic() + pause > until:
                    raise Unmet(f"{address} did not answer within {seconds:g} s ({error.strerror or error})") from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)
        return None

    def shut(self, seconds: float) -> None:
        """Cut this process off: for so long no edge of it opens, whichever end calls."""
        self._shut_until = time.monotonic() + seconds

    def look_up(self) -> None:
        """An edge was given up: whoever waits for its other end looks again."""
        with self._changed:
            self._changed.notify_all()

    def _try(self, address: str, name: str, until: float, given_up: Callable[[], bool]) -> Channel | None:
        """One call, and the wait for the other end to come to the edge."""
        tls = connect(address, self._key, name.encode(), max(0.001, until - time.monotonic()))
        try:
            while not given_up():
                tls.settimeout(max(0.001, min(_GLANCE_S, until - time.monotonic())))
                try:
                    answer = tls.recv(1)
                except TimeoutError:
                    if time.monotonic() < until:
                        continue
                    raise
                if answer != _READY:
                    raise ConnectionError("turned away")
                tls.settimeout(GREETING_S)
                return channel(tls)
        except BaseException:
            tls.close()
            raise
        tls.close()
        return None

    def _called(self, greeting: bytes, tls: ssl.SSLSocket) -> None:
        """Somebody of this run calls for an edge that this end may not know of yet."""
        name = greeting.decode(errors="replace")
        tls.setblocking(False)
        with self._changed:
            self._drop_dead()
            before = self._callers.pop(name, None)
            if len(self._callers) < _MOST_WAITING:
                self._callers[name] = tls, time.monotonic()
                tls = None if before is None else before[0]  # type: ignore[assignment]  # the later call is the one that counts
            self._changed.notify_all()
        if tls is not None:
            tls.close()

    def _drop_dead(self) -> None:
        """Callers that have given up: nothing but a hang-up makes their connection readable."""
        for name, (tls, _) in list(self._callers.items()):
            if _hung_up(tls):
                self._callers.pop(name)[0].close()


def _hung_up(tls: ssl.SSLSocket) -> bool:
    try:
        return not socket.socket.recv(tls, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
