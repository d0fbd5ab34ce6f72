"""Running a stranger's program: in a cage of its own, for a bounded time, and with an answer in every case.

One cage a program (``cage.py``), started with Python's standard library alone, an empty environment and a folder that
is empty but for modules it is offered, in its own session, killed with its process group at the time limit. What the
cage takes from it is told in ``locks.py``.

Tests run in another process than the program and get plain values from it, so they cannot be cheated by what the
program does to itself; nor do changes that it makes to what it is given reach them. It may still know its problem: a
program that answers from a table of the inputs it expects passes, if it expects the right ones.

Scores are the same wherever the same version of Python runs them, as far as ``steady.py`` goes. Not beyond: time limits
make a score depend on how busy a machine is, and the existence and the size of files are no secret under Landlock.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import functools
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal, cast

from planaria.common.errors import UserError
from planaria.swarm.tasks import cage, locks, steady, wire

BUILT_IN = frozenset(dir(builtins))


def parsed(source: str) -> ast.Module:
    """Some Python as a tree; an empty one if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in it
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def free_names(source: str, known: Set[str] = BUILT_IN) -> set[str]:
    """Names that some Python reads and nowhere binds, but for those ``known``; none if it is no Python."""
    nodes = list(ast.walk(parsed(source)))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return read - bound - known


@dataclass(frozen=True)
class Exam:
    """How a program is tested: by Python that is not the program's."""

    tests: str
    names: tuple[str, ...]
    """what the tests take from the program"""
    first: str = ""
    """runs before the tests beside them: imports and helpers that they use"""
    setup: str = ""
    """runs behind the program in its own process: what its functions use, or are given that is no plain value"""

    @classmethod
    def of(cls, tests: str) -> Exam:
        """Tests that take from the program each name which they do not bind and Python does not have."""
        return cls(tests, tuple(sorted(free_names(tests))))


INSIDE = (locks, steady, wire)
"""what the cage reads beside itself: imported here, so that Python keeps them compiled"""
MAX_REPORT = 4096
PIECE = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 5.0
    """by the clock; of processor time, one second more"""
    memory: int = 512 << 20
    """bytes of address space"""
    printed: int = 1 << 16
    """bytes on standard output"""
    program: int = 1 << 16
    """bytes of the program itself"""


LIMITS = Limits()
NO_MODULES: Mapping[str, str] = {}
TELL = cage.TELL
"""a function of tests, by which they tell lines of what they found"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. ``ok``: it and its tests ran to their ends; ``failed``: they did not, by their own doing."""

    kind: Literal["ok", "failed", "timeout", "killed"]
    reason: str = ""
    """one line; empty for ok"""
    printed: str = ""
    """what it wrote on standard output, if it ended in time and within bounds"""
    told: tuple[str, ...] = ()
    """lines that its tests told, those before its end if it ended badly; what is beyond 4 KiB is lost"""


def run(
    program: str, tests: str | Exam = "", limits: Limits = LIMITS, modules: Mapping[str, str] = NO_MODULES
) -> Outcome:
    """Run a program and then its tests, both Python, in a cage. Any text at all may come as either: it never raises.

    Without tests, a program may also end by ``sys.exit()``. ``modules``: name → source of what it may import beside
    the standard library; ValueError for a name that is no identifier.
    """
    if odd := [name for name in modules if not name.isidentifier()]:
        raise ValueError(f"{odd[0]!r} is no name of a module")
    return _caged(program, Exam.of(tests) if isinstance(tests, str) else tests, limits, modules)[0]


@functools.cache
def protections() -> tuple[str, ...]:
    """What is in force around a program on this machine, by asking a cage: of limits, privileges, seccomp, and what
    keeps it from reading files, landlock or namespace.

    Without "seccomp", which Linux on x86_64 and aarch64 has, there is no cage at all, and the answer is empty.
    """
    ready, *names = _caged("", Exam.of(""), Limits(seconds=30), NO_MODULES)[1].partition(b"\n")[0].decode(
        "utf-8", "replace"
    ).split() or [""]
    return tuple(names) if ready.encode() == cage.READY else ()


def require_cage(task: str) -> None:
    """:raises UserError: where strangers' programs cannot be locked up, or could read this peer's private key."""
    walls = protections()
    if "seccomp" not in walls:
        raise UserError(f"task {task!r}: strangers' programs can only be locked up on Linux; run it there")
    if not {"landlock", "namespace"} & set(walls):
        raise UserError(
            f"task {task!r}: a stranger's program could read this machine's files, the peer's private key among them: "
            "the kernel has no Landlock (Linux 5.13) and allows no user namespaces; enable either, or run it elsewhere"
        )


