"""A worker's desk: one inbox for everything that reaches it, and the one line to the controller.

Orders, frames and broken edges come in through the same queue, so whatever the worker is waiting for, it always hears
the controller.
"""

from __future__ import annotations

import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

from pydantic import TypeAdapter

from planaria.decisions import ORDER, Disband, Form, Leave, Order, Save
from planaria.events import Fact, Heartbeat
from planaria.fleet.base import ControlLine

MAX_ORDER_BYTES = 1 << 20


class Interrupted(Exception):
    """The controller wants something else now; what is under way is dropped."""

    def __init__(self, order: Order) -> None:
        super().__init__(type(order).__name__)
        self.order = order


class Desk:
    """Inbox and reports of one worker."""

    def __init__(self, connection: ControlLine, heartbeat_s: float, orders: TypeAdapter[Any] = ORDER) -> None:
        """``orders`` are the types that the controller's words are checked against."""
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self._connection, self._heartbeat_s, self._orders = connection, heartbeat_s, orders
        self._speaking = threading.Lock()

    def open(self) -> None:
        """Begin to listen and to beat."""
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def report(self, fact: Fact) -> None:
        """Tell the controller."""
        text = fact.model_dump_json().encode()
        with self._speaking:
            try:
                self._connection.send_bytes(text)
            except OSError:
                os._exit(0)  # the controller is gone, and with it the reason to live

    def next(self, deadline: float | None = None) -> Any:
        """The next thing that reaches this worker; None when ``deadline`` (monotonic seconds) passes first.

        :raises Interrupted: when it is an order to drop what is under way.
        """
        try:
            item = self.inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            return None
        if isinstance(item, Form | Save | Disband | Leave):
            raise Interrupted(item)
        return item

    def _listen(self) -> None:
        try:
            while True:
                self.inbox.put(self._orders.validate_json(self._connection.recv_bytes(MAX_ORDER_BYTES)))
        except (EOFError, OSError):
            os._exit(0)  # never an orphan

    def _beat(self) -> None:
        while True:
            self.report(Heartbeat())
            time.sleep(self._heartbeat_s)
