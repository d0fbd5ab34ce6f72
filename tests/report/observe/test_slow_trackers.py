"""A tracker that fails, hangs or is slow does not delay the run and is reported once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import PrivateAttr

from planaria.report.observe.run_observer import TrackerThread
from planaria.report.observe.tracker import Tracker

PATIENCE_S = 60.0
"""that a test would wait for a thread which never comes"""


class Held(Tracker):
    """Runs a given action at each call, and records the calls and their threads."""

    _act: Callable[[int], None] = PrivateAttr(default_factory=lambda: lambda step: None)
    _steps: list[int] = PrivateAttr(default_factory=list)
    _threads: set[int] = PrivateAttr(default_factory=set)
    _closed: threading.Event = PrivateAttr(default_factory=threading.Event)

    def open(self, folder: Path) -> None:
        pass

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._threads.add(threading.get_ident())
        self._act(step)
        self._steps.append(step)

    def close(self) -> None:
        self._closed.set()


def send_step(beside: TrackerThread, step: int) -> None:
    beside.send(lambda tracker: tracker.scalars(step, {}))


def trouble_of(beside: TrackerThread) -> str:
    """Wait for the tracker's failure; return its description."""
    until = time.monotonic() + PATIENCE_S
    while not (printed := beside.trouble()) and time.monotonic() < until:
        time.sleep(0.005)
    return printed


def test_a_tracker_receives_all_calls_in_order_in_one_other_thread() -> None:
    tracker = Held()
    beside = TrackerThread("held", tracker)
    for step in range(200):
        send_step(beside, step)
    beside.finish(time.monotonic() + PATIENCE_S)
    assert tracker._steps == list(range(200)) and tracker._closed.is_set()
    assert len(tracker._threads) == 1 and threading.get_ident() not in tracker._threads
    assert beside.trouble() == ""


def test_a_failed_tracker_receives_no_further_calls() -> None:
    tracker = Held()

    def act(step: int) -> None:
        if step == 2:
            raise ConnectionError("no route")

    tracker._act = act
    beside = TrackerThread("held", tracker)
    for step in range(5):
        send_step(beside, step)
    assert trouble_of(beside) == "continuing without held (ConnectionError: no route)"
    send_step(beside, 5)
    beside.finish(time.monotonic() + PATIENCE_S)
    assert tracker._steps == [0, 1] and not tracker._closed.is_set() and beside.trouble() == ""


def test_a_hanging_tracker_does_not_block() -> None:
    """It hangs until the test ends, so a caller that waited for it would hang as well."""
    tracker, over = Held(), threading.Event()
    tracker._act = lambda step: not over.wait(PATIENCE_S) and None
    try:
        beside = TrackerThread("held", tracker, max_calls=10, call_s=0.2)
        for step in range(100):
            send_step(beside, step)
        printed = [trouble_of(beside), trouble_of(beside)]
        assert printed[0] == "held is slow: more than 10 calls are queued, and further ones are dropped"
        assert printed[1] == "continuing without held (it has not answered for 0.2 s)"
        beside.finish(time.monotonic() + PATIENCE_S)
        assert beside._queue.qsize() <= 10 and beside.trouble() == ""
    finally:
        over.set()


def test_a_tracker_that_does_not_finish_in_time_is_dropped() -> None:
    tracker, over = Held(), threading.Event()
    tracker._act = lambda step: not over.wait(PATIENCE_S) and None
    try:
        beside = TrackerThread("held", tracker)
        send_step(beside, 0)
        beside.finish(time.monotonic() + 0.1)
        assert beside.trouble() == "continuing without held (it did not finish in time)"
    finally:
        over.set()


def test_a_slow_tracker_misses_calls_and_is_still_closed() -> None:
    tracker, updated = Held(), threading.Event()
    tracker._act = lambda step: not updated.wait(PATIENCE_S) and None
    beside = TrackerThread("held", tracker, max_calls=3)
    for step in range(50):
        send_step(beside, step)
    updated.set()
    beside.finish(time.monotonic() + PATIENCE_S)
    assert tracker._closed.is_set() and 3 <= len(tracker._steps) <= 4 and tracker._steps == sorted(tracker._steps)
    assert "is slow" in beside.trouble() and beside.trouble() == ""
