"""One standby waits at all times: another one is started if it ends or leads, unless each fails at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from planaria.runtime.fleet import standby_process
from planaria.runtime.fleet.process import WorkerProcess
from planaria.runtime.fleet.standby_process import StandbyProcess
from support.waiting import until


class Standbys:
    """Starts processes that sleep, or exit at once."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds, self.started = seconds, list[WorkerProcess]()

    def spawn(self) -> WorkerProcess:
        process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({self.seconds})"])
        process.returncode = 0  # the WorkerProcess reaps it
        self.started.append(WorkerProcess("standby"))
        self.started[-1].record_start(process.pid)
        return self.started[-1]


def test_one_that_leads_is_replaced_and_left_alone() -> None:
    standbys = Standbys()
    kept = StandbyProcess(standbys.spawn)
    kept.look(0)
    first = standbys.started[0]
    assert first.pid is not None
    for _ in range(3):
        kept.look(first.pid)
    assert len(standbys.started) == 2
    kept.close(0)
    assert standbys.started[1].exitcode == -15 and first.exitcode is None, "only the one that waits is ended"
    first.kill(5.0)


def test_one_that_has_just_become_the_leader_is_not_ended() -> None:
    standbys = Standbys()
    kept = StandbyProcess(standbys.spawn)
    kept.look(0)
    (leader,) = standbys.started
    assert leader.pid is not None
    kept.close(leader.pid)
    assert leader.exitcode is None
    kept.close(0)
    assert leader.exitcode == -signal.SIGTERM


def test_one_that_is_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(standby_process, "_MAX_STOPPED_S", 0.05)
    standbys = Standbys()
    kept = StandbyProcess(standbys.spawn)
    kept.look(0)
    standbys.started[0].signal(signal.SIGSTOP)
    until(lambda: len(standbys.started) == 2, 60.0, meanwhile=lambda: kept.look(0))
    assert standbys.started[0].exitcode == -signal.SIGKILL
    assert caplog.messages == ["the standby was stopped (SIGSTOP); starting another"]
    kept.close(0)


def test_one_that_ends_is_replaced_and_none_is_started_after_four_quick_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standby_process, "_PAUSE_S", 0.01)
    standbys = Standbys(seconds=0.0)
    kept = StandbyProcess(standbys.spawn)
    until(lambda: not kept.is_kept, 60.0, meanwhile=lambda: kept.look(0))
    for _ in range(5):
        kept.look(0)
    assert len(standbys.started) == 4 == len(caplog.messages)
    assert caplog.messages[-1].endswith("the run continues without a standby")


def test_ends_after_a_while_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_process, "_PAUSE_S", 0.0)
    monkeypatch.setattr(standby_process, "_MIN_UPTIME_S", 0.0)
    standbys = Standbys(seconds=0.0)
    kept = StandbyProcess(standbys.spawn)
    until(lambda: len(standbys.started) >= 8, 60.0, meanwhile=lambda: kept.look(0))
    assert kept.is_kept
    kept.close(0)
