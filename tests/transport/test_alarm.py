"""A timer that wakes one thread, and nobody else for nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import Empty

import pytest

from planaria.runtime.transport.inbox import Alarm, Inbox

SOON_S = 20.0


def gone_off(alarm: Alarm) -> threading.Event:
    """Set once the alarm has gone off."""
    off = threading.Event()

    def wait() -> None:
        alarm.wait()
        off.set()

    threading.Thread(target=wait, daemon=True).start()
    return off


def test_it_goes_off_once_so_long_after_it_was_set_last() -> None:
    alarm = Alarm(0.3)
    off, began = gone_off(alarm), time.monotonic()
    for _ in range(4):
        alarm.set()
        time.sleep(0.1)
    assert not off.is_set(), "it was put off every time"
    assert off.wait(SOON_S) and time.monotonic() - began >= 0.6
    assert not gone_off(alarm).wait(0.5)


def test_it_does_not_go_off_once_it_is_cleared() -> None:
    alarm = Alarm(0.05)
    off = gone_off(alarm)
    alarm.set()
    alarm.clear()
    assert not off.wait(0.3)
    alarm.set()
    assert off.wait(SOON_S)


def test_the_thread_that_stands_in_for_an_owner_is_not_woken_while_the_owner_waits() -> None:
    inbox, watched = Inbox(), Inbox()
    inbox.watch(Idle(watched))
    time.sleep(0.2)  # it has taken over
    thread = inbox._thread
    assert thread is not None
    with pytest.raises(Empty):
        inbox.get(0.2)
    before = switches(thread)
    for _ in range(5):
        with pytest.raises(Empty):
            inbox.get(0.2)
    assert switches(thread) - before <= 5, "a look every 2 ms would be 500 in a second"
    inbox.close()
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_nothing_is_left_of_an_alarm_that_is_gone() -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    alarm = Alarm(0.1)
    alarm.set()
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before) + 1
    del alarm
    assert sorted(Path("/proc/self/fd").iterdir()) == before


class Idle:
    """Has a descriptor on which nothing ever happens."""

    def __init__(self, of: Inbox) -> None:
        self._handle = of._wakeup

    def fileno(self) -> int:
        return self._handle

    def serve(self) -> None:
        raise AssertionError("nothing has happened")


def switches(thread: threading.Thread) -> int:
    """How often a thread has gone to sleep."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
