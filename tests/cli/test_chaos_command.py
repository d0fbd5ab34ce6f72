"""``planaria run chaos`` on processes that hold no stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planaria.cli import fault_injection
from planaria.common.errors import UserError
from planaria.runtime.fleet.process import activity
from support.waiting import until


def test_a_stopped_standby_is_resumed_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        monkeypatch.setattr(fault_injection, "_require_live", lambda folder, target: None)
        monkeypatch.setattr(fault_injection, "_process", lambda folder, target: process.pid)
        try:
            assert fault_injection.send_signal(tmp_path, "stop", "standby").startswith("SIGSTOP to the standby")
            until(lambda: activity(process.pid) == "stopped", 10.0)
            fault_injection.send_signal(tmp_path, "stop", "standby", 0.05)
            until(lambda: activity(process.pid) == "asleep", 10.0)
        finally:
            process.kill()


def test_a_controller_can_only_be_killed_or_stopped(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--slow-host controller: the controller can only be killed or stopped"):
        fault_injection.request_fault(tmp_path, "controller", {"signal": "slow_host"})
