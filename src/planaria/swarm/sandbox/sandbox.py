"""Run an untrusted program in a sandbox for a bounded time, with an outcome in every case.

Each program has its own sandbox (``process.py``): a Python process with the standard library alone, an empty
environment, a folder with nothing but the offered modules, and its own session. Its process group is killed at the time
limit. ``kernel_limits.py`` lists what it cannot do.

Tests run in another process and receive plain values, so a program cannot manipulate them, nor can its changes to its
arguments reach them. A program that recognizes the inputs can still return stored answers.

Scores are equal on every machine with the same Python version, within the limits of ``determinism.py``. Time limits
make a score depend on the machine's load. Under Landlock the existence and size of files remain visible.
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
from planaria.common.printing import printable_line
from planaria.swarm.sandbox import channel, determinism, kernel_limits, process

BUILT_IN = frozenset(dir(builtins))


def parse_python(source: str) -> ast.Module:
    """Return the syntax tree of Python source; an empty module if the source is invalid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the source
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def free_names(source: str, known: Set[str] = BUILT_IN) -> set[str]:
    """Return names that the source reads and never binds, except ``known``; none if the source is invalid."""
    nodes = list(ast.walk(parse_python(source)))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return read - bound - known


@dataclass(frozen=True)
class ProgramTests:
    """Tests of a program: Python that the program does not provide."""

    tests: str
    names: tuple[str, ...]
    """names that the tests take from the program"""
    first: str = ""
    """source run before the tests in their process: imports and helpers"""
    setup: str = ""
    """source run behind the program in its process: values its functions use that are not plain"""

    @classmethod
    def of(cls, tests: str) -> ProgramTests:
        """Return an exam whose names are the free names of the tests."""
        return cls(tests, tuple(sorted(free_names(tests))))


INSIDE = (kernel_limits, determinism, channel)
"""modules that the sandbox loads as files; imported here so that Python caches their bytecode"""
MAX_REPORT = 4096
PIECE = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program."""

    seconds: float = 5.0
    """wall clock; processor time is limited to one second more"""
    memory: int = 512 << 20
    """bytes of address space"""
    printed: int = 1 << 16
    """bytes on standard output"""
    program: int = 1 << 16
    """bytes of the program itself"""


LIMITS = Limits()
NO_MODULES: Mapping[str, str] = {}
REPORT = process.REPORT
"""name of the function with which tests report a line"""


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program: ``ok`` if it and its tests ran to their ends, ``failed`` if either raised or exited."""

    kind: Literal["ok", "failed", "timeout", "killed"]
    reason: str = ""
    """one line; empty for ``ok``"""
    printed: str = ""
    """standard output, if the program ended within time and bounds"""
    reported: tuple[str, ...] = ()
    """lines reported by the tests, before a failure too; at most 4 KiB"""


def run(
    program: str, tests: str | ProgramTests = "", limits: Limits = LIMITS, modules: Mapping[str, str] = NO_MODULES
) -> ProgramResult:
    """Run a program and then its tests in a sandbox; both may be any text.

    Without tests, a program may also end by ``sys.exit()``. ``modules`` maps names to the source of importable modules.

    :raises ValueError: if a module's name is not an identifier.
    """
    if invalid := [name for name in modules if not name.isidentifier()]:
        raise ValueError(f"{invalid[0]!r} is not a name of a module")
    return _run_program(program, ProgramTests.of(tests) if isinstance(tests, str) else tests, limits, modules)[0]


@functools.cache
def protections() -> tuple[str, ...]:
    """Return the restrictions in force: limits, privileges, seccomp, landlock or namespace; none without seccomp."""
    ready, *names = _run_program("", ProgramTests.of(""), Limits(seconds=30), NO_MODULES)[1].partition(b"\n")[0].decode(
        "utf-8", "replace"
    ).split() or [""]
    return tuple(names) if ready.encode() == process.READY else ()


def require_sandbox(task: str) -> None:
    """:raises UserError: if programs cannot be confined, or could read this peer's private key."""
    walls = protections()
    if "seccomp" not in walls:
        raise UserError(f"task {task!r}: untrusted programs can be confined on Linux only; run it there")
    if not {"landlock", "namespace"} & set(walls):
        raise UserError(
            f"task {task!r}: an untrusted program could read this machine's files, the peer's private key among them: "
            "the kernel has no Landlock (Linux 5.13) and allows no user namespaces; enable either, or run it elsewhere"
        )


