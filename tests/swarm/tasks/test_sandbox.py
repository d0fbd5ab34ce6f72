"""Every untrusted program ends in one of four ways and reaches nothing outside its sandbox."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.swarm.sandbox import kernel_limits, process
from planaria.swarm.sandbox.sandbox import LIMITS, Limits, ProgramResult, protections, run
from support.swarm.task_builders import needs_sandbox

pytestmark = needs_sandbox
landlocked = pytest.mark.skipif("landlock" not in protections(), reason="this kernel has no Landlock")
SHORT = Limits(seconds=0.4)


def failure(program: str, tests: str = "") -> str:
    """The reason of a program that failed."""
    outcome = run(program, tests)
    assert outcome.kind == "failed", outcome
    return outcome.reason


def test_a_program_that_passes_its_tests_is_ok() -> None:
    outcome = run("def double(x):\n    return 2 * x\nprint('so')", "assert double(3) == 6")
    assert outcome == ProgramResult("ok", printed="so\n")


def test_programs_can_use_the_standard_library_and_threads() -> None:
    program = """
import collections, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, math
import random, re, statistics, string, threading, typing
@dataclasses.dataclass
class Pair:
    a: "typing.List[int]"
found = []
thread = threading.Thread(target=found.append, args=[hashlib.sha256(b"").hexdigest()[:4]])
thread.start()
thread.join()
print(found[0], Pair([1]), __name__, datetime.datetime.now().year > 2000, random.random() < 1)
"""
    assert run(program).printed == "e3b0 Pair(a=[1]) __main__ True True\n"


@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        ("x = 2", "assert x == 1", "tests: AssertionError:"),
        ("x = ", "", "program: SyntaxError"),
        ("1 / 0", "", "program: ZeroDivisionError: division by zero"),
        ("import nothing_of_that_name", "", "program: ModuleNotFoundError"),
        ("import planaria", "", "program: ModuleNotFoundError"),
        ("raise KeyboardInterrupt", "", "program: KeyboardInterrupt"),
        ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "", "program: an exception without a message"),
        ("raise ValueError('a\\nb\\x1b[0m')", "", "program: ValueError: a b [0m"),
        ("\ud800", "", "program: SyntaxError"),
        ("\0", "", "program: SyntaxError"),
        ("import sys; sys.stdout.close()", "", "program: ValueError"),
        ("x" * (LIMITS.program + 1), "", f"the program is longer than {LIMITS.program} bytes"),
        ("y" * 100 + " = 1", "1 / 0\n#" + "z" * 300_000, "tests: ZeroDivisionError"),
    ],
)
def test_a_failure_is_reported_in_one_line(program: str, tests: str, reason: str) -> None:
    message = failure(program, tests)
    assert message.startswith(reason) and message.isprintable()


def test_the_token_of_a_pass_cannot_be_found() -> None:
    program = f"""
import gc, os, sys
frame, seen = sys._getframe(), [*sys.argv, *os.environ.values(), *gc.get_objects()]
while frame:
    seen += [*frame.f_locals.values(), *frame.f_globals.values()]
    frame = frame.f_back
print([x for x in seen if isinstance(x, (str, bytes)) and len(x) == {process.TOKEN} and x.isalnum()])
"""
    assert run(program, "pass").printed == "[]\n"


def test_without_tests_a_program_may_exit() -> None:
    assert run("import sys\nprint(7)\nsys.exit()") == ProgramResult("ok", printed="7\n")
    assert failure("import sys; sys.exit(1)") == "program: SystemExit: 1"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import threading; threading.Event().wait()",
        "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
        "while True: pass",
        "import os\nfor n in range(64):\n  try: os.close(n)\n  except OSError: pass\nwhile True: pass",
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    ],
)
def test_an_endless_program_is_killed(program: str) -> None:
    assert run(program, limits=SHORT) == ProgramResult("timeout", "it was not done after 0.4 s")


def test_a_crash_is_reported_by_its_signal() -> None:
    assert run("import faulthandler; faulthandler._read_null()") == ProgramResult("killed", "it died of signal 11")


@pytest.mark.parametrize("program", ["x = 'a' * 10**10", "x = []\nwhile True: x.append('a' * 10**7)"])
def test_memory_is_bounded(program: str) -> None:
    assert failure(program) == "program: MemoryError:"


def test_output_is_bounded() -> None:
    flood = "import os\nfor _ in range(2**14): os.write(1, b'a' * 2**16)"
    assert run(flood) == ProgramResult("killed", "it printed more than 65536 bytes")
    assert run("print('a' * 65535)").kind == "ok"
    assert run("import sys; sys.stdout.buffer.write(b'\\xff')") == ProgramResult(
        "ok", printed="\N{REPLACEMENT CHARACTER}"
    )


def attempts(*lines: str) -> dict[str, str]:
    """The error of each line of Python run in a sandbox, or "done"."""
    program = f"""
