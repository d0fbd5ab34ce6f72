"""Where the edges of one process come in, and where it finds those of others.

Each process of a run listens at an address of its own, which the controller passes on. Of the two ends of an edge one
waits and the other calls, naming the edge; who comes first waits for the other.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from itertools import cycle

from planaria.runtime.transport.address import REACHABLE, RELAY, Reach, listening, ways
from planaria.runtime.transport.channel import Channel, channel
from planaria.runtime.transport.listener import GREETING_S, connect, hung_up, listen
from planaria.runtime.transport.relay import READY, End, end_greeting
from planaria.runtime.transport.ring import Rings
from planaria.runtime.transport.secure import StrangerError, prepare

_MOST_WAITING = 1024
"""edges for which somebody has called too early; more are turned away, to call again"""
_GLANCE_S = 0.2
"""between two looks of a caller that waits whether its edge was given up"""
_TOLD_S = 1.0
"""seconds after which an edge that fails to open is reported"""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
"""between two calls where nobody listens"""
_IN_VAIN_S = 60.0
"""for so long an address that did not answer is tried after the relay"""
_TURN_S = 3.0
"""how long one way to the other end is tried before the next; who waits to be called goes to the relay after as long"""


class Unmet(Exception):
    """The other end of an edge did not come, or cannot be reached."""


class RelaySilent(Unmet):
    """A relay that is the only way to the other end does not answer."""


class Port:
    """One process's listener for edges. Its methods may be called by several threads."""

    def __init__(self, host: str, key: bytes, reach: Reach = REACHABLE) -> None:
        """Listen at ``host``, an address of this machine; only ends that prove ``key`` are heard.

        :raises UserError: when it cannot listen there, or at none of the ports it may.
        """
        self._key, self._reach = key, reach
        self.rings = Rings()
        """what this process shares with others of its machine"""
        self._changed = threading.Condition()
        self._callers: dict[str, ssl.SSLSocket] = {}
        self._shut_until = 0.0
        self._in_vain: dict[str, float] = {}
        """HOST:PORT that did not answer, and when: the relay is tried before it for a while"""
        self._failing: dict[str, tuple[float, str]] = {}
        """edge that is being opened → since when its calls fail, and the latest error"""
        prepare(key)
        self._listener = listen(host, key, reach.ports, self._called)
        self.address = str(listening(self._listener.host, self._listener.port, reach))

    def close(self) -> None:
        self._listener.close()
        with self._changed:
            for tls in self._callers.values():
                tls.close()
            self._callers.clear()

    @property
    def trouble(self) -> str:
        """The error of the edge that has failed to open for the longest time; empty if all open at once."""
        late = time.monotonic() - _TOLD_S
        with self._changed:
            return next((why for since, why in sorted(self._failing.values()) if since < late), "")

    def _failed(self, name: str, why: str) -> None:
        with self._changed:
            since, _ = self._failing.get(name, (time.monotonic(), ""))
            self._failing[name] = since, why

    def reach(self, at: str, over: str, name: str, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """The connection of the edge ``name``: by calling ``at``, or, if that is empty, by waiting to be called; with
        ``over``, HOST:PORT of a relay, there and nowhere else. None once it is ``given_up``.

        :raises Unmet: when the other end has not been met in ``seconds``.
        """
        try:
            if over:
                return self.meet_at(over, name, "calls" if at else "waits", seconds, given_up)
            return self.call(at, name, seconds, given_up) if at else self.meet(name, seconds, given_up)
        finally:
            with self._changed:
                self._failing.pop(name, None)

    def meet(self, name: str, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """Wait for the call for the edge ``name``; None once it is ``given_up`` (then see :meth:`look_up`).

        :raises Unmet: when nobody has called in ``seconds``.
        """
        until = time.monotonic() + seconds
        alone_until = time.monotonic() + (_TURN_S if self._reach.reachable else 0.0)
        while not given_up():
            if (found := self._answer(name, min(until, alone_until) if self._reach.relay else until, given_up)) or (
                given_up()
            ):
                return found
            if time.monotonic() >= until:
                raise Unmet(f"the other end did not come within {seconds:g} s")
            try:
                turn = min(until, time.monotonic() + _TURN_S)
                if found := self._relayed(name, "waits", turn, lambda: given_up() or name in self._callers):
                    return found
            except (OSError, StrangerError):
                alone_until = time.monotonic() + _LONGEST_WAIT_S
        return None

    def _answer(self, name: str, until: float, given_up: Callable[[], bool]) -> Channel | None:
        """The connection of who has called for the edge by then; None when nobody has."""
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
                tls.close()  # it has gone meanwhile, and may call again

    def call(self, address: str, name: str, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """Call for the edge ``name`` at another process's ``address`` until it answers; None once it is ``given_up``.

        Directly, and where that fails through the relay, in turn.

        :raises Unmet: when it has not answered in ``seconds``, or is a stranger.
        """
        until, pause = time.monotonic() + seconds, _FIRST_WAIT_S
        possible = self._likely(ways(address, self._reach))
        if not possible:
            raise Unmet(f"{address} cannot be reached from here, and there is no relay")
        for way in cycle(possible):
            if given_up():
                return None
            turn = until if len(possible) == 1 else min(until, time.monotonic() + _TURN_S)
            try:
                if way == RELAY:
                    return self._relayed(name, "calls", turn, given_up)
                return self._try(way, name.encode(), turn, until, given_up)
            except StrangerError as error:
                raise Unmet(f"{way}: {error}") from None
            except OSError as error:
                if way != RELAY:
                    self._in_vain[way] = time.monotonic()
                self._failed(name, f"{way}: {error.strerror or error}")
                if time.monotonic() + pause > until:
                    raise Unmet(f"{address} did not answer within {seconds:g} s ({error.strerror or error})") from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)
        return None

    def _likely(self, possible: tuple[str, ...]) -> tuple[str, ...]:
        """The ways to an end, those last that were tried in vain a short while ago."""
        late = time.monotonic() - _IN_VAIN_S
        return tuple(sorted(possible, key=lambda way: self._in_vain.get(way, late) > late))

    def meet_at(self, relay: str, name: str, end: End, seconds: float, given_up: Callable[[], bool]) -> Channel | None:
        """Meet the other end of the edge ``name`` at this ``relay`` (HOST:PORT) alone; None once it is ``given_up``.

        :raises RelaySilent: if the relay has not answered for a short while.
        :raises Unmet: if the other end has not come in ``seconds``.
        """
        began, pause = time.monotonic(), _FIRST_WAIT_S
        until = began + seconds
        while not given_up():
            called = time.monotonic()
            try:
                return self._try(relay, end_greeting(name, end), min(until, called + _TURN_S), until, given_up)
            except StrangerError as error:
                raise Unmet(f"the relay {relay}: {error}") from None
            except OSError as error:
                self._failed(name, f"the relay {relay}: {error.strerror or error}")
                # One that has carried nothing for so long is dead; the controller knows others.
                if time.monotonic() + pause > min(until, max(began, self._shut_until) + _TURN_S):
                    raise RelaySilent(f"the relay {relay} did not answer ({error.strerror or error})") from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)
        return None

    def _relayed(self, name: str, end: End, until: float, given_up: Callable[[], bool]) -> Channel | None:
        """A connection to the other end through the relay, if both are there in time; None once it is given up.

        :raises OSError: when the relay cannot be reached, or the other end has not come.
        """
        return self._try(self._reach.relay, end_greeting(name, end), until, until, given_up)

    def shut(self, seconds: float) -> None:
        """Cut this process off: for so long no edge of it opens, whichever end calls."""
        self._shut_until = time.monotonic() + seconds

    def look_up(self) -> None:
        """An edge was given up: whoever waits for its other end looks again."""
        with self._changed:
            self._changed.notify_all()

    def _try(
        self, at: str, words: bytes, reached_by: float, until: float, given_up: Callable[[], bool]
    ) -> Channel | None:
        """One call, which must get through by ``reached_by``, and the wait for the other end to come to the edge.

        :raises OSError: also while this process is cut off (:meth:`shut`).
        """
        if time.monotonic() < self._shut_until:
            raise ConnectionError("cut off")
        tls = connect(at, self._key, words, max(0.001, reached_by - time.monotonic()))
        try:
            while not given_up():
                tls.settimeout(max(0.001, min(_GLANCE_S, until - time.monotonic())))
                try:
                    answer = tls.recv(1)
                except TimeoutError:
                    if time.monotonic() < until:
                        continue
                    raise
                if answer != READY:
                    raise ConnectionError("turned away")
                tls.settimeout(GREETING_S)
                return channel(tls, self.rings)
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
            if room := len(self._callers) < _MOST_WAITING:
                self._callers[name] = tls
            self._changed.notify_all()
        if before is not None:  # the later call is the one that counts
            before.close()
        if not room:
            tls.close()

    def _drop_dead(self) -> None:
        """Callers that have given up: nothing but a hang-up makes their connection readable."""
        for name, tls in list(self._callers.items()):
            if hung_up(tls):
                self._callers.pop(name).close()
