"""Running a stranger's program: in a cage of its own, for a bounded time, and with an answer in every case.

One process a program (``cage.py``), started with Python's standard library alone, an empty environment and a folder
that is empty but for modules it is offered, in its own session, killed with its process group at the time limit. What
the cage takes from it is told there.

Not protected: the tests run in the same process as the program, as they must to call its functions. The proof that they
passed is a word that is not in the process until then, so that leaving early proves nothing; but a program written to
cheat can do so, for instance with an object that says it equals everything, or by reading the word off the pipe itself.
Nor are the existence and the size of files a secret. Time limits make a score depend on how busy a machine is.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from planaria.tasks import cage

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


@dataclass(frozen=True)
class Outcome:
    """How a program ended. ``ok``: it and its tests ran to their ends; ``failed``: they did not, by their own doing."""

    kind: Literal["ok", "failed", "timeout", "killed"]
    reason: str = ""
    """one line; empty for ok"""
    printed: str = ""
    """what it wrote on standard output, if it ended in time and within bounds"""


def run(program: str, tests: str = "", limits: Limits = LIMITS, modules: Mapping[str, str] = NO_MODULES) -> Outcome:
    """Run a program and then its tests, both Python, in a cage. Any text at all may come as either: it never raises.

    Without tests, a program may also end by ``sys.exit()``. ``modules``: name → source of what it may import beside
    the standard library; ValueError for a name that is no identifier.
    """
    if odd := [name for name in modules if not name.isidentifier()]:
        raise ValueError(f"{odd[0]!r} is no name of a module")
    return _caged(program, tests, limits, modules)[0]


@functools.cache
def protections() -> tuple[str, ...]:
    """What is in force around a program on this machine, by asking a cage: of limits, privileges, seccomp, landlock.

    Without "seccomp", which Linux on x86_64 and aarch64 has, there is no cage at all, and the answer is empty.
    """
    ready, *names = _caged("", "", Limits(seconds=30), NO_MODULES)[1].partition(b"\n")[0].decode(
        "utf-8", "replace"
    ).split() or [""]
    return tuple(names) if ready.encode() == cage.READY else ()


def _caged(program: str, tests: str, limits: Limits, modules: Mapping[str, str]) -> tuple[Outcome, bytes]:
    """How a program ended, and all that its cage reported."""
    source, checks = (text.encode("utf-8", "surrogatepass") for text in (program, tests))
    if len(source) > limits.program:
        return Outcome("failed", f"the program is longer than {limits.program} bytes"), b""
    word = secrets.token_hex(cage.WORD // 2).encode()
    head = cage.HEAD.pack(len(source), len(checks), math.ceil(limits.seconds) + 1, limits.memory)
    try:
        with tempfile.TemporaryDirectory(prefix="planaria-cage-") as folder:
            for name, text in modules.items():
                Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
            process = _start(folder)
            try:
                talk = _Talk(process, head + source + checks + word, limits)
                early = talk.until(time.monotonic() + limits.seconds)
            finally:
                _end(process)
    except OSError as error:
        return Outcome("killed", f"its process could not be started: {error}"), b""
    return early or _judge(talk, process.returncode, word, limits), bytes(talk.report)


def _start(folder: str) -> subprocess.Popen[bytes]:
    """A cage that waits for its job. Hashes are seeded, so that a program prints its sets in one order everywhere."""
    interpreter = getattr(sys, "_base_executable", sys.executable)  # a virtual environment's packages are not for it
    return subprocess.Popen(
        [interpreter, "-P", "-s", "-S", "-B", "-X", "utf8", str(Path(cage.__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={"PYTHONHASHSEED": "0"},
        start_new_session=True,
    )


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


def _judge(talk: _Talk, status: int, word: bytes, limits: Limits) -> Outcome:
    """The outcome of a cage that ended by itself."""
    ready, _, said = bytes(talk.report).partition(b"\n")
    printed = talk.printed.decode("utf-8", "replace")
    if not ready.startswith(cage.READY):
        return Outcome("killed", "its process could not be locked up: " + _line(talk.report[-300:]))
    if said == word and status == 0:
        return Outcome("ok", printed=printed)
    if status == -signal.SIGXCPU:
        return _too_late(limits)
    if status < 0:
        return Outcome("killed", f"it died of signal {-status}")
    return Outcome("failed", _line(said) or f"it ended with status {status} before its tests had run", printed)


def _too_late(limits: Limits) -> Outcome:
    return Outcome("timeout", f"it was not done after {limits.seconds:g} s")


def _line(said: bytes | bytearray) -> str:
    """Bytes from a cage as one printable line."""
    return " ".join("".join(c if c.isprintable() else " " for c in said.decode("utf-8", "replace")).split())
