"""Run ``planaria`` in a separate process, forked so that torch is not imported again for each test."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from planaria.cli import main
from planaria.common.signals import STOPS
from planaria.config import consent
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet import spawner

_PRELOAD = [*PRELOAD, "planaria.runtime.api.training", "planaria.swarm.swarm_processes"]
_START_S = 120.0
_AT_ONCE = 1 << 16


class Command:
    """A running ``planaria`` command in a new session, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, *words: str | Path, cwd: Path | None = None) -> None:
        (self.stdout, out), (self.stderr, errors) = os.pipe(), os.pipe()
        self._output = {self.stdout: bytearray(), self.stderr: bytearray()}
        self._open = [self.stdout, self.stderr]
        run = partial(_be_planaria, [str(word) for word in words], dict(os.environ))
        self._child = spawner.spawner().spawn("planaria", run, _PRELOAD, [out, errors], cwd=cwd)
        try:
            self.pid = self._child.wait_until_started(_START_S)
        except OSError:
            self.close()
            raise

    @property
    def returncode(self) -> int | None:
        return self._child.exitcode

    def poll(self) -> int | None:
        return self._child.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        self._child.signal(number)

    def terminate(self) -> None:
        self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """:raises subprocess.TimeoutExpired: if it is still running."""
        code = self._child.join(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("planaria", timeout or 0.0)
        return code

    def line(self, timeout: float = 60.0) -> str:
        """Return the next printed line; empty at the end of output.

        :raises subprocess.TimeoutExpired: without output in time.
        """
        output = self._output[self.stdout]
        while b"\n" not in output and self.stdout in self._open:
            self._read(timeout)
        end = output.find(b"\n") + 1 or len(output)
        line = bytes(output[:end]).decode()
        del output[:end]
        return line

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return what it wrote to stdout and to stderr since the last call.

        :raises subprocess.TimeoutExpired: if it is still running.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self._open:
            self._read(None if until is None else max(0.0, until - time.monotonic()))
        self.wait(None if until is None else max(1.0, until - time.monotonic()))
        printed, errors = (bytes(output).decode() for output in self._output.values())
        for output in self._output.values():
            output.clear()
        return printed, errors

    def close(self) -> None:
        """Close this end of its output."""
        while self._open:
            os.close(self._open.pop())

    def _read(self, timeout: float | None) -> None:
        ready, _, _ = select.select(self._open, [], [], timeout)
        if not ready:
            raise subprocess.TimeoutExpired("planaria", timeout or 0.0)
        for pipe in ready:
            if more := os.read(pipe, _AT_ONCE):
                self._output[pipe] += more
            else:
                os.close(pipe)
                self._open.remove(pipe)


def _be_planaria(words: list[str], environ: dict[str, str], out: int, errors: int) -> None:
    """Run the command in the new process, much as a new interpreter would. It ends without exit handlers."""
    os.setsid()
    consent._open, consent._modules = 0, set()
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    for pipe, number in ((out, 1), (errors, 2)):
        os.dup2(pipe, number)
        os.close(pipe)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115 (they stay)
    spawner.expect_fork()
    main(words)


def planaria(*words: str | Path, cwd: Path | None = None, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Run ``planaria`` with these arguments to its end."""
    process = Command(*words, cwd=cwd)
    try:
        printed, errors = process.communicate(timeout)
    finally:
        process.kill()
        process.close()
    return subprocess.CompletedProcess(words, process.wait(1.0), printed, errors)
