"""Peak memory of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PARENT = """
import subprocess, sys
held = b"x" * 600_000_000
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
CHILD = "from planaria.runtime.worker.measurements import peaks; print(peaks().peak_bytes)"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak of this program alone")
def test_a_process_does_not_begin_with_its_parents_peak() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT, CHILD], capture_output=True, text=True, check=True)
    assert 50e6 < int(done.stdout) < 500e6
