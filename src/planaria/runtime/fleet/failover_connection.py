"""A worker's control connection that follows its run to another controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle

from planaria.runtime.fleet.base import MAX_ORDER_BYTES
from planaria.runtime.fleet.control_connections import BlockingConnection
from planaria.runtime.transport.secure import StrangerError

_PAUSE_S = 0.05
"""seconds between two calls without an answer"""

_REJECTION_S, _REJECTED_S = 1.0, 3.0
"""a connection shorter than the first that brought no order is a rejection; after rejections for the second, give up"""
LASTING_S = 10.0
"""a connection shorter than this that brought no order does not restart ``patience_s``"""

Dial = Callable[[str], BlockingConnection]


class FailoverConnection:
    """Control connection of a worker whose controller may be replaced by one on another machine.

    If it breaks, the thread that receives calls all ``addresses`` in turn until one leads the run. Senders wait
    meanwhile, and repeat their message to the new controller.
    """

    def __init__(self, connection: BlockingConnection, dial: Dial, addresses: Sequence[str], patience_s: float) -> None:
        """:param connection: connection to the present controller, at the first of ``addresses`` (HOST:PORT)
        :param patience_s: seconds after which the run counts as over
        """
        self._connection = connection
        self._dial = dial
        self._addresses = addresses
        self._patience_s = patience_s
        self._moved = threading.Condition()
        self._over = self._moving = False
        self._rejected_since: float | None = None
        """since when each connection is closed without an order (monotonic seconds)"""
        self.address = addresses[0]
        """HOST:PORT of the present controller"""
        self._connected, self._lost_since = time.monotonic(), -1.0
        """times when the present connection began, and when the last one to a controller that leads was lost (-1: it is
        not)"""
        self._ordered = True
        """whether the present controller has given an order"""
        self.on_move: Callable[[str], None] = lambda address: None
        """called with the new controller's HOST:PORT before its first order is returned"""

    @property
    def own_address(self) -> str:
        return self._connection.own_address

    def leave(self, address: str) -> None:
        """Leave the controller at this address, perhaps a silent one; do nothing if it has been left."""
        if self.address == address:
            self._connection.shut_down()

    def shut_down(self) -> None:
        """End the connection, without looking for another controller."""
        with self._moved:
            self._over = True
            self._moved.notify_all()
        self._connection.shut_down()

    @property
    def is_lost(self) -> bool:
        """Whether no controller answers at present."""
        return self._moving

    def send_bytes(self, text: bytes) -> None:
        """Send a message; OSError if no controller has answered for ``patience_s``."""
        while True:
            connection = self._connection
            try:
                connection.send_bytes(text)
                return
            except OSError:
                connection.shut_down()  # the receiving thread may not have noticed
            with self._moved:
                self._moved.wait_for(lambda connection=connection: self._over or self._connection is not connection)  # type: ignore[misc]
                if self._over:
                    raise OSError("the run is over")

    def recv_bytes(self, maxlength: int = MAX_ORDER_BYTES) -> bytes:
        """Return the next message; EOFError if no controller has answered for ``patience_s``."""
        while True:
            try:
                order = self._connection.recv_bytes(maxlength)
            except (EOFError, OSError):
                self._move()
            else:
                self._ordered = True
                return order

    def _move(self) -> None:
        """Connect to the controller that leads now.

        :raises EOFError: if none answers in time.
        """
        self._connection.close()
        if self._over or self._is_rejected():
            with self._moved:
                self._over = True
                self._moved.notify_all()
            raise EOFError
        self._moving = True
        now, answer = time.monotonic(), None
        if self._ordered or now - self._connected > LASTING_S:
            self._lost_since = now
        try:
            answer = self._connect_to_leader(self._lost_since + self._patience_s)
        finally:
            with self._moved:
                self._moving = False
                self._over |= answer is None
                self._connection = answer or self._connection
                self._moved.notify_all()
        if self._over:
            self._connection.close()
            raise EOFError
        self._connected, self._ordered = time.monotonic(), False

    def _is_rejected(self) -> bool:
        """Return whether controllers have closed each connection without an order for some time: they have lost this
        worker."""
        now = time.monotonic()
        if self._ordered or now - self._connected > _REJECTION_S:
            self._rejected_since = None
            return False
        self._rejected_since = self._rejected_since or now
        return now - self._rejected_since > _REJECTED_S

    def _connect_to_leader(self, until: float) -> BlockingConnection | None:
        """Return a connection to the controller that leads, or None if there is none ``until`` (monotonic seconds)."""
        for address in cycle([*self._addresses[1:], self._addresses[0]]):
            if self._over or time.monotonic() > until:
                break
            time.sleep(_PAUSE_S)
            try:
                connection = self._dial(address)
            except (OSError, StrangerError):
                continue
            self.address = address
            self.on_move(address)
            return connection
        return None
