"""A worker's desk: one inbox for everything that reaches it, and the one line to the controller.

Orders, frames and broken edges come in through the same queue, so whatever the worker is waiting for, it always hears
the controller.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any, NamedTuple, NoReturn, Protocol

from pydantic import TypeAdapter, ValidationError

from planaria.control.decisions import ORDER, Blow, Order
from planaria.control.events import Fact, Heartbeat
from planaria.pipeline.plan.actions import Action
from planaria.runtime.engine.samples import Batch, Reading
from planaria.runtime.fleet.base import ControlLine
from planaria.runtime.transport.inbox import Inbox, Items

MAX_ORDER_BYTES = 1 << 20


class Place(NamedTuple):
    """Where the main thread is; ``since`` and ``cpu`` (monotonic seconds, the thread's own): when it last moved."""

    doing: str
    step: int
    microbatch: int
    waiting: bool
    since: float
    cpu: float


class Interrupted(Exception):
    """The controller wants something else now; what is under way is dropped."""

    def __init__(self, order: Order) -> None:
        super().__init__(type(order).__name__)
        self.order = order


class Faults(Protocol):
    """Faults injected into a worker (``faults/worker.py``)."""

    def add(self, blow: Blow) -> None: ...

    def aim(self, actions: Sequence[Action]) -> None: ...

    def source(self, batch: Batch, step: int | None) -> Batch: ...

    def lag(self, busy_s: float) -> bool: ...

    def at(self, doing: str, microbatch: int, hop: int) -> None: ...

    def meet(self, doing: str) -> None: ...


class Desk:
    """Inbox and reports of one worker."""

    reports_timings = True
    """whether the worker reports how long its actions took"""

    def __init__(
        self,
        connection: ControlLine,
        heartbeat_s: float,
        orders: TypeAdapter[Any] = ORDER,
        inbox: Items | None = None,
    ) -> None:
        """``orders`` are the types that the controller's words are checked against."""
        self.inbox: Items = Inbox() if inbox is None else inbox
        self._connection, self._heartbeat_s, self._orders = connection, heartbeat_s, orders
        self._speaking = threading.Lock()
        self._place = Place("orders", -1, -1, False, time.monotonic(), time.thread_time())
        self.faults: Faults | None = None
        """faults injected into this worker; None until the first is announced"""
        self.injector: Callable[[], Faults] | None = None
        """makes :attr:`faults`; None where no fault can strike"""
        self.struck: Callable[[str, Blow], None] = lambda signal, blow: None
        """called with a fault, and its name in the log, before it is injected"""
        self.reading = Reading()
        self.trouble: Callable[[], str] = str
        """returns why an edge that is being opened has not opened yet"""
        self.writing: tuple[int, float] | None = None
        """the checkpoint for which another thread writes, and since when (monotonic seconds)"""

    def open(self) -> None:
        """Begin to listen and to beat. Called by the main thread, whose place the beats tell."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def report(self, fact: Fact) -> None:
        """Tell the controller."""
        text = fact.model_dump_json().encode()
        with self._speaking:
            try:
                self._connection.send_bytes(text)
            except OSError:
                self.leave()  # the controller is gone, and with it the reason to live

    def leave(self, code: int = 0) -> NoReturn:
        """Exit at once, without waiting for threads."""
        os._exit(code)

    def end(self, number: signal.Signals) -> None:
        """Kill or stop this worker."""
        signal.raise_signal(number)

    def at(self, doing: str, step: int = -1, microbatch: int = -1, hop: int = -1) -> None:
        """The main thread begins to do this. A fault that is meant for here strikes now."""
        self.lag()
        self._place = Place(doing, step, microbatch, False, time.monotonic(), time.thread_time())
        if self.faults is not None:
            self.faults.at(doing, microbatch, hop)

    def lag(self) -> None:
        """What the main thread has done so far takes longer, where a fault says so."""
        if self.faults is not None and self.faults.lag(time.monotonic() - self._place.since):
            self._place = self._place._replace(since=time.monotonic())

    def beside(self, doing: str) -> None:
        """Another thread than the main one begins to do this. A fault that is meant for here strikes now."""
        if self.faults is not None:
            self.faults.meet(doing)

    def next(self, deadline: float | None = None) -> Any:
        """The next thing that reaches this worker; None when ``deadline`` (monotonic seconds) passes first.

        :raises Interrupted: when it is an order to drop what is under way.
        """
        item = self._await(deadline)
        if getattr(item, "interrupts", False):
            raise Interrupted(item)
        return item

    def _await(self, deadline: float | None) -> Any:
        place = self._place
        self._place = place._replace(waiting=True, since=time.monotonic(), cpu=time.thread_time())
        try:
            return self.inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            return None
        finally:
            self._place = place._replace(since=time.monotonic(), cpu=time.thread_time())

    def _listen(self) -> None:
        try:
            while True:
                self.take_in(self._orders.validate_json(self._connection.recv_bytes(MAX_ORDER_BYTES)))
        except (EOFError, OSError, ValidationError):
            self.leave()  # never an orphan

    def take_in(self, order: object) -> None:
        """Accept an order from the controller."""
        if isinstance(order, Blow) and self.injector is not None:
            self.faults = self.faults or self.injector()
            self.faults.add(order)  # known before the order after it is obeyed
        else:
            self.inbox.put(order)

    def _beat(self) -> None:
        before, unheard_since = (self._place, self.inbox.rounds), time.monotonic()
        while True:
            place, writing, now = self._place, self.writing, time.monotonic()
            at = place, self.inbox.rounds
            if at != before or not self.inbox.unheard():
                before, unheard_since = at, now
            # Who waits and does not take in what has come is stuck since then.
            waiting = place.waiting and unheard_since == now
            beat = Heartbeat(
                doing=place.doing,
                step=place.step,
                microbatch=place.microbatch,
                waiting=waiting,
                for_s=now - (unheard_since if place.waiting and not waiting else place.since),
                cpu_s=max(0.0, time.clock_gettime(self._clock) - place.cpu),
                trouble=self.trouble(),
                writing=-1 if writing is None else writing[0],
                writing_s=0.0 if writing is None else now - writing[1],
            )
            self.report(beat)
            time.sleep(self._heartbeat_s)
