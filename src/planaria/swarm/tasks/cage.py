"""The cage: what a stranger's program runs in. It is started as a script and imports nothing of planaria.

Two processes. One runs the program. The other, its judge, runs the tests; it takes from the program nothing but plain
values (``wire.py``), so that whatever a program does to itself, its verdict is another's. Both are locked up
(``locks.py``) with the same steady clock and chance (``steady.py``).

The job comes on standard input: the lengths and limits, the program, what is run behind it, its exam, and then a word
that only the judge reads, when the tests have passed, and says back on standard error as proof of it. Before it the
judge may tell lines of what it found. What the program prints goes to standard output.
"""

# ruff: noqa: PTH109, PTH118, PTH120
# pathlib takes longer to import than all of the cage
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
"""bytes of the program, of its setup and of its exam, seconds of processor time, bytes of address space"""
WORD = 32
READY = b"ready"
TELL, TOLD = "__tell__", b"+"
"""the name under which tests find what tells a line, and how such a line begins"""
SIGNALLED = 128
"""added to the signal that a program died of: the judge's exit code"""


def beside(name: str) -> types.ModuleType:
    """Another file of this folder as a module."""
    module = types.ModuleType(f"cage_{name}")
    code = SourceFileLoader(module.__name__, os.path.join(os.path.dirname(__file__), f"{name}.py")).get_code(
        module.__name__
    )
    sys.modules[module.__name__] = module
    assert code is not None
    exec(code, module.__dict__)
    return module


def exactly(count: int) -> bytes:
    """So many bytes of standard input."""
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            raise EOFError("the job is cut short")
        data += piece
    return data


def told(step: str, error: BaseException) -> str:
    """What went wrong, in one line."""
    try:
        return f"{step}: {type(error).__name__}: {error}"
    except BaseException:
        return f"{step}: an exception that cannot be told"


def live(program: bytes, setup: bytes, tested: bool, pipe: Any, serve: Any) -> None:
    """Run a program and its setup in one namespace, say how that went, and answer the judge's questions."""
    flush = sys.stdout.flush  # taken now: the program could put something else in its place
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    failure, step = "", "program"
    # A stranger's program may raise whatever there is, SystemExit included, and none of it is a pass.
    try:
        exec(compile(program, "program", "exec"), module.__dict__)
        step = "setup"
        exec(compile(setup, "setup", "exec"), module.__dict__)
    except BaseException as error:
        if tested or not isinstance(error, SystemExit) or error.code:
            failure = told(step, error)
    try:
        flush()
    except BaseException as error:  # standard output is the program's to break
        failure = failure or told("program", error)
    pipe.say(failure[:1000])
    serve(pipe, module.__dict__)
    flush()


def tell(line: str) -> None:
    """Say what the tests found, whatever becomes of the program next."""
    os.write(2, TOLD + line.encode() + b"\n")


def judge(exam: bytes, pipe: Any, far: Any, unpacked: Any) -> str:
    """Run the tests of a program that has been run; what went wrong, in one line, or nothing."""
    if failure := str(pipe.hear_how()):
        return failure
    if not exam:
        pipe.hang_up()
        return ""
    sys.set_int_max_str_digits(0)
    names: dict[str, Any] = {"__name__": "tests", TELL: tell}
    try:
        tests, first, asked = unpacked(exam)
        checks = compile(tests, "tests", "exec")
        exec(compile(first, "first", "exec"), names)
        for name in asked:
            names[name] = far.ask("name", name)
        exec(checks, names)
        pipe.hang_up()
    except EOFError:
        raise
    except BaseException as error:
        return told("tests", error)
    return ""


def main() -> None:
    """Lock up, fork, run the job, say how it went."""
    locks, wire, steady = beside("locks"), beside("wire"), beside("steady")
    lengths = HEAD.unpack(exactly(HEAD.size))
    program, setup = exactly(lengths[0]), exactly(lengths[1])
    nowhere, keeper, me = os.open(os.devnull, os.O_RDWR), os.getppid(), os.getpid()
    offered = [os.getcwd()] if any(os.scandir(".")) else []
    names = locks.confine(lengths[3], lengths[4], offered)
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    wait, leave = os.waitpid, os._exit
    os.environ.clear()
    sys.path += offered  # behind Python's own: no module that is offered stands in the way of those
    child = os.fork()
    if not child:
        for end in (0, 2):  # the exam and the proof are the judge's
            os.dup2(nowhere, end)
        for end in (ask, answered):
            os.close(end)
        pipe = wire.Pipe(asked, answer)
        try:
            locks.seal(me)
        except OSError as error:
            pipe.say(str(error))
            leave(1)
        pipe.say("")
        steady.hold()
        live(program, setup, bool(lengths[2]), pipe, wire.serve)
        leave(0)
    for end in (asked, answer):
        os.close(end)
    os.dup2(nowhere, 1)
    pipe = wire.Pipe(answered, ask)
    if failure := pipe.hear_how():
        raise OSError(failure)
    locks.seal(keeper)
    steady.hold()
    os.write(2, READY + b" " + " ".join(names).encode() + b"\n")
    try:
        failure = judge(exactly(lengths[2]), pipe, wire.Far(pipe), lambda data: wire.unpack(data, wire.nothing_held))
    except (EOFError, BrokenPipeError):
        _, status = wait(child, 0)
        if os.WIFSIGNALED(status):
            leave(SIGNALLED + os.WTERMSIG(status))
        failure = f"it ended with status {os.WEXITSTATUS(status)} before its tests had run"
    except Exception as error:  # what came was no message
        failure = told("program", error)
    os.write(2, failure.encode("utf-8", "replace")[:1000] if failure else exactly(WORD))
    leave(0)


if __name__ == "__main__":
    main()
