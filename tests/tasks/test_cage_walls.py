"""Without Landlock a program's files are kept from it in another way, or it is not run: real kernels' answers, by
a filter on system calls that says what an older kernel would say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.swarm.tasks.sandbox import protections

pytestmark = pytest.mark.skipif("seccomp" not in protections(), reason="no seccomp: programs are not run here at all")
LACKING = """
import ctypes, os, struct, sys
from planaria.swarm.tasks import locks
machine = locks.MACHINES[os.uname().machine]
calls = [int(call) for call in sys.argv[1].split(",")]
code = [(locks.LOAD, 0, 0, 0)]
for call in calls:
    code += [(locks.EQUAL, 0, 1, call), (locks.ANSWER, 0, 0, locks.ABSENT)]
code = b"".join(struct.pack("<HBBI", *one) for one in [*code, (locks.ANSWER, 0, 0, locks.ALLOW)])
text = ctypes.create_string_buffer(code, len(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(struct.pack("<QQ", len(code) // 8, ctypes.addressof(text))), 0, 0) == 0
"""
LANDLOCK, UNSHARE = 444, {"x86_64": 272, "aarch64": 97}[os.uname().machine] if hasattr(os, "uname") else 0


def without(calls: list[int], then: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Some Python where the kernel has none of these calls."""
    return subprocess.run(
        [sys.executable, "-c", LACKING + then, ",".join(map(str, calls)), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )


READ = r"""
from planaria.swarm.tasks.sandbox import protections, run
print(*protections())
place, program = sys.argv[2:]
found = run(program, modules={"mine": "word = 'offered'"})
print(found.kind, found.printed, sep="\n")
"""


def test_without_landlock_the_key_is_in_no_file_system_that_a_program_sees(tmp_path: Path) -> None:
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


def test_without_any_wall_no_strangers_program_is_run() -> None:
    ran = without(
        [LANDLOCK, UNSHARE],
        "from planaria.common.errors import UserError\nfrom planaria.swarm.tasks import open_task\n"
        "try:\n    open_task('snippets', {})\nexcept UserError as error:\n    print(error)\n",
    )
    (line,) = ran.stdout.splitlines()
    assert "could read this machine's files, the peer's private key among them" in line
    assert "no Landlock" in line and "user namespaces" in line


def test_where_landlock_is_the_answer_says_so() -> None:
    assert {"landlock", "namespace"} & set(protections())
