"""The queue of a process, its alarm, and the thread that serves its edges: the owner's, or another while it is busy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.runtime.transport.inbox import Alarm, Inbox
from support.waiting import SOON_S, until


class Reader:
    """Puts each byte it receives into the inbox, and records which thread read it."""

    def __init__(self, end: socket.socket, inbox: Inbox) -> None:
        end.setblocking(False)
        self.fileno, self._end, self._inbox = end.fileno, end, inbox
        self.read_by: list[str] = []

    def serve(self) -> None:
        for byte in self._end.recv(100):
            self.read_by.append(threading.current_thread().name)
            self._inbox.deliver(byte)


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    yield inbox
    inbox.close()


@pytest.fixture
def line(inbox: Inbox) -> Iterator[tuple[Reader, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        reader = Reader(here, inbox)
        inbox.watch(reader)
        yield reader, there
        inbox.forget(reader)


def test_a_waiting_owner_reads_in_its_own_thread(inbox: Inbox, line: tuple[Reader, socket.socket]) -> None:
    reader, there = line
    threading.Timer(0.2, there.send, [b"\x07"]).start()
    assert inbox.get(SOON_S) == 7
    assert reader.read_by == [threading.current_thread().name]


def test_while_the_owner_is_busy_another_thread_reads(inbox: Inbox, line: tuple[Reader, socket.socket]) -> None:
    reader, there = line
    for number in range(3):
        there.send(bytes([number]))
        until(lambda wanted=number + 1: len(reader.read_by) == wanted)
        assert reader.read_by[-1] == "edges"
    assert [inbox.get(0) for _ in range(3)] == [0, 1, 2]
    threading.Timer(0.2, there.send, [b"\x03"]).start()
    assert inbox.get(SOON_S) == 3
    assert reader.read_by[-1] == threading.current_thread().name, "the owner takes over again as soon as it waits"


def test_after_a_long_wait_the_other_thread_is_still_there(inbox: Inbox, line: tuple[Reader, socket.socket]) -> None:
    reader, there = line
    with pytest.raises(Empty):
        inbox.get(0.5)  # long enough for it to go to sleep
    there.send(b"\x01")
    until(lambda: reader.read_by == ["edges"])


def test_no_item_is_lost_between_a_look_and_a_wait(inbox: Inbox) -> None:
    """Four threads put items in while the owner takes them out."""
    count, threads = 500, 4
    for number in range(threads):
        items = [(number, place) for place in range(count)]
        threading.Thread(target=lambda items=items: [inbox.put(item) for item in items]).start()
    taken = [inbox.get(SOON_S) for _ in range(threads * count)]
    assert sorted(taken) == [(number, place) for number in range(threads) for place in range(count)]
    for number in range(threads):
        assert [place for owner, place in taken if owner == number] == list(range(count)), "each thread's in its order"
    assert inbox.empty()


def test_a_timeout_of_zero_takes_only_what_is_there(inbox: Inbox, line: tuple[Reader, socket.socket]) -> None:
    assert inbox.empty()
    with pytest.raises(Empty):
        inbox.get(0)
    line[1].send(b"\x05")
    assert not inbox.empty()
    assert inbox.get(0) == 5


def test_bytes_in_a_socket_are_unheard_until_they_are_read(inbox: Inbox, line: tuple[Reader, socket.socket]) -> None:
    inbox._waiting = True  # an owner that hangs while it serves; the inbox's own thread may have been there before
    inbox._wake()
    with inbox._serving:
        inbox._serve(0.0)
        assert not inbox.pending()
        line[1].send(b"\x05")
        until(inbox.pending)
    inbox._waiting = False
    assert inbox.get(SOON_S) == 5
    assert not inbox.pending()


@given(st.lists(st.floats(0.0, 0.02), max_size=8))
def test_held_items_come_in_order_and_never_too_early(delays: list[float]) -> None:
    inbox, now, due = Inbox(), time.monotonic(), 0.0
    for number, delay in enumerate(delays):
        due = max(due, now + delay)  # as an edge's frames are: none before the one before it
        inbox.deliver((number, due), due)
    for number in range(len(delays)):
        found, due = inbox.get(SOON_S)
        assert found == number
        assert time.monotonic() >= due
    inbox.close()


def gone_off(alarm: Alarm) -> threading.Event:
    """Return an event that is set after the alarm."""
    off = threading.Event()

    def wait() -> None:
        alarm.wait()
        off.set()

    threading.Thread(target=wait, daemon=True).start()
    return off


def test_an_alarm_goes_off_once_after_it_was_set_last() -> None:
    alarm = Alarm(0.3)
    off, began = gone_off(alarm), time.monotonic()
    for _ in range(4):
        alarm.set()
        time.sleep(0.1)
    assert not off.is_set(), "it was put off every time"
    assert off.wait(SOON_S) and time.monotonic() - began >= 0.6
    assert not gone_off(alarm).wait(0.5)


def test_a_cleared_alarm_does_not_go_off() -> None:
    alarm = Alarm(0.05)
    off = gone_off(alarm)
    alarm.set()
    alarm.clear()
    assert not off.wait(0.3)
    alarm.set()
    assert off.wait(SOON_S)


@pytest.mark.usefixtures("line")
def test_the_other_thread_sleeps_while_the_owner_waits(inbox: Inbox) -> None:
    until(lambda: inbox._thread is not None)
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


def test_a_deleted_alarm_leaves_no_file_descriptor() -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    alarm = Alarm(0.1)
    alarm.set()
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before) + 1
    del alarm
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def switches(thread: threading.Thread) -> int:
    """Return the number of times that a thread slept."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
