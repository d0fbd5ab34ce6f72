"""``python -m planaria.lab.commands.trace``: output, files and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from planaria.faults import trace


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=60)


def test_a_generated_trace_is_usable_in_a_recipe(tmp_path: Path) -> None:
    to = tmp_path / "mine.json"
    rates = ["--hourly", "0.9", "--step-seconds", "5", "--stages", "4", "--steps", "300", "--exempt", "1"]
    done = run("planaria.lab.commands.trace", to, *rates, "--exempt", "4", "--forbid-adjacent", "--seed", "3")
    found = trace.read(to)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{to}: {len(found.faults)} faults, digest {trace.digest(found)[:16]}\n"
    assert {fault.stage for fault in found.faults} <= {2, 3}


def test_an_unknown_flag_is_one_line_with_exit_code_2() -> None:
    done = run("planaria.lab.commands.trace", "x", "--rate", "3")
    line = "planaria: --rate: unknown flag; did you mean '--steps'?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
