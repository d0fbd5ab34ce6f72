"""Workers of one process: order of reports, exits reported once, late workers served last."""

from __future__ import annotations

import signal
from queue import Empty

import pytest

from planaria.runtime.fleet.base import Reported, WorkerEnded
from planaria.runtime.fleet.cooperative import CooperativeFleet, InProcessWorker


def echo(slot: InProcessWorker) -> None:
    """Report every order until the order to stop."""
    slot.send_bytes(b"here")
    while (order := slot.inbox.get()) != b"stop":
        slot.send_bytes(slot.worker.encode() + b" " + order)


def reports(fleet: CooperativeFleet, seconds: float = 0.0) -> list[bytes]:
    return [notice.text for notice in fleet.poll(seconds) if isinstance(notice, Reported)]


def test_a_poll_runs_all_workers_until_none_can_continue() -> None:
    fleet = CooperativeFleet(echo)
    fleet.spawn("w0", 1)
    fleet.spawn("w1", 1)
    assert reports(fleet) == [b"here", b"here"]
    for worker in ("w1", "w0", "w1"):
        fleet.send(worker, b"a order")
    assert reports(fleet) == [b"w0 a order", b"w1 a order", b"w1 a order"]
    assert fleet.poll(0.0) == []
    fleet.close()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_an_exit_is_reported_once_and_its_successor_is_another_worker(how: str) -> None:
    fleet = CooperativeFleet(echo)
    fleet.spawn("w0", 1)
    fleet.poll(0.0)
    if how == "stop":
        fleet.send("w0", b"stop")
    else:
        fleet.signal("w0", 2, signal.SIGKILL)  # of an incarnation that there is not
        assert fleet.poll(0.0) == []
        fleet.signal("w0", 1, signal.SIGKILL)
    (ended,) = fleet.poll(0.0)
    assert isinstance(ended, WorkerEnded) and (ended.worker, ended.incarnation, ended.cause) == ("w0", 1, "exit")
    fleet.send("w0", b"to nobody")
    assert fleet.poll(0.0) == []
    fleet.spawn("w0", 2)
    fleet.send("w0", b"again")
    assert reports(fleet) == [b"here", b"w0 again"]
    fleet.close()


def test_a_late_worker_runs_when_no_other_has_anything_to_do() -> None:
    slots = list[InProcessWorker]()

    def work(slot: InProcessWorker) -> None:
        slots.append(slot)
        echo(slot)

    fleet = CooperativeFleet(work)
    fleet.spawn("w0", 1)
    fleet.spawn("w1", 1)
    fleet.poll(0.0)
    slots[0].late = True
    fleet.send("w0", b"a")
    fleet.send("w1", b"b")
    assert [reports(fleet) for _ in range(3)] == [[b"w1 b"], [], [b"w0 a"]]
    fleet.close()


def test_a_wait_times_out_once_all_workers_have_been_idle_for_that_long() -> None:
    def waits(slot: InProcessWorker) -> None:
        try:
            slot.inbox.get(0.02)
        except Empty:
            slot.send_bytes(b"in vain")
        slot.inbox.get()

    fleet = CooperativeFleet(waits)
    fleet.spawn("w0", 1)
    assert [reports(fleet, 0.01) for _ in range(4)] == [[], [], [b"in vain"], []]
    fleet.close()


def test_an_exception_in_a_worker_ends_the_run() -> None:
    def fails(slot: InProcessWorker) -> None:
        raise ValueError(slot.worker)

    fleet = CooperativeFleet(fails)
    fleet.spawn("w3", 1)
    with pytest.raises(ValueError, match="w3"):
        fleet.poll(0.0)
    fleet.close()


def test_closing_ends_all_workers_and_runs_their_clean_up() -> None:
    left = []

    def tidy(slot: InProcessWorker) -> None:
        try:
            echo(slot)
        finally:
            left.append(slot.worker)

    fleet = CooperativeFleet(tidy)
    for worker in ("w0", "w1"):
        fleet.spawn(worker, 1)
    fleet.poll(0.0)
    fleet.close()
    assert left == ["w0", "w1"]
