"""The sandbox on kernels without Landlock, simulated by a system call filter, and its determinism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.swarm.sandbox.sandbox import run
from support.swarm.task_builders import needs_sandbox

pytestmark = needs_sandbox
LACKING = """
import ctypes, os, struct, sys
from planaria.swarm.sandbox import kernel_limits
machine = kernel_limits.MACHINES[os.uname().machine]
calls = [int(call) for call in sys.argv[1].split(",")]
code = [(kernel_limits.LOAD, 0, 0, 0)]
for call in calls:
    code += [(kernel_limits.EQUAL, 0, 1, call), (kernel_limits.ANSWER, 0, 0, kernel_limits.ABSENT)]
code = b"".join(struct.pack("<HBBI", *one) for one in [*code, (kernel_limits.ANSWER, 0, 0, kernel_limits.ALLOW)])
text = ctypes.create_string_buffer(code, len(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(struct.pack("<QQ", len(code) // 8, ctypes.addressof(text))), 0, 0) == 0
"""
LANDLOCK, UNSHARE = 444, {"x86_64": 272, "aarch64": 97}[os.uname().machine] if hasattr(os, "uname") else 0


def without(calls: list[int], then: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a kernel without these system calls."""
    return subprocess.run(
        [sys.executable, "-c", LACKING + then, ",".join(map(str, calls)), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )


READ = r"""
from planaria.swarm.sandbox.sandbox import protections, run
print(*protections())
place, program = sys.argv[2:]
found = run(program, modules={"mine": "word = 'offered'"})
print(found.kind, found.printed, sep="\n")
"""


@pytest.mark.slow
def test_without_landlock_a_program_sees_a_file_system_without_the_key(tmp_path: Path) -> None:
    key = tmp_path / "identity.pem"
    key.write_text("PRIVATE KEY")
    program = f"""
import mine, os, json, decimal
print(mine.word)
for place in {str(key)!r}, "/etc/passwd", "/proc/self/environ", "/proc/1/environ", "..", "/root", "/home":
    try:
        print(place, open(place).read() if os.path.isfile(place) else os.listdir(place))
    except OSError:
        pass
for number in range(64):
    try:
        print(os.listdir(number), os.stat("identity.pem", dir_fd=number))
    except OSError:
        pass
print(sorted(set(os.listdir("/")) & {{"proc", "home", "mnt", "opt", "var", "sys"}}))
"""
    ran = without([LANDLOCK], READ, str(key), program)
    walls, kind, offered, *seen = ran.stdout.splitlines()
    if "namespace" not in walls:
        pytest.skip("this kernel allows no user namespaces")
    assert (kind, offered) == ("ok", "offered")
    assert "PRIVATE" not in ran.stdout and not [line for line in seen if line.startswith(("['", "("))], ran.stdout


@pytest.mark.slow
def test_without_landlock_and_namespaces_no_program_is_run() -> None:
    ran = without(
        [LANDLOCK, UNSHARE],
        "from planaria.common.errors import UserError\nfrom planaria.swarm.tasks import open_task\n"
        "try:\n    open_task('snippets', {})\nexcept UserError as error:\n    print(error)\n",
    )
    (line,) = ran.stdout.splitlines()
    assert "could read this machine's files, the peer's private key among them" in line
    assert "no Landlock" in line and "user namespaces" in line


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


def test_two_cages_print_the_same_values_of_unsteady_sources() -> None:
    first, second = (run(PROGRAM) for _ in range(2))
    assert first.kind == "ok", first.reason
    ours, theirs = first.printed.splitlines(), second.printed.splitlines()
    assert len(ours) == len(UNSTEADY)
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == []


@pytest.mark.slow
def test_a_process_in_another_environment_prints_the_same(tmp_path: Path) -> None:
    code = "from planaria.swarm.sandbox.sandbox import run\nimport sys\nprint(run(sys.stdin.read()).printed, end='')"
    other = subprocess.run(
        [sys.executable, "-c", code],
        input=PROGRAM,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path), "PYTHONHASHSEED": "7"},
    )
    assert other.stdout == run(PROGRAM).printed != "", other.stderr


def test_the_clock_advances_and_sleeping_returns_at_once() -> None:
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
