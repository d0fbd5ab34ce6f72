"""A supervisor delivers every order and every report once, also if its controllers die."""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet import supervisor
from planaria.runtime.fleet.base import Notice, Reported, WorkerEnded
from planaria.runtime.fleet.supervised_fleet import SupervisedFleet, has_supervisor
from planaria.runtime.fleet.supervisor import SOCKET, SupervisorConfig, WorkerSupervisor, reachable
from support.waiting import until

BEAT = b'{"kind":"heartbeat"}'


class Workers:
    """A fleet without processes: keeps the orders, and hands out the notices that a test puts in."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.orders: dict[str, list[str]] = {}
        self.notices: deque[Notice] = deque()
        self.closed = False
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)

    def put(self, notice: Notice) -> None:
        self.notices.append(notice)
        self._waker.send(b"!")

    def spawn(self, worker: str, incarnation: int) -> None:
        self.started.append((worker, incarnation))

    def send(self, worker: str, text: bytes) -> None:
        self.orders.setdefault(worker, []).append(text.decode())

    def send_to_incarnation(self, worker: str, incarnation: int, text: bytes) -> None:
        self.send(f"{worker}.{incarnation}", text)

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None: ...

    def waitables(self) -> list[Any]:
        return [self._wakeup]

    def poll(self, timeout_s: float) -> list[Notice]:
        with suppress(BlockingIOError):
            self._wakeup.recv(1 << 12)  # before the notices: a later one wakes again
        return [self.notices.popleft() for _ in range(len(self.notices))]

    def close(self) -> None:
        self.closed = True


@contextmanager
def kept(folder: Path, orphan_s: float = 20.0) -> Iterator[Workers]:
    workers = Workers()
    work = SupervisorConfig(folder, lambda *_: None, [], FleetConfig(orphan_s=orphan_s), [], '{"key": "ab"}')
    relay = WorkerSupervisor(work, workers)
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    try:
        yield workers
    finally:
        relay._over = True
        thread.join(5.0)
        assert workers.closed and not (folder / SOCKET).exists()


def numbered(notices: list[Notice]) -> list[tuple[int, str]]:
    return [
        (n.number, n.text.decode() if isinstance(n, Reported) else n.worker)
        for n in notices
        if isinstance(n, Reported | WorkerEnded) and n.number
    ]


def received(fleet: SupervisedFleet, count: int) -> list[tuple[int, str]]:
    """Return numbers and texts of the next notices, at least ``count``."""
    found: list[tuple[int, str]] = []
    until(lambda: len(found) >= count, meanwhile=lambda: found.extend(numbered(fleet.poll(0.05))), shown=found)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_orders_and_reports_pass_once_in_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with kept(tmp_path) as workers:
        log: list[tuple[int, str]] = []  # survives controllers: logged notices
        decisions: list[str] = []  # and logged decisions, each an order to one worker
        reports = 0
        leader = SupervisedFleet(tmp_path, term=1)
        leader.spawn("w", 0)
        for term in range(2, 8):
            for _ in range(rng.randint(0, 4)):
                match rng.choice(["report", "beat", "decide", "poll"]):
                    case "report":
                        reports += 1
                        workers.put(Reported("w", 0, b'{"kind":"stage_ready","n":%d}' % reports))
                    case "beat":
                        workers.put(Reported("w", 0, BEAT))
                    case "decide":
                        decisions.append(f"order {len(decisions)}")
                        leader.send("w", decisions[-1].encode())
                    case "poll":
                        log += numbered(leader.poll(0.02))
            for arrived in numbered(leader.poll(0.01)):  # the controller dies while it processes these
                if rng.random() < 0.5:
                    break
                log.append(arrived)
            if rng.random() < 0.5:
                decisions.append(f"order {len(decisions)}")
                if rng.random() < 0.5:
                    leader.send("w", decisions[-1].encode())
            if rng.random() < 0.5:
                leader._connection.close()  # killed; otherwise stopped
            leader = SupervisedFleet(tmp_path, term, received=log[-1][0] if log else 0)
            leader.spawn("w", 0)
            if decisions:
                leader.send("w", decisions[-1].encode())  # the log's last decision is carried out again
        log += received(leader, reports - len(log))
        assert [number for number, _ in log] == list(range(1, reports + 1))
        assert [text for _, text in log] == [f'{{"kind":"stage_ready","n":{n}}}' for n in range(1, reports + 1)]
        leader.close()
        assert workers.started == [("w", 0)]
        assert workers.orders.get("w", []) == decisions


def test_a_deposed_controller_is_refused_and_told(tmp_path: Path) -> None:
    with kept(tmp_path) as workers:
        old = SupervisedFleet(tmp_path, term=1)
        old.spawn("w", 0)
        assert old.shared == '{"key": "ab"}'
        new = SupervisedFleet(tmp_path, term=2)
        old.send("w", b"late")
        with pytest.raises(RunStopped, match="another controller leads this run, as term 2"):
            old.poll(1.0)
        with pytest.raises(UserError, match="another controller leads"):
            SupervisedFleet(tmp_path, term=2)
        new.send("w", b"now")
        new.signal("w", 0, signal.SIGKILL)
        new.close()
        assert workers.orders == {"w": ["now"]}


def test_a_workers_end_is_reported_to_the_next_controller_too(tmp_path: Path) -> None:
    with kept(tmp_path) as workers:
        first = SupervisedFleet(tmp_path, term=1)
        workers.put(WorkerEnded("w", 0, "exit", "killed"))
        assert received(first, 1) == [(1, "w")]
        again = SupervisedFleet(tmp_path, term=2)
        assert received(again, 1) == [(1, "w")], "the first one had not logged it"
        again.poll(0.0)  # acknowledges what was processed
        last = SupervisedFleet(tmp_path, term=3, received=1)
        assert received(last, 0) == [] and numbered(last.poll(0.2)) == []


def test_a_controller_that_does_not_read_delays_nobody(tmp_path: Path) -> None:
    with kept(tmp_path) as workers:
        stopped = SupervisedFleet(tmp_path, term=1)
        for n in range(300):
            workers.put(Reported("w", 0, b'{"kind":"stage_ready","n":%d,"text":"%s"}' % (n, b"x" * 5000)))
            workers.put(Reported("w", 0, BEAT))
        successor = SupervisedFleet(tmp_path, term=2)
        assert [number for number, _ in received(successor, 300)] == list(range(1, 301))
        stopped._connection.close()


def test_a_term_that_was_not_logged_can_be_taken_again(tmp_path: Path) -> None:
    with kept(tmp_path) as workers:
        SupervisedFleet(tmp_path, term=2)._connection.close()  # killed before it logged the term
        again = SupervisedFleet(tmp_path, term=2)
        again.spawn("w", 0)
        again.send("w", b"order")
        again.close()
        assert workers.orders == {"w": ["order"]}


def test_a_report_that_is_no_text_and_a_failed_start_concern_their_worker_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(self: Workers, worker: str, incarnation: int) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(Workers, "spawn", crowded)
    with kept(tmp_path) as workers:
        leader = SupervisedFleet(tmp_path, term=1)
        leader.spawn("w1", 0)
        assert received(leader, 1) == [(1, "w1")]
        workers.put(Reported("w", 0, b"\xff\xfe"))
        assert [number for number, _ in received(leader, 1)] == [2]
        leader.close()


def test_a_second_supervisor_keeps_its_socket_when_the_first_ends(tmp_path: Path) -> None:
    with kept(tmp_path, orphan_s=0.5), kept(tmp_path):
        leader = SupervisedFleet(tmp_path, term=1)
        threading.Event().wait(1.5)
        assert has_supervisor(tmp_path)
        leader.close()


@pytest.mark.parametrize("garbage", [b"", b"\0\0\0\5hello", b"\xff" * 64, b"\0\0\0\2{}", b"GET / HTTP/1.1\n\n"])
def test_garbage_at_the_socket_changes_nothing(tmp_path: Path, garbage: bytes) -> None:
    with kept(tmp_path) as workers:
        leader = SupervisedFleet(tmp_path, term=1)
        leader.spawn("w", 0)
        leader.send("nobody", b"order")
        with socket.socket(socket.AF_UNIX) as line, reachable(tmp_path) as path:
            line.connect(path)
            line.sendall(garbage)
        leader.send("w", b"order")
        workers.put(Reported("w", 0, b'{"kind":"linked"}'))
        assert len(received(leader, 1)) == 1
        leader.close()
    assert workers.orders == {"w": ["order"]}


def test_the_user_is_told_once_that_no_controller_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_WARN_S", 0.1)
    with kept(tmp_path):
        SupervisedFleet(tmp_path, term=1)._connection.close()
        until(lambda: caplog.messages)
        threading.Event().wait(0.6)
        (line,) = caplog.messages
    assert line.endswith(f"To lead them: `planaria train --resume {tmp_path}`"), line


def test_without_a_controller_the_supervisor_ends(tmp_path: Path) -> None:
    with kept(tmp_path, orphan_s=0.3) as workers:
        SupervisedFleet(tmp_path, term=1)._connection.close()
        until(lambda: workers.closed)
        assert not has_supervisor(tmp_path)
