"""A program's score is the same wherever it is run; two cages are two places."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.swarm.tasks.sandbox import protections, run

pytestmark = pytest.mark.skipif("seccomp" not in protections(), reason="no seccomp: programs are not run here at all")
UNSTEADY = [
    "time.time()", "time.time_ns()", "time.monotonic()", "time.perf_counter_ns()", "time.process_time()",
    "time.clock_gettime(time.CLOCK_MONOTONIC)", "time.localtime()", "time.ctime()", "time.strftime('%H:%M:%S %Z')",
    "datetime.datetime.now()", "datetime.datetime.now().astimezone()", "datetime.date.today()",
    "os.getpid()", "os.getppid()", "os.getpgrp()", "os.getcwd()", "os.uname()", "os.cpu_count()", "os.times()",
    "os.urandom(8)", "os.getrandom(8)", "random.random()", "random.Random().random()", "random.SystemRandom().random()",
    "secrets.token_hex()", "uuid.uuid4()", "uuid.uuid1()", "threading.get_native_id()", "threading.get_ident()",
    "resource.getrusage(resource.RUSAGE_SELF)", "hash('x')", "{'a', 'b', 'c', 'd'}", "id(object())", "hash(object())",
    "[str(x) for x in {object, int, str, None, len, print}]", "next(tempfile._get_candidate_names())",
    "random.sample(range(99), 9), random.seed(), random.random()", "platform.node()",
]  # fmt: skip
PROGRAM = "import datetime, os, platform, random, resource, secrets, tempfile, threading, time, uuid\n"
PROGRAM += "".join(f"print({one!r}, {one})\n" for one in UNSTEADY)


def test_two_cages_print_the_same() -> None:
    first, second = (run(PROGRAM) for _ in range(2))
    assert first.kind == "ok", first.reason
    ours, theirs = first.printed.splitlines(), second.printed.splitlines()
    assert len(ours) == len(UNSTEADY)
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == []


def test_another_process_elsewhere_prints_the_same(tmp_path: Path) -> None:
    told = "from planaria.swarm.tasks.sandbox import run\nimport sys\nprint(run(sys.stdin.read()).printed, end='')"
    other = subprocess.run(
        [sys.executable, "-c", told],
        input=PROGRAM,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path), "PYTHONHASHSEED": "7"},
    )
    assert other.stdout == run(PROGRAM).printed != "", other.stderr


def test_the_clock_goes_on_and_sleeping_passes_at_once() -> None:
    program = """
import time, datetime
looks = [time.time() for _ in range(3)]
time.sleep(3600)
assert looks == sorted(set(looks)) and 3600 < time.time() - looks[0] < 3601
assert datetime.datetime.now().year == time.gmtime().tm_year == 2020
try:
    time.sleep(-1)
except ValueError:
    print("so")
"""
    assert run(program).printed == "so\n"


def test_a_seed_still_chooses_what_is_drawn() -> None:
    drawn = [run(f"import random\nrandom.seed({seed})\nprint(random.random())").printed for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == "0.23796462709189137\n"
