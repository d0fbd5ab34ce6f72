"""The listener for the edges of one process, and its connections to those of others.

Each process listens at an address, which the controller distributes. One end of an edge connects and names the edge;
the other end waits for it.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

from planaria.common.address import REACHABLE, RELAY, Reach, dial_addresses, listening
from planaria.runtime.transport.channel import Channel, channel
from planaria.runtime.transport.listener import GREETING_S, connect, has_disconnected, listen
from planaria.runtime.transport.relay import READY, End, end_greeting
from planaria.runtime.transport.ring import Rings
from planaria.runtime.transport.secure import StrangerError, prepare

log = logging.getLogger(__name__)
_MAX_WAITING = 1024
"""early calls that are kept; others are rejected, and call again"""
_ABANDON_POLL_S = 0.2
"""seconds between a waiting caller's checks whether its edge was abandoned"""
_REPORT_S = 1.0
"""seconds after which an edge that fails to open is reported"""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
"""seconds between two calls without an answer"""
_UNANSWERED_S = 60.0
"""seconds for which the relay precedes an address that did not answer"""
_TURN_S = 3.0
"""seconds to try one route before the next, or to wait for a call before using the relay"""


class PeerUnreachable(Exception):
    """The other end of an edge did not connect, or is unreachable."""


class RelayUnanswered(PeerUnreachable):
    """The relay that is the only route to the other end does not answer."""


