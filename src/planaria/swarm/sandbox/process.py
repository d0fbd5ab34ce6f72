"""Sandbox for an untrusted program, started as a script; imports nothing of planaria.

One process runs the program. A second process, the judge, runs the tests and accepts only plain values from the program
(``channel.py``). Both are confined (``kernel_limits.py``) and share a deterministic clock and random source
(``determinism.py``).

Standard input holds lengths and limits, program, setup, exam, and a token. Only the judge reads the token, after the
tests have passed, and writes it to standard error as proof. Before it, the judge may write lines reported by the tests.
Standard output is the program's.
"""

# ruff: noqa: PTH109, PTH118, PTH120
# pathlib takes longer to import than the whole sandbox
from __future__ import annotations

import os
import struct
import sys
import types
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEAD = struct.Struct("<IIIIQ")
"""bytes of program, setup and exam, seconds of processor time, bytes of address space"""
TOKEN = 32
"""bytes of the token that proves a pass"""
READY = b"ready"
REPORT, REPORTED = "__report__", b"+"
"""name of the function with which tests report a line, and prefix of such a line"""
SIGNALLED = 128
"""added to the signal that ended the program: the judge's exit code"""


def load_file(name: str) -> types.ModuleType:
    """Load another file of this folder as a module."""
    module = types.ModuleType(f"sandbox_{name}")
    code = SourceFileLoader(module.__name__, os.path.join(os.path.dirname(__file__), f"{name}.py")).get_code(
        module.__name__
    )
    sys.modules[module.__name__] = module
    assert code is not None
    exec(code, module.__dict__)
    return module


def describe_error(step: str, error: BaseException) -> str:
    """Return an error as one line."""
    try:
        return f"{step}: {type(error).__name__}: {error}"
    except BaseException:
        return f"{step}: an exception without a message"


def run_and_serve(program: bytes, setup: bytes, tested: bool, pipe: Any, serve: Any) -> None:
    """Run a program and its setup in one namespace, send the result, and answer the judge's requests."""
    flush = sys.stdout.flush  # bound now: the program could replace it
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    failure, step = "", "program"
    # Every exception, SystemExit included, is a failure.
    try:
        exec(compile(program, "program", "exec"), module.__dict__)
        step = "setup"
        exec(compile(setup, "setup", "exec"), module.__dict__)
    except BaseException as error:
        if tested or not isinstance(error, SystemExit) or error.code:
            failure = describe_error(step, error)
    try:
        flush()
    except BaseException as error:  # the program may break standard output
        failure = failure or describe_error("program", error)
    pipe.send(failure[:1000])
    serve(pipe, module.__dict__)
    flush()


def report(line: str) -> None:
    """Write a line that the tests report; it survives a later crash of the program."""
    os.write(2, REPORTED + line.encode() + b"\n")


def judge(exam: bytes, pipe: Any, far: Any, unpack: Any) -> str:
    """Run the tests of a program and return the failure in one line; empty if they pass."""
    if failure := str(pipe.receive_failure()):
        return failure
    if not exam:
        pipe.close()
        return ""
    sys.set_int_max_str_digits(0)
    names: dict[str, Any] = {"__name__": "tests", REPORT: report}
    try:
        tests, first, wanted = unpack(exam)
        checks = compile(tests, "tests", "exec")
        exec(compile(first, "first", "exec"), names)
        for name in wanted:
            names[name] = far.ask("name", name)
        exec(checks, names)
        pipe.close()
    except EOFError:
        raise
    except BaseException as error:
        return describe_error("tests", error)
    return ""


def run_program(program: bytes, setup: bytes, tested: bool, pipe: Any, parent_pid: int, parts: Any) -> None:
    """Seal this process, run the program in it, and exit."""
    (kernel_limits, channel, determinism), leave = parts, os._exit
    try:
        kernel_limits.seal(parent_pid)
    except OSError as error:
        pipe.send(str(error))
        leave(1)
    pipe.send("")
    determinism.install()
    run_and_serve(program, setup, tested, pipe, channel.serve)
    leave(0)


def describe_exit(child: int) -> str:
    """Return how the program's process ended; exit as it did if a signal ended it."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os._exit(SIGNALLED + os.WTERMSIG(status))
    return f"it ended with status {os.WEXITSTATUS(status)} before its tests had run"


def main() -> None:
    """Confine this process, fork, run the job and report the result."""
    kernel_limits, channel, determinism = map(load_file, ("kernel_limits", "channel", "determinism"))
    lengths = HEAD.unpack(channel.read_exactly(0, HEAD.size))
    program, setup = channel.read_exactly(0, lengths[0]), channel.read_exactly(0, lengths[1])
    null_device = os.open(os.devnull, os.O_RDWR)
    parent_pid = os.getppid()
    me = os.getpid()
    modules = [os.getcwd()] if any(os.scandir(".")) else []
    names = kernel_limits.confine(lengths[3], lengths[4], modules)
    (request_end, ask), (answered, answer) = os.pipe(), os.pipe()
    os.environ.clear()
    sys.path += modules  # last: offered modules must not shadow the standard library
    child = os.fork()
    if not child:
        for end in (0, 2):  # exam and token are for the judge only
            os.dup2(null_device, end)
        for end in (ask, answered):
            os.close(end)
        run_program(
            program,
            setup,
            bool(lengths[2]),
            channel.Pipe(request_end, answer),
            me,
            (kernel_limits, channel, determinism),
        )
    for end in (request_end, answer):
        os.close(end)
    os.dup2(null_device, 1)
    pipe = channel.Pipe(answered, ask)
    if failure := pipe.receive_failure():
        raise OSError(failure)
    kernel_limits.seal(parent_pid)
    determinism.install()
    os.write(2, READY + b" " + " ".join(names).encode() + b"\n")
    try:
        exam = channel.read_exactly(0, lengths[2])
        failure = judge(
            exam, pipe, channel.RemoteProgram(pipe), lambda data: channel.unpack(data, channel.reject_object)
        )
    except (EOFError, BrokenPipeError):
        failure = describe_exit(child)
    except Exception as error:  # the program sent a malformed message
        failure = describe_error("program", error)
    os.write(2, failure.encode("utf-8", "replace")[:1000] if failure else channel.read_exactly(0, TOKEN))
    os._exit(0)


if __name__ == "__main__":
    main()
