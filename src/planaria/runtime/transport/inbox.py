"""One queue for everything that a process receives, and the threads that read and write its edges.

The thread that waits for the queue serves the edges itself, since passing a frame between threads costs more than a
small frame. While that thread is busy, a thread of the inbox serves them; a kernel timer wakes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any, Protocol

_GRACE_S = 0.002
"""time (s) that the owner may be busy before the inbox's thread takes over"""
# Python has these calls since 3.13. ``PyDLL`` keeps the interpreter lock, since they take less time than releasing it.
_libc = ctypes.PyDLL(None, use_errno=True)
_settime = _libc.timerfd_settime
_settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


class InboxClient(Protocol):
    """An object with a socket that an inbox serves."""

    def fileno(self) -> int: ...

    def serve(self) -> None:
        """Read and write without blocking. Only one thread at a time calls this."""


class InboxQueue(Protocol):
    """The queue interface of an inbox; its owner calls ``get`` and ``empty``."""

    rounds: int
    """number of times that edges were served"""

    def put(self, item: Any) -> None: ...

    def get(self, timeout: float | None = None) -> Any: ...

    def empty(self) -> bool: ...

    def pending(self) -> bool: ...


class _Times(ctypes.Structure):
    """struct itimerspec: interval and time, in seconds and nanoseconds; zero disarms the timer."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class Alarm:
    """A kernel timer that expires once, ``after_s`` seconds after the last :meth:`set`. One thread waits."""

    def __init__(self, after_s: float) -> None:
        self._handle = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "no timer")
        self._times = _Times(0, 0, int(after_s), int(after_s % 1 * 1e9)), _Times(0, 0, 0, 0)
        self._set, self._off = (ctypes.addressof(times) for times in self._times)

    def set(self) -> None:
        """Start the timer again."""
        _settime(self._handle, 0, self._set, None)

    def clear(self) -> None:
        _settime(self._handle, 0, self._off, None)

    def wait(self) -> None:
        os.read(self._handle, 8)

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)


class Inbox:
    """A queue with one consumer, its owner; any thread may add items."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._held: list[tuple[float, int, Callable[[], None]]] = []
        """a heap of calls that are not due yet"""
        self._count = itertools.count()
        self._served: dict[int, InboxClient] = {}
        self._epoll, self._wakeup = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._serving = threading.Lock()
        """held while serving the edges"""
        self._waiting, self._closed = False, False
        self.rounds = 0
        """number of times that edges were served"""
        self._busy = Alarm(_GRACE_S)
        """expires when the owner has been busy for a while"""
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        """serves while the owner is busy; started with the first edge"""

    def put(self, item: Any) -> None:
        """Add an item; thread-safe."""
        self._items.append(item)
        if self._waiting:
            self._wake()

    def deliver(self, item: Any, due: float = 0.0) -> None:
        """Add a received item, or hold it until ``due`` (monotonic seconds).

        Call it only from :meth:`InboxClient.serve`.
        """
        if due > time.monotonic() or (due and self._held):  # keeps the order
            self._hold(partial(self._items.append, item), due)
        else:
            self._items.append(item)

    def call(self, act: Callable[[], None], due: float) -> None:
        """Call ``act`` when it is ``due`` (monotonic seconds), or now. Call it only from :meth:`InboxClient.serve`."""
        if due > time.monotonic():
            self._hold(act, due)
        else:
            act()

    def _hold(self, act: Callable[[], None], due: float) -> None:
        heapq.heappush(self._held, (due, next(self._count), act))

    def get(self, timeout: float | None = None) -> Any:
        """Return the next item; raise Empty if there is none after ``timeout`` seconds. Only the owner calls this."""
        if not self._items:
            self._wait(math.inf if timeout is None else time.monotonic() + timeout)
        try:
            return self._items.popleft()
        except IndexError:
            raise Empty from None

    def empty(self) -> bool:
        """Return whether no item is available without waiting. Only the owner calls this."""
        if not self._items and self._serving.acquire(blocking=False):
            try:
                self._serve(0.0)
            finally:
                self._serving.release()
        return not self._items

    def pending(self) -> bool:
        """Return whether the owner could take or read something; thread-safe."""
        return bool(self._items) or bool(self._epoll.poll(0))

    def watch(self, served: InboxClient) -> None:
        """Start to serve an object; thread-safe."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve_meanwhile, name="edges", daemon=True)
                self._thread.start()
                self._busy.set()
        self._served[served.fileno()] = served
        self._epoll.register(served.fileno(), select.EPOLLIN)

    def watch_writable(self, served: InboxClient, wanted: bool) -> None:
        """Set whether to serve an object also while it is writable."""
        with contextlib.suppress(OSError, ValueError):  # already closed
            self._epoll.modify(served.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def forget(self, served: InboxClient) -> None:
        """Stop serving an object that is about to be closed."""
        handle = served.fileno()
        self._served.pop(handle, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(handle)

    def close(self) -> None:
        """Stop the inbox's thread."""
        self._closed = True
        self._wake()
        self._busy.set()

    def _wait(self, until: float) -> None:
        """Serve the edges until there is an item, or until ``until``."""
        self._waiting = True  # from now on, put() wakes this thread
        self._busy.clear()
        try:
            if not self._serving.acquire(blocking=False):
                self._wake()
                self._serving.acquire()
            try:
                while not self._items:
                    self._serve(max(0.0, remaining_s := until - time.monotonic()))
                    if remaining_s <= 0:
                        break
            finally:
                self._serving.release()
        finally:
            self._waiting = False
            if self._thread is not None:
                self._busy.set()

    def _serve_meanwhile(self) -> None:
        """Serve the edges whenever the owner has been busy for a while."""
        while not self._closed:
            # Polling for that would cost more than the rest of a small step.
            self._busy.wait()
            if not self._waiting:
                with self._serving:
                    while not self._waiting and not self._closed:
                        self._serve(math.inf)

    def _serve(self, patience_s: float) -> None:
        """Wait at most ``patience_s`` for something to do, and do it."""
        due_s = self._held[0][0] - time.monotonic() if self._held else math.inf
        if due_s < patience_s:  # epoll has a resolution of a millisecond
            select.select([self._epoll], [], [], max(0.0, due_s))
            patience_s = 0.0
        self.rounds += 1
        for handle, _ in self._epoll.poll(None if patience_s == math.inf else patience_s):
            if handle == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            elif (served := self._served.get(handle)) is not None:
                served.serve()
        while self._held and self._held[0][0] <= time.monotonic():
            heapq.heappop(self._held)[2]()

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)
