"""The control channel of a worker: one inbox, and one connection to the controller.

Orders, frames and broken edges arrive in the same queue, so the worker sees the controller's orders in every wait.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pydantic import TypeAdapter, ValidationError

from planaria.common.documents import first_error
from planaria.control.facts.events import Fact, Heartbeat
from planaria.control.facts.orders import ORDER, InjectFault, Order
from planaria.runtime.fleet.base import MAX_ORDER_BYTES, WorkerConnection
from planaria.runtime.transport.inbox import Inbox, InboxQueue
from planaria.runtime.worker.step_samples import ReadTimer

if TYPE_CHECKING:
    from planaria.faults.worker_faults import WorkerFaults

log = logging.getLogger(__name__)


class CurrentAction(NamedTuple):
    """Current action of the main thread; ``since`` and ``cpu``: wall and thread time (s) of its last progress."""

    doing: str
    step: int
    microbatch: int
    waiting: bool
    since: float
    cpu: float


class Superseded(Exception):
    """The controller sent an order that replaces the current action."""

    def __init__(self, order: Order) -> None:
        super().__init__(type(order).__name__)
        self.order = order


class ControlLink:
    """Inbox and reports of one worker."""

    reports_timings = True
    """whether the worker reports the durations of its actions"""

    def __init__(
        self,
        connection: WorkerConnection,
        heartbeat_s: float,
        orders: TypeAdapter[Any] = ORDER,
        inbox: InboxQueue | None = None,
    ) -> None:
        """``orders``: the types that messages of the controller are validated against."""
        self.inbox: InboxQueue = Inbox() if inbox is None else inbox
        self._connection = connection
        self._heartbeat_s = heartbeat_s
        self._orders = orders
        self._send_lock = threading.Lock()
        self._current_action = CurrentAction("orders", -1, -1, False, time.monotonic(), time.thread_time())
        self.faults: WorkerFaults | None = None
        """faults injected into this worker, or None until the first is announced"""
        self.injector: Callable[[], WorkerFaults] | None = None
        """makes :attr:`faults`, or None where no fault can strike"""
        self.on_fault: Callable[[str, InjectFault], None] = lambda signal, injection: None
        """called with a fault's name in the log, and the fault, before its injection"""
        self.reading = ReadTimer()
        self.trouble: Callable[[], str] = str
        """returns why an opening edge is not open yet"""
        self.writing: tuple[int, float] | None = None
        """the checkpoint that another thread writes, and since when (monotonic seconds)"""

    def open(self) -> None:
        """Start the threads for orders and heartbeats. Call it from the main thread, which the heartbeats describe."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def report(self, fact: Fact) -> None:
        """Send an event to the controller; exit if the controller has exited."""
        text = fact.model_dump_json().encode()
        with self._send_lock:
            try:
                self._connection.send_bytes(text)
            except OSError:
                self.leave()

    def leave(self, code: int = 0) -> NoReturn:
        """Exit immediately, without joining threads."""
        os._exit(code)

    def end(self, number: signal.Signals) -> None:
        """Kill or stop this worker."""
        signal.raise_signal(number)

    def set_activity(self, doing: str, step: int = -1, microbatch: int = -1, hop: int = -1) -> None:
        """Record the main thread's action, and inject a fault that is scheduled for it."""
        self.delay_if_slow()
        self._current_action = CurrentAction(doing, step, microbatch, False, time.monotonic(), time.thread_time())
        if self.faults is not None:
            self.faults.set_activity(doing, microbatch, hop)

    def delay_if_slow(self) -> None:
        """Delay the main thread if a fault slows it down."""
        if self.faults is not None and self.faults.delay_if_slow(time.monotonic() - self._current_action.since):
            self._current_action = self._current_action._replace(since=time.monotonic())

    def inject_in_background(self, doing: str) -> None:
        """Inject a fault that is scheduled for this action of another thread."""
        if self.faults is not None:
            self.faults.inject_matching(doing)

    def next(self, deadline: float | None = None) -> Any:
        """Return the next item of the inbox, or None after ``deadline`` (monotonic seconds).

        :raises Superseded: if it is an order that cancels the current action.
        """
        item = self._await(deadline)
        if getattr(item, "interrupts", False):
            raise Superseded(item)
        return item

    def _await(self, deadline: float | None) -> Any:
        current = self._current_action
        self._current_action = current._replace(waiting=True, since=time.monotonic(), cpu=time.thread_time())
        try:
            return self.inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Empty:
            return None
        finally:
            self._current_action = current._replace(since=time.monotonic(), cpu=time.thread_time())

    def _listen(self) -> None:
        try:
            while True:
                self.accept(self._orders.validate_json(self._connection.recv_bytes(MAX_ORDER_BYTES)))
        except ValidationError as error:
            log.error("received an invalid order (%s)", first_error(error))
            self.leave(1)
        except (EOFError, OSError):
            self.leave()  # the controller has exited

    def accept(self, order: object) -> None:
        """Accept an order from the controller."""
        if isinstance(order, InjectFault) and self.injector is not None:
            self.faults = self.faults or self.injector()
            self.faults.add(order)  # must take effect before the next order
        else:
            self.inbox.put(order)

    def _beat(self) -> None:
        before, stuck_since = (self._current_action, self.inbox.rounds), time.monotonic()
        while True:
            current, writing = self._current_action, self.writing
            now = time.monotonic()
            at = current, self.inbox.rounds
            if at != before or not self.inbox.pending():
                before, stuck_since = at, now
            # A worker that waits but does not process received items has been stuck since then.
            waiting = current.waiting and stuck_since == now
            beat = Heartbeat(
                doing=current.doing,
                step=current.step,
                microbatch=current.microbatch,
                waiting=waiting,
                action_s=now - (stuck_since if current.waiting and not waiting else current.since),
                cpu_s=max(0.0, time.clock_gettime(self._clock) - current.cpu),
                trouble=self.trouble(),
                checkpoint_being_written=-1 if writing is None else writing[0],
                writing_s=0.0 if writing is None else now - writing[1],
            )
            self.report(beat)
            time.sleep(self._heartbeat_s)
