"""A short run of the endurance benchmark: its claims about a long run must hold for a small one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planaria.control.log.reader import read_run
from planaria.report.run.recoveries import faults_summary

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # other tests check each recovery; this one checks many in a row
@pytest.mark.timeout(300)
def test_kill_after_kill_nothing_is_lost_and_nothing_stays_behind(tmp_path: Path) -> None:
    flags = ["--steps", "150", "--kills", "4", "--every", "0.3", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.endurance", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for claimed in ("controller: descriptors", "controller: threads", "deaths with", "things wrong", "decisions that"):
        assert any(claimed in line and "PASS" in line for line in done.stdout.splitlines()), done.stdout
    faults = faults_summary(read_run(tmp_path / "endurance-1"))
    assert (faults.injected, faults.deaths) == (4, 4)
