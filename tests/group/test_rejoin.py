"""A member whose connection breaks: it joins again, or ends with one error if nothing answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from planaria.report.run.sample_ledger import require_exactly_once
from support.group_members import Members, Spec

pytestmark = pytest.mark.timeout(300)


class Route:
    """Forwards connections to an address until they are cut."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections; new ones are possible."""
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        """Break all connections, and refuse new ones."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._to)
                self._open += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    started = Members(tmp_path)
    yield started
    started.close()


def wait_until(reached: Callable[[], bool], members: Members, patience_s: float = 140.0) -> None:
    until = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < until, members.error(1)
        time.sleep(0.02)


def test_a_member_whose_connections_break_joins_again(members: Members) -> None:
    route = Route(members.host(Spec(seed=1, epochs=3, pause_s=0.2), 140))
    cut = members.start(Spec(seed=2, address=route.address, epochs=3, pause_s=0.02))
    for _ in range(2):
        before = len(members.used(cut))
        wait_until(lambda before=before: len(members.used(cut)) >= before + 5, members)
        route.cut()
    members.wait()
    route.close()
    assert not members.error(cut)
    facts, used = members.facts(cut), len(members.used(cut))
    assert facts["rounds"] > 0 and used > before + 5 and used - 2 <= facts["steps"] <= used
    log = (members.folder / "runs" / "group" / "events.jsonl").read_text()
    require_exactly_once(members.run.record)
    assert log.count('"worker_lost"') >= 2


def test_a_member_ends_with_one_error_if_nothing_answers(members: Members) -> None:
    route = Route(members.host(Spec(seed=1, epochs=2, pause_s=0.2), 140))
    lost = members.start(Spec(seed=2, address=route.address, epochs=2, pause_s=0.02, joining={"retry_s": 2.0}))
    wait_until(lambda: len(members.used(lost)) >= 4, members)
    route.close()
    members.wait()
    assert members.error(lost) == f"{route.address}: the run has not answered for 2 s"
    require_exactly_once(members.run.record)