def _run_program(
    program: str, exam: ProgramTests, limits: Limits, modules: Mapping[str, str]
) -> tuple[ProgramResult, bytes]:
    """Run a program and return its outcome with the sandbox's full report."""
    source, setup = (text.encode("utf-8", "surrogatepass") for text in (program, exam.setup))
    if len(source) > limits.program:
        return ProgramResult("failed", f"the program is longer than {limits.program} bytes"), b""
    token = secrets.token_hex(process.TOKEN // 2).encode()
    checks = channel.pack((exam.tests, exam.first, exam.names), channel.reject_object) if exam.tests else b""
    lengths = (len(source), len(setup), len(checks))
    head = process.HEAD.pack(*lengths, math.ceil(limits.seconds) + 1, limits.memory)
    try:
        with tempfile.TemporaryDirectory(prefix="planaria-sandbox-") as folder:
            for name, text in modules.items():
                Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
            child = _start(folder)
            try:
                pipes = _Pipes(child, head + source + setup + checks + token, limits)
                early = pipes.until(time.monotonic() + limits.seconds)
            finally:
                _kill(child)
    except OSError as error:
        return ProgramResult("killed", f"its process could not be started: {error}"), b""
    reported, rest = _split_report(bytes(pipes.report))
    outcome = early or _classify(pipes, child.returncode, rest, token, limits)
    return replace(outcome, reported=reported), bytes(pipes.report)


def _start(folder: str) -> subprocess.Popen[bytes]:
    """Start a sandbox. Hashes are seeded so that sets have one order on every machine."""
    interpreter = getattr(sys, "_base_executable", sys.executable)  # without a virtual environment's packages
    with _same_addresses():
        return subprocess.Popen(
            [interpreter, "-P", "-s", "-S", "-B", "-X", "utf8", str(Path(process.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "TZ": "UTC0"},
            start_new_session=True,
        )


@contextlib.contextmanager
def _same_addresses() -> Iterator[None]:
    """Disable address randomization for processes this thread starts; do nothing if that is not allowed.

    Programs observe addresses in ``id`` and in the order of sets of objects.
    """
    ask = getattr(ctypes.CDLL(None), "personality", None)
    fixed = 0x0040000
    unset = 0xFFFFFFFF
    before = -1 if ask is None else ask(unset)
    if ask is None or before < 0 or ask(before | fixed) < 0:
        yield
        return
    try:
        yield
    finally:
        ask(before)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the sandbox exited before it had read its whole job
                pipe.close()
    process.wait()


class _Pipes:
    """The three pipes of a sandbox: the job goes in, output and report come out, within bounds."""

    def __init__(self, process: subprocess.Popen[bytes], job: bytes, limits: Limits) -> None:
        self.process = process
        self.job = memoryview(job)
        self.limits = limits
        self.printed = bytearray()
        self.report = bytearray()

    def until(self, deadline: float) -> ProgramResult | None:
        """Exchange data until the sandbox closes its pipes; return an outcome if it exceeded a bound."""
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
                        self._send_job(pipe)
                        if pipe is job
                        else self._read_into(pipe, self.printed if pipe is out else self.report)
                    ):
                        ready.unregister(pipe)
                if len(self.printed) > self.limits.printed or len(self.report) > MAX_REPORT:
                    return ProgramResult("killed", f"it printed more than {self.limits.printed} bytes")
                if left <= 0:
                    return _timeout(self.limits)
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return _timeout(self.limits)
        return None

    def _send_job(self, pipe: IO[bytes]) -> bool:
        """Return whether the job is sent, or the sandbox has closed its input."""
        try:
            self.job = self.job[os.write(pipe.fileno(), self.job[:PIECE]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            return True
        return not self.job

    def _read_into(self, pipe: IO[bytes], into: bytearray) -> bool:
        """Append available data to ``into``; return whether the sandbox has closed the pipe."""
        try:
            piece = os.read(pipe.fileno(), PIECE)
        except BlockingIOError:
            return False
        into += piece
        return not piece


def _split_report(report: bytes) -> tuple[tuple[str, ...], bytes]:
    """Split a sandbox's report into the complete lines reported by tests and the rest."""
    ready, end, rest = report.partition(b"\n")
    lines = []
    while rest.startswith(process.REPORTED) and b"\n" in rest:
        line, _, rest = rest.partition(b"\n")
        lines.append(line.removeprefix(process.REPORTED).decode("utf-8", "replace"))
    return tuple(lines), ready + end + rest


def _classify(pipes: _Pipes, status: int, report: bytes, token: bytes, limits: Limits) -> ProgramResult:
    """Return the outcome of a sandbox that ended within its bounds."""
    ready, _, message = report.partition(b"\n")
    printed = pipes.printed.decode("utf-8", "replace")
    if not ready.startswith(process.READY):
        return ProgramResult("killed", "its process could not be confined: " + _line(pipes.report[-300:]))
    if message == token and status == 0:
        return ProgramResult("ok", printed=printed)
    died = -status if status < 0 else max(0, status - process.SIGNALLED)
    if died == signal.SIGXCPU:
        return _timeout(limits)
    if died:
        return ProgramResult("killed", f"it died of signal {died}")
    return ProgramResult("failed", _line(message) or f"it ended with status {status} before its tests had run", printed)


def _timeout(limits: Limits) -> ProgramResult:
    return ProgramResult("timeout", f"it was not done after {limits.seconds:g} s")


def _line(message: bytes | bytearray) -> str:
    return printable_line(message.decode("utf-8", "replace"))
