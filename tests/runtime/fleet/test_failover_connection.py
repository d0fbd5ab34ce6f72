"""A worker's connection follows the run to another controller, and ends when none leads."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest

from planaria.runtime.fleet import failover_connection
from planaria.runtime.fleet.failover_connection import FailoverConnection

PATIENCE_S = 0.6


class Line:
    """A control connection whose controller may be lost."""

    own_address = "127.0.0.1"

    def __init__(self, orders: list[bytes] | None = None, lost: bool = False) -> None:
        self.sent: list[bytes] = []
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        for order in orders or []:
            self._orders.put(order)
        self.lost = lost
        if lost:
            self._orders.put(None)

    def lose(self) -> None:
        self.lost = True
        self._orders.put(None)

    shut_down = close = lose

    def send_bytes(self, text: bytes) -> None:
        if self.lost:
            raise OSError("lost")
        self.sent.append(text)

    def recv_bytes(self, maxlength: int) -> bytes:
        if (order := self._orders.get()) is None:
            raise EOFError
        return order


class Run:
    """Controllers by address; those without a connection do not answer."""

    def __init__(self, **connections: Line) -> None:
        self.first, self.connections, self.dialled = Line([b"begin"]), connections, list[str]()
        self.connection = FailoverConnection(self.first, self.dial, ["a", "b", "c"], PATIENCE_S)  # type: ignore[arg-type]

    def dial(self, address: str) -> Line:
        self.dialled.append(address)
        if address not in self.connections:
            raise ConnectionRefusedError
        return self.connections[address]


def test_the_next_controller_gives_orders_and_receives_what_the_last_did_not() -> None:
    run = Run(c=Line([b"go on"]))
    moved: list[str] = []
    run.connection.on_move = moved.append
    assert run.connection.recv_bytes() == b"begin"
    run.first.lose()
    sender = threading.Thread(target=run.connection.send_bytes, args=[b"ready"])
    sender.start()
    assert run.connection.recv_bytes() == b"go on"
    sender.join(5.0)
    assert not sender.is_alive() and run.connections["c"].sent == [b"ready"] and not run.first.sent
    assert moved == ["c"] and run.connection.address == "c" and run.dialled == ["b", "c"], "the lost one comes last"


def test_only_the_named_controller_is_left() -> None:
    """A machine may find out later than its workers that another controller leads."""
    run = Run(c=Line([b"go on"]))
    assert run.connection.recv_bytes() == b"begin"
    run.connection.leave("a")
    assert run.connection.recv_bytes() == b"go on" and run.connection.address == "c"
    run.connection.leave("a")
    run.connection.send_bytes(b"ready")
    assert run.connections["c"].sent == [b"ready"]


def test_without_a_controller_both_ends_give_up() -> None:
    run = Run()
    run.first.lose()
    failed = list[BaseException]()

    def send() -> None:
        try:
            run.connection.send_bytes(b"ready")
        except OSError as error:
            failed.append(error)

    sender, began = threading.Thread(target=send), time.monotonic()
    sender.start()
    run.connection.recv_bytes()  # the order that had arrived
    with pytest.raises(EOFError):
        run.connection.recv_bytes()
    sender.join(5.0)
    assert time.monotonic() - began >= PATIENCE_S and len(failed) == 1 and {*run.dialled} == {"a", "b", "c"}


def test_a_controller_that_hangs_up_at_once_does_not_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not expect this worker, which must not call for ever."""
    monkeypatch.setattr(failover_connection, "LASTING_S", 5.0)
    run = Run()
    run.dial = lambda address: Line(lost=True)  # type: ignore[method-assign]
    run.connection = FailoverConnection(run.first, run.dial, ["a", "b"], PATIENCE_S)  # type: ignore[arg-type]
    run.first.lose()
    run.connection.recv_bytes()
    began = time.monotonic()
    with pytest.raises(EOFError):
        run.connection.recv_bytes()
    assert PATIENCE_S <= time.monotonic() - began < 5.0


def test_controllers_that_are_lost_soon_are_followed_as_long_as_they_give_orders() -> None:
    run = Run()
    run.first.lose()
    run.connection.recv_bytes()
    began = time.monotonic()
    run.dial = lambda address: Line([b"go on"], lost=True)  # type: ignore[method-assign]
    run.connection = FailoverConnection(run.first, run.dial, ["a", "b"], PATIENCE_S)  # type: ignore[arg-type]
    run.first.lose()
    while time.monotonic() - began < 3 * PATIENCE_S:
        assert run.connection.recv_bytes() == b"go on"


def test_a_callback_that_fails_ends_the_wait_of_senders() -> None:
    run = Run(b=Line())
    run.first.lose()
    run.connection.recv_bytes()

    def broken(address: str) -> None:
        raise RuntimeError("a bug")

    run.connection.on_move = broken
    with pytest.raises(RuntimeError, match="a bug"):
        run.connection.recv_bytes()
    with pytest.raises(OSError, match="the run is over"):
        run.connection.send_bytes(b"ready")


def test_a_worker_that_its_controller_has_lost_gives_up_before_its_patience_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller closes each connection at once."""
    monkeypatch.setattr(failover_connection, "_REJECTED_S", 0.3)
    calls = list[float]()

    def rejected(address: str) -> Line:
        calls.append(time.monotonic())
        return Line(lost=True)

    first = Line([b"begin"])
    connection = FailoverConnection(first, rejected, ["a"], 60.0)  # type: ignore[arg-type]
    assert connection.recv_bytes() == b"begin"
    first.lose()
    began = time.monotonic()
    with pytest.raises(EOFError):
        connection.recv_bytes()
    assert time.monotonic() - began < 10.0 and len(calls) > 1
    with pytest.raises(OSError, match="over"):
        connection.send_bytes(b"ready")