def _caged(program: str, exam: Exam, limits: Limits, modules: Mapping[str, str]) -> tuple[Outcome, bytes]:
    """How a program ended, and all that its cage reported."""
    source, setup = (text.encode("utf-8", "surrogatepass") for text in (program, exam.setup))
    if len(source) > limits.program:
        return Outcome("failed", f"the program is longer than {limits.program} bytes"), b""
    word = secrets.token_hex(cage.WORD // 2).encode()
    checks = wire.pack((exam.tests, exam.first, exam.names), wire.nothing_held) if exam.tests else b""
    lengths = (len(source), len(setup), len(checks))
    head = cage.HEAD.pack(*lengths, math.ceil(limits.seconds) + 1, limits.memory)
    try:
        with tempfile.TemporaryDirectory(prefix="planaria-cage-") as folder:
            for name, text in modules.items():
                Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
            process = _start(folder)
            try:
                talk = _Talk(process, head + source + setup + checks + word, limits)
                early = talk.until(time.monotonic() + limits.seconds)
            finally:
                _end(process)
    except OSError as error:
        return Outcome("killed", f"its process could not be started: {error}"), b""
    told, rest = _told(bytes(talk.report))
    return replace(early or _judge(talk, process.returncode, rest, word, limits), told=told), bytes(talk.report)


def _start(folder: str) -> subprocess.Popen[bytes]:
    """A cage that waits for its job. Hashes are seeded, so that a program prints its sets in one order everywhere."""
    interpreter = getattr(sys, "_base_executable", sys.executable)  # a virtual environment's packages are not for it
    with _same_addresses():
        return subprocess.Popen(
            [interpreter, "-P", "-s", "-S", "-B", "-X", "utf8", str(Path(cage.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "TZ": "UTC0"},
            start_new_session=True,
        )


@contextlib.contextmanager
def _same_addresses() -> Iterator[None]:
    """Processes that this thread starts meanwhile have their memory at the same addresses each time.

    Programs see addresses: in ``id``, and in the order of sets of objects. Where it is not allowed nothing changes.
    """
    ask, fixed, unset = getattr(ctypes.CDLL(None), "personality", None), 0x0040000, 0xFFFFFFFF
    before = -1 if ask is None else ask(unset)
    if ask is None or before < 0 or ask(before | fixed) < 0:
        yield
        return
    try:
        yield
    finally:
        ask(before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a cage and whatever else were in its group, and wait for its end."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the cage was gone before it had read all of its job
                pipe.close()
    process.wait()


class _Talk:
    """The three pipes of a cage: the job goes in, what is printed and what is reported comes out, within bounds."""

    def __init__(self, process: subprocess.Popen[bytes], job: bytes, limits: Limits) -> None:
        self.process = process
        self.job = memoryview(job)
        self.limits = limits
        self.printed = bytearray()
        self.report = bytearray()

    def until(self, deadline: float) -> Outcome | None:
        """Carry on until the cage has said all; an outcome if it went beyond a bound."""
        job, out, err = (cast(IO[bytes], p) for p in (self.process.stdin, self.process.stdout, self.process.stderr))
        with selectors.DefaultSelector() as ready:
            for pipe, event in ((job, selectors.EVENT_WRITE), (out, selectors.EVENT_READ), (err, selectors.EVENT_READ)):
                os.set_blocking(pipe.fileno(), False)
                ready.register(pipe, event)
            while out in ready.get_map() or err in ready.get_map():
                left = deadline - time.monotonic()
                for key, _ in ready.select(left) if left > 0 else ():
                    pipe = cast(IO[bytes], key.fileobj)
                    if (
                        self._sent(pipe)
                        if pipe is job
                        else self._ended(pipe, self.printed if pipe is out else self.report)
                    ):
                        ready.unregister(pipe)
                if len(self.printed) > self.limits.printed or len(self.report) > MAX_REPORT:
                    return Outcome("killed", f"it printed more than {self.limits.printed} bytes")
                if left <= 0:
                    return _too_late(self.limits)
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return _too_late(self.limits)
        return None

    def _sent(self, pipe: IO[bytes]) -> bool:
        """Whether all of the job is sent, or the cage will read no more of it."""
        try:
            self.job = self.job[os.write(pipe.fileno(), self.job[:PIECE]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            return True
        return not self.job

    def _ended(self, pipe: IO[bytes], into: bytearray) -> bool:
        """Whether the cage has closed a pipe; what stands in it is added to ``into``."""
        try:
            piece = os.read(pipe.fileno(), PIECE)
        except BlockingIOError:
            return False
        into += piece
        return not piece


def _told(report: bytes) -> tuple[tuple[str, ...], bytes]:
    """The lines that tests told, and a cage's report without them. A last line that broke off is none."""
    ready, end, rest = report.partition(b"\n")
    told = []
    while rest.startswith(cage.TOLD) and b"\n" in rest:
        line, _, rest = rest.partition(b"\n")
        told.append(line.removeprefix(cage.TOLD).decode("utf-8", "replace"))
    return tuple(told), ready + end + rest


def _judge(talk: _Talk, status: int, report: bytes, word: bytes, limits: Limits) -> Outcome:
    """The outcome of a cage that ended by itself."""
    ready, _, said = report.partition(b"\n")
    printed = talk.printed.decode("utf-8", "replace")
    if not ready.startswith(cage.READY):
        return Outcome("killed", "its process could not be locked up: " + _line(talk.report[-300:]))
    if said == word and status == 0:
        return Outcome("ok", printed=printed)
    died = -status if status < 0 else max(0, status - cage.SIGNALLED)
    if died == signal.SIGXCPU:
        return _too_late(limits)
    if died:
        return Outcome("killed", f"it died of signal {died}")
    return Outcome("failed", _line(said) or f"it ended with status {status} before its tests had run", printed)


def _too_late(limits: Limits) -> Outcome:
    return Outcome("timeout", f"it was not done after {limits.seconds:g} s")


def _line(said: bytes | bytearray) -> str:
    """Bytes from a cage as one printable line."""
    return " ".join("".join(c if c.isprintable() else " " for c in said.decode("utf-8", "replace")).split())
