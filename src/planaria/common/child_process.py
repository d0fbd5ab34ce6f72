"""Call a function on untrusted input in a child process with bounded memory and time.

A hostile file can exhaust memory, abort the process, panic in a native library, or never return. In the child, each of
these becomes one :class:`UserError` for the caller.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import IO, Self

from planaria.common.errors import UserError

START_S = 120.0
"""seconds that a child may take to start"""
MIB = 1 << 20
_SIZE = struct.Struct("<Q")
_DONE, _REFUSED = b"+", b"-"
_TAIL = 300
_OUT_OF_MEMORY = ("MemoryError", "memory allocation of", "Cannot allocate memory", "can't allocate memory", "bad_alloc")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Child:
    """A child process that answers calls of one function, ``module:name``, from bytes to bytes.

    Use it as a context manager or keep it: it exits when closed, or when this process exits.
    """

    def __init__(self, function: str, memory: int) -> None:
        """Start the child.

        :param memory: bytes that it may allocate after importing ``function``.
        """
        self._memory = memory
        self._ready = False
        self._turn = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "planaria.common.child_process", function, str(memory), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | _ONE_THREAD,
        )

    def call(self, argument: bytes, seconds: float, location: object, fix: str) -> bytes:
        """Return the function's result for ``argument``. After an error the child is unusable.

        :raises UserError: as raised by the function; or naming ``location`` and ``fix``, if the child exceeds its
            memory or time, or exits.
        """
        with self._turn:
            if not self._ready:
                self._message(None, START_S, location, fix)
                self._ready = True
            return self._message(argument, seconds, location, fix)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _message(self, argument: bytes | None, seconds: float, location: object, fix: str) -> bytes:
        """Send ``argument``, if any, and return the child's next message."""
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            if argument is not None:
                _send(self._process.stdin, argument)
            kind, answer = self._process.stdout.read(1), _receive(self._process.stdout)
        except OSError:  # a broken pipe: it has exited
            kind, answer = b"", None
        finally:
            timer.cancel()
        if answer is None:
            raise UserError(f"{location}: {self._exit_reason(late.is_set(), seconds)}; {fix}")
        if kind == _REFUSED:
            raise UserError(answer.decode(errors="replace"))
        return answer

    def _exit_reason(self, late: bool, seconds: float) -> str:
        code = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - (1 << 16)))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        if late:
            return f"its reader took more than {seconds:.3g} s"
        if any(word in line for line in lines for word in _OUT_OF_MEMORY):
            return f"its reader needs more than {self._memory // MIB} MiB of memory"
        named = [line for line in lines if not line.startswith(" ")] or [f"exit code {code}"]
        return f"its reader ended with {named[-1][-_TAIL:]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def call(function: str, argument: bytes, memory: int, seconds: float, location: object, fix: str) -> bytes:
    """Call ``function`` once in a new child; arguments and errors are those of :class:`Child`."""
    with Child(function, memory) as child:
        return child.call(argument, seconds, location, fix)


def _send(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(_SIZE.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    message = pipe.read(size)
    return message if len(message) == size else None


def _limit_memory(more: int) -> None:
    """Limit this process to ``more`` bytes beyond its current memory, and disable core dumps."""
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        raise UserError("/proc/self/statm cannot be read, so memory cannot be bounded; mount /proc") from None
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Answer calls on standard input until it ends."""
    module, _, name = sys.argv[1].partition(":")
    threading.Thread(target=_exit_after, args=(int(sys.argv[3]),), daemon=True).start()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Keep library output out of the answers, and flush it by line so that it does not follow the error.
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    function = getattr(import_module(module), name)
    try:
        _limit_memory(int(sys.argv[2]))
    except UserError as error:
        answers.write(_REFUSED)
        _send(answers, str(error).encode())
        return
    answers.write(_DONE)
    _send(answers, b"")
    while (argument := _receive(requests)) is not None:
        try:
            kind, answer = _DONE, function(argument)
        except (UserError, OSError) as error:
            kind, answer = _REFUSED, str(error).encode()
        answers.write(kind)
        _send(answers, answer)


if __name__ == "__main__":
    main()