class Port:
    """One process's listener for edges. Methods are thread-safe."""

    def __init__(self, host: str, key: bytes, reach: Reach = REACHABLE) -> None:
        """Listen at ``host``, an address of this machine, for ends that prove ``key``.

        :raises UserError: if it cannot listen there, or at none of its ports.
        """
        self._key, self._reach = key, reach
        self.rings = Rings()
        """rings shared with other processes of this machine"""
        self._changed = threading.Condition()
        self._callers: dict[str, ssl.SSLSocket] = {}
        self._shut_until = 0.0
        self._unanswered: dict[str, float] = {}
        """HOST:PORT → time of its last failure; the relay is tried first for a while"""
        self._failing: dict[str, tuple[float, str]] = {}
        """opening edge → start of its failures, and the latest error"""
        prepare(key)
        self._listener = listen(host, key, reach.ports, self._process_call)
        self.address = str(listening(self._listener.host, self._listener.port, reach))

    def use_relay(self, address: str) -> None:
        """Relay further edges through HOST:PORT, if this machine uses a relay."""
        if self._reach.relay:
            self._reach = replace(self._reach, relay=address)

    def close(self) -> None:
        self._listener.close()
        with self._changed:
            for tls in self._callers.values():
                tls.close()
            self._callers.clear()

    @property
    def trouble(self) -> str:
        """The error of the edge that has failed to open for the longest time; empty if there is none."""
        late = time.monotonic() - _REPORT_S
        with self._changed:
            return next((why for since, why in sorted(self._failing.values()) if since < late), "")

    def _record_failure(self, name: str, why: str) -> None:
        log.debug("edge %s: no connection yet: %s", name, why)
        with self._changed:
            since, _ = self._failing.get(name, (time.monotonic(), ""))
            self._failing[name] = since, why

    def reach(self, at: str, over: str, name: str, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """Return the connection of the edge ``name``, or None once it is ``given_up``.

        Calls ``at``, or waits for a call if that is empty; with ``over``, HOST:PORT of a relay, only uses that.
        :raises PeerUnreachable: if the other end does not connect within ``seconds``.
        """
        start = time.monotonic()
        try:
            if over:
                connection = self.connect_over_relay(over, name, "calls" if at else "waits", seconds, given_up)
            else:
                connection = self.call(at, name, seconds, given_up) if at else self.await_call(name, seconds, given_up)
        except PeerUnreachable as error:
            log.debug("edge %s could not be opened: %s", name, error)
            raise
        finally:
            with self._changed:
                self._failing.pop(name, None)
        log.debug("edge %s %s after %.3f s", name, "opened" if connection else "abandoned", time.monotonic() - start)
        return connection

    def await_call(self, name: str, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """Wait for the call of the edge ``name``; return None once it is ``given_up`` (see :meth:`wake_waiters`).

        :raises PeerUnreachable: if there is no call within ``seconds``.
        """
        until = time.monotonic() + seconds
        alone_until = time.monotonic() + (_TURN_S if self._reach.reachable else 0.0)
        while not given_up():
            if (
                connection := self._answer(name, min(until, alone_until) if self._reach.relay else until, given_up)
            ) or (given_up()):
                return connection
            if time.monotonic() >= until:
                raise PeerUnreachable(f"the other end did not connect within {seconds:g} s")
            try:
                turn = min(until, time.monotonic() + _TURN_S)
                if connection := self._connect_by_relay(
                    name, "waits", turn, lambda: given_up() or name in self._callers
                ):
                    return connection
            except (OSError, StrangerError):
                alone_until = time.monotonic() + _LONGEST_WAIT_S
        return None

    def _answer(self, name: str, until: float, given_up: Callable[[], bool]) -> Channel | None:
        """Return the connection of a caller for the edge, or None if there is none by ``until``."""
        while True:
            with self._changed:
                while name not in self._callers or time.monotonic() < self._shut_until:
                    if given_up():
                        return None
                    patience_s = until - time.monotonic()
                    if self._shut_until:
                        patience_s = min(patience_s, _LONGEST_WAIT_S)
                    if not self._changed.wait(max(0.0, patience_s)) and time.monotonic() >= until:
                        return None
                tls = self._callers.pop(name)
            try:
                tls.settimeout(GREETING_S)
                tls.sendall(READY)
                return channel(tls, self.rings)
            except OSError:
                tls.close()  # it disconnected, and may call again

    def call(self, address: str, name: str, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """Call for the edge ``name`` at a process's ``address`` until it answers; return None once it is ``given_up``.

        Alternates between a direct connection and the relay.
        :raises PeerUnreachable: if it does not answer within ``seconds``, or is a stranger.
        """
        until, pause = time.monotonic() + seconds, _FIRST_WAIT_S
        routes = self._by_success(dial_addresses(address, self._reach))
        if not routes:
            raise PeerUnreachable(f"{address} cannot be reached from here, and there is no relay")
        for route in cycle(routes):
            if given_up():
                return None
            turn = until if len(routes) == 1 else min(until, time.monotonic() + _TURN_S)
            try:
                if route == RELAY:
                    return self._connect_by_relay(name, "calls", turn, given_up)
                return self._try(route, name.encode(), turn, until, given_up)
            except StrangerError as error:
                raise PeerUnreachable(f"{route}: {error}") from None
            except OSError as error:
                if route != RELAY:
                    self._unanswered[route] = time.monotonic()
                self._record_failure(name, f"{route}: {error.strerror or error}")
                if time.monotonic() + pause > until:
                    raise PeerUnreachable(
                        f"{address} did not answer within {seconds:g} s ({error.strerror or error})"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)
        return None

    def _by_success(self, routes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the routes, with those that failed recently last."""
        late = time.monotonic() - _UNANSWERED_S
        return tuple(sorted(routes, key=lambda route: self._unanswered.get(route, late) > late))

    def connect_over_relay(
        self, relay: str, name: str, end: End, seconds: float, given_up: Callable[[], bool]
    ) -> Channel | None:
        """Connect the edge ``name`` only through this ``relay`` (HOST:PORT); return None once it is ``given_up``.

        :raises RelayUnanswered: if the relay does not answer in time.
        :raises PeerUnreachable: if the other end does not connect within ``seconds``.
        """
        began, pause = time.monotonic(), _FIRST_WAIT_S
        until = began + seconds
        while not given_up():
            called = time.monotonic()
            try:
                return self._try(relay, end_greeting(name, end), min(until, called + _TURN_S), until, given_up)
            except StrangerError as error:
                raise PeerUnreachable(f"the relay {relay}: {error}") from None
            except OSError as error:
                self._record_failure(name, f"the relay {relay}: {error.strerror or error}")
                # A relay that is silent for this long is dead; the controller has others.
                if time.monotonic() + pause > min(until, max(began, self._shut_until) + _TURN_S):
                    raise RelayUnanswered(f"the relay {relay} did not answer ({error.strerror or error})") from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)
        return None

    def _connect_by_relay(self, name: str, end: End, until: float, given_up: Callable[[], bool]) -> Channel | None:
        """Return a connection through the relay, if both ends connect in time, or None once it is given up.

        :raises OSError: if the relay is unreachable, or the other end does not connect.
        """
        return self._try(self._reach.relay, end_greeting(name, end), until, until, given_up)

    def partition(self, seconds: float) -> None:
        """Open no edge for ``seconds``, whichever end calls."""
        self._shut_until = time.monotonic() + seconds

    def wake_waiters(self) -> None:
        """Notify threads that wait for the other end of an abandoned edge."""
        with self._changed:
            self._changed.notify_all()

    def _try(
        self, at: str, greeting: bytes, reached_by: float, until: float, given_up: Callable[[], bool]
    ) -> Channel | None:
        """Call once, connecting by ``reached_by``, and wait for the other end.

        :raises OSError: also during :meth:`partition`.
        """
        if time.monotonic() < self._shut_until:
            raise ConnectionError("cut off")
        tls = connect(at, self._key, greeting, max(0.001, reached_by - time.monotonic()))
        try:
            while not given_up():
                tls.settimeout(max(0.001, min(_ABANDON_POLL_S, until - time.monotonic())))
                try:
                    answer = tls.recv(1)
                except TimeoutError:
                    if time.monotonic() < until:
                        continue
                    raise
                if answer != READY:
                    raise ConnectionError(f"the relay or peer refused the connection (answer {answer!r})")
                tls.settimeout(GREETING_S)
                return channel(tls, self.rings)
        except BaseException:
            tls.close()
            raise
        tls.close()
        return None

    def _process_call(self, greeting: bytes, tls: ssl.SSLSocket) -> None:
        """Process a call for an edge that may not be known here yet."""
        name = greeting.decode(errors="replace")
        tls.setblocking(False)
        with self._changed:
            self._drop_dead()
            before = self._callers.pop(name, None)
            if room := len(self._callers) < _MAX_WAITING:
                self._callers[name] = tls
            self._changed.notify_all()
        if before is not None:  # superseded by the later call
            before.close()
        if not room:
            tls.close()

    def _drop_dead(self) -> None:
        """Remove callers that have disconnected."""
        for name, tls in list(self._callers.items()):
            if has_disconnected(tls):
                self._callers.pop(name).close()
