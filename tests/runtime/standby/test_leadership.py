"""The right to lead a run with a shared log ends with its lease, also while a call of the store hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from planaria.common.errors import RunStopped
from planaria.control.log.shared_log import LeadershipLost, LogAppender, SharedLog
from planaria.runtime.shared_log.client import open_shared_log
from planaria.runtime.shared_log.leadership import Leadership

LEASE_S = 0.3


class Hanging:
    """A shared log whose calls wait while it hangs."""

    def __init__(self, log: SharedLog) -> None:
        self._log = log
        self.location = log.location
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> object:
        self.answers.wait(30.0)
        return getattr(self._log, name)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Hanging]:
    hanging = Hanging(open_shared_log(str(tmp_path / "log"), LEASE_S))
    yield hanging
    hanging.answers.set()


def elected(log: Hanging) -> LogAppender:
    appender = LogAppender(log)  # type: ignore[arg-type]
    assert appender.stand()
    return appender


def test_a_leader_that_waits_for_the_store_lets_its_machines_go_and_never_leads_again(log: Hanging) -> None:
    disconnected = threading.Event()
    with closing(Leadership(elected(log), LEASE_S)) as leadership:
        leadership.when_lost(disconnected.set)
        leadership.add("line")
        time.sleep(4 * LEASE_S)
        leadership.secure()
        assert not disconnected.is_set(), "the lease is renewed"
        log.answers.clear()
        leadership.add("another line")
        stuck = threading.Thread(target=pytest.raises, args=(RunStopped, leadership.secure))
        stuck.start()
        assert disconnected.wait(20.0) and stuck.is_alive()
        log.answers.set()
        stuck.join(20.0)
        assert not stuck.is_alive()
        time.sleep(2 * LEASE_S)
        with pytest.raises(RunStopped, match="was not renewed for"):
            leadership.check()


def test_a_leader_that_was_stopped_does_not_renew_a_lease_that_has_ended(
    log: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers may have left it meanwhile, even if no other machine leads."""
    stopped_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s, time=time.time)
    monkeypatch.setattr("planaria.runtime.shared_log.leadership.time", clock)
    with closing(Leadership(elected(log), LEASE_S)) as leadership:
        stopped_s = 10 * LEASE_S
        time.sleep(2 * LEASE_S)
        with pytest.raises(LeadershipLost, match="this process was stopped"):
            leadership.check()


def test_a_leader_with_a_lower_term_lets_its_machines_go(log: Hanging) -> None:
    disconnected = threading.Event()
    first = elected(log)
    with closing(Leadership(first, LEASE_S)) as leadership:
        leadership.when_lost(disconnected.set)
        successor = LogAppender(log, first.term + 1, first.next_number)  # type: ignore[arg-type]
        assert successor.stand()
        with closing(Leadership(successor, LEASE_S)):
            assert disconnected.wait(20.0)
        with pytest.raises(LeadershipLost, match="as term 2"):
            leadership.secure()


def test_a_closed_leadership_hangs_up_nobody(log: Hanging) -> None:
    disconnected = threading.Event()
    leadership = Leadership(elected(log), LEASE_S)
    leadership.when_lost(disconnected.set)
    leadership.close()
    assert not disconnected.wait(4 * LEASE_S)