import fcntl, mmap, multiprocessing, os, resource, signal, socket, subprocess, threading, time
for line in {lines!r}:
    try:
        exec(line)
        print("done")
    except OSError as error:
        print(type(error).__name__, error.errno)
"""
    outcome = run(program)
    assert outcome.kind == "ok", outcome
    return dict(zip(lines, outcome.printed.splitlines(), strict=True))


def test_a_program_cannot_affect_anything_outside() -> None:
    came_to = attempts(
        "for _ in range(20):\n  if not os.fork(): os._exit(0)",
        "if not os.fork():\n  os.setsid()\n  if not os.fork(): time.sleep(5)",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['true'])",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "os.setsid()",
        "os.kill(os.getppid(), 0)",
        "signal.pthread_kill(threading.get_ident(), 0)",
        "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.create_connection(('127.0.0.1', 9))",
        "socket.socketpair()",
        "open('here', 'w')",
        "open('/dev/null', 'r+')",
        "os.mkdir('here')",
        "os.chmod('.', 0)",
        "os.symlink('/', 'here')",
        "os.chown('.', 1, 1)",
        "os.truncate(os.__file__, 0)",
        "os.remove('no such file')",
        "os.rename('no such file', 'there')",
        "os.utime('.')",
        "os.chdir('/')",
        "resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
        "os.nice(1)",
        "os.memfd_create('here')",
        "mmap.mmap(-1, 2**31)",
        "time.sleep(0)",
    )
    *touched, harmless = came_to.items()
    assert harmless[1] == "done"
    refused = {"PermissionError 13", "OSError 38", "OSError 12"}
    assert [line for line, answer in touched if answer not in refused] == []


@landlocked
def test_a_program_cannot_read_the_host_s_files() -> None:
    files = ["/etc/passwd", "/proc/self/environ", f"/proc/{os.getpid()}/environ", "/dev/zero", __file__]
    folders = [".", "/tmp", "/", "/proc", str(Path(__file__).parent)]
    looks = [f"open({place!r})" for place in files] + [f"os.listdir({place!r})" for place in folders]
    assert set(attempts(*looks).values()) == {"PermissionError 13"}


def test_a_program_sees_nothing_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "word")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = run("import os, sys\nprint(dict(os.environ), os.path.dirname(os.getcwd()), sys.argv[1:], len(sys.path))")
    assert outcome.printed.split() == ["{}", "/", "[]", "3"]
    assert not run("import sys\nprint([p for p in sys.path if 'site-packages' in p])").printed.strip("[]\n")


def test_only_offered_modules_can_be_imported() -> None:
    modules = {"mine": "import yours\ndef add(a, b):\n    return a + b + yours.more\n", "yours": "more = 1"}
    assert run("import mine\nprint(mine.add(2, 3))", modules=modules) == ProgramResult("ok", printed="6\n")
    assert run("", "from mine import add\nassert add(0, 0) == 1", modules=modules).kind == "ok"
    assert failure("import mine").startswith("program: ModuleNotFoundError")
    assert run("import theirs", modules=modules).reason.startswith("program: ModuleNotFoundError")


def test_an_offered_module_cannot_shadow_the_standard_library() -> None:
    program = "import string, colorsys\nprint(string.digits)"
    assert run(program, modules={"string": "digits = 'mine'", "colorsys": "1 / 0"}).printed == "0123456789\n"


@landlocked
def test_offering_modules_does_not_make_other_files_readable() -> None:
    looks = [f"open({place!r})" for place in ("/etc/passwd", "/proc/self/environ", __file__)]
    looks += ["os.listdir('..')"]
    program = f"import os\nfor look in {looks!r}:\n  try:\n    exec(look)\n    print('done')\n"
    program += "  except PermissionError: pass\n"
    assert run(program, modules={"mine": ""}) == ProgramResult("ok")


@pytest.mark.parametrize("name", ["../mine", "a.b", "", "/etc/mine"])
def test_an_invalid_module_name_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="not a name of a module"):
        run("", modules={name: ""})


def test_every_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for program in ("", "1 / 0", "while True: pass", "import os; os._exit(1)"):
        run(program, limits=Limits(seconds=0.3), modules={"mine": ""})
    assert not list(tmp_path.iterdir())


def test_a_cage_that_cannot_start_is_an_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys._base_executable", str(tmp_path / "python"), raising=False)
    assert run("").reason.startswith("its process could not be started")
    monkeypatch.setattr("sys._base_executable", "/bin/true", raising=False)
    assert run("").reason.startswith("its process could not be confined")


def test_the_restrictions_in_force_are_reported() -> None:
    assert {"limits", "privileges", "seccomp"} <= set(protections())
    assert {"landlock", "namespace"} & set(protections())


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(exclude_categories=())))
def test_no_text_raises(text: str) -> None:
    assert run(text, limits=SHORT).kind in ("ok", "failed", "timeout", "killed")


def carry_out(code: bytes, audit: int, call: int, arguments: list[int]) -> int:
    """The result of a seccomp filter, by an interpreter of the BPF instructions it uses."""
    data = struct.pack("<IIQ6Q", call, audit, 0, *(arguments + [0] * 6)[:6])
    instructions, at, value = list(struct.iter_unpack("<HBBI", code)), 0, 0
    while True:
        kind, where_true, where_false, constant = instructions[at]
        at += 1
        if kind == kernel_limits.ANSWER:
            return constant
        if kind == kernel_limits.LOAD:
            (value,) = struct.unpack_from("<I", data, constant)
        else:
            holds = {
                kernel_limits.EQUAL: value == constant,
                kernel_limits.ABOVE: value > constant,
                kernel_limits.ANY_BIT: bool(value & constant),
            }
            at += where_true if holds[kind] else where_false


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        # execve, execveat, socket, kill, tgkill, ptrace, unlinkat, fchmodat, openat2, clone3, io_uring_setup, setrlimit
        ("x86_64", [59, 322, 41, 62, 234, 101, 263, 268, 437, 435, 425, 160]),
        ("aarch64", [221, 281, 198, 129, 131, 117, 35, 53, 437, 435, 425, 164]),
    ],
)
def test_the_filter_allows_only_listed_calls(name: str, calls: list[int]) -> None:
    machine = kernel_limits.MACHINES[name]
    code = kernel_limits.seccomp_filter(machine)

    def answer(call: int, *arguments: int) -> int:
        return carry_out(code, machine.audit, call, list(arguments))

    assert {answer(call) for call in machine.allowed.values()} == {kernel_limits.ALLOW}
    assert {answer(call) for call in (*calls, 2**30 + 59, 10**6)} == {kernel_limits.ABSENT}
    assert carry_out(code, 0x40000003, 3, []) == kernel_limits.KILL
    assert answer(machine.clone, 0x10F00) == kernel_limits.ALLOW
    assert answer(machine.clone, 17) == kernel_limits.REFUSED
    openat, fcntl = {"x86_64": (257, 72), "aarch64": (56, 25)}[name]
    assert answer(openat, 0, 0, os.O_CLOEXEC) == kernel_limits.ALLOW
    for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC):
        assert answer(openat, 0, 0, flag | os.O_CLOEXEC) == kernel_limits.REFUSED
    assert (answer(fcntl, 1, 3), answer(fcntl, 1, 10)) == (kernel_limits.ALLOW, kernel_limits.REFUSED)
