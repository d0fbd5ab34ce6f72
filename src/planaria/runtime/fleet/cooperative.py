"""A fleet in one process: each worker is a greenlet that runs until its inbox is empty."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from greenlet import GreenletExit, greenlet

from planaria.runtime.fleet.base import Notice, Reported, WorkerEnded
from planaria.runtime.transport.local import LocalInbox


class InProcessWorker:
    """A worker in this process: its inbox and its control channel."""

    def __init__(self, worker: str, incarnation: int, notices: list[Notice]) -> None:
        self.worker, self.incarnation = worker, incarnation
        self.inbox = LocalInbox()
        self.accept: Callable[[bytes], None] = self.inbox.put
        """handler of incoming orders; set by the worker"""
        self.late = False
        """an injected fault: run this worker only after all others have been idle for one poll"""
        self.reason = "left"
        """reported when the worker exits"""
        self.running: greenlet | None = None
        self._notices = notices

    def send_bytes(self, text: bytes) -> None:
        """Send a report to the controller."""
        self._notices.append(Reported(self.worker, self.incarnation, text))

    def recv_bytes(self, maxlength: int) -> bytes:
        """Unused: orders go to :attr:`accept`."""
        raise AssertionError(maxlength)

    @property
    def ready(self) -> bool:
        """Return whether the worker can run now."""
        begun = self.running is not None and bool(self.running)
        return not begun or self.inbox.in_vain or not self.inbox.empty()


class CooperativeFleet:
    """The fleet protocol in one thread. Workers run during :meth:`poll` only."""

    def __init__(self, entry: Callable[[InProcessWorker], Any]) -> None:
        """``entry`` is a worker's main function."""
        self._entry = entry
        self._slots: dict[str, InProcessWorker] = {}
        """live workers by name"""
        self._notices: list[Notice] = []
        self._idle_s = 0.0
        """seconds for which all workers have been idle"""
        self._rested = False
        """whether the last poll found all workers idle"""

    def spawn(self, worker: str, incarnation: int, host: str = "") -> None:
        slot = InProcessWorker(worker, incarnation, self._notices)
        slot.running = greenlet(lambda: self._entry(slot))
        self._slots[worker] = slot

    def send(self, worker: str, text: bytes) -> None:
        if worker in self._slots:
            self._slots[worker].accept(text)

    def send_to_incarnation(self, worker: str, incarnation: int, text: bytes) -> None:
        """Do nothing: a dead worker sends no reports."""

    def poll(self, timeout_s: float) -> list[Notice]:
        """Run all workers until every one is idle, and return their reports; sleep ``timeout_s`` if there are none."""
        while self._round(late=False) or (self._rested and not self._notices and self._round(late=True)):
            pass
        notices, self._notices[:] = [*self._notices], []
        self._rested = not notices
        self._idle_s = self._rest(timeout_s) if self._rested else 0.0
        return notices

    def _rest(self, seconds: float) -> float:
        """Sleep while all workers are idle, then resume those whose timeout has passed.

        Returns the seconds for which all workers have been idle.
        """
        time.sleep(seconds)
        idle_s = self._idle_s + seconds
        for slot in [*self._slots.values()]:
            if slot.inbox.patience_s <= idle_s and not slot.late:
                slot.inbox.in_vain, slot.inbox.patience_s = True, math.inf
                self._turn(slot)
        return idle_s

    def _round(self, late: bool) -> int:
        """Run each worker that is ``late``, or each that is not, once; return how many could run."""
        return sum(self._turn(slot) for slot in [*self._slots.values()] if slot.late == late)

    def _turn(self, slot: InProcessWorker) -> bool:
        """Run a worker if it can run, and return whether it could."""
        if not slot.ready:
            return False
        assert slot.running is not None
        slot.running.switch()
        if slot.running.dead:
            self._lose(slot)
        return True

    def _lose(self, slot: InProcessWorker) -> None:
        if self._slots.get(slot.worker) is slot:
            del self._slots[slot.worker]
            self._notices.append(WorkerEnded(slot.worker, slot.incarnation, "exit", slot.reason))

    def waitables(self) -> list[Any]:
        """Return no file descriptors: reports arrive during :meth:`poll` only."""
        return []

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        slot = self._slots.get(worker)
        if slot is not None and slot.incarnation == incarnation and number == signal.SIGKILL:
            slot.reason = "killed"
            self._end(slot)
            self._lose(slot)

    def remove_machine(self, host: str, reason: str) -> None:
        """Do nothing: no machine can join."""

    def close(self) -> None:
        with ExitStack() as ending:
            for slot in reversed([*self._slots.values()]):
                ending.callback(self._end, slot)
        self._slots.clear()

    def _end(self, slot: InProcessWorker) -> None:
        if slot.running is not None and slot.running:
            slot.running.throw(GreenletExit)
