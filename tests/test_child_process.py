"""Calls in a child process return a result or fail with one line, for any function."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from planaria.common import child_process
from planaria.common.errors import UserError

OUTCOMES = f"{__name__}:outcomes"


def outcomes(argument: bytes) -> bytes:
    """Do what the argument names."""
    match argument.partition(b" ")[0]:
        case b"echo":
            print("noise")
            return argument
        case b"refuse":
            raise UserError("file.json: line 3 is wrong; fix it")
        case b"missing":
            return Path("/nowhere/at/all").read_bytes()
        case b"raise":
            raise KeyError("a strange key")
        case b"abort":
            os.abort()
        case b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"fill":
            return bytes(8 << 30)
        case b"hang":
            while True:
                pass
    return b""


@pytest.fixture(autouse=True)
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]))


def call(argument: bytes, seconds: float = 60.0) -> bytes:
    return child_process.call(OUTCOMES, argument, 64 << 20, seconds, "file.json", "give another")


def test_a_child_answers_until_it_fails() -> None:
    with child_process.Child(OUTCOMES, 64 << 20) as child:
        for argument in (b"echo", b"echo " + bytes(1 << 20)):
            assert child.call(argument, 60.0, "file.json", "give another") == argument
        for _ in range(2):
            with pytest.raises(UserError, match=r"^file\.json: line 3 is wrong; fix it$"):
                child.call(b"refuse", 60.0, "file.json", "give another")
        with pytest.raises(UserError, match="a strange key"):
            child.call(b"raise", 60.0, "file.json", "give another")
        with pytest.raises(UserError, match=r"its reader ended with .*; give another"):
            child.call(b"echo", 60.0, "file.json", "give another")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (b"missing", "/nowhere/at/all"),
        (b"raise", r"^file\.json: its reader ended with KeyError: 'a strange key'; give another$"),
        (b"abort", "its reader ended with exit code -6; give another"),
        (b"kill", "its reader ended with exit code -9; give another"),
        (b"fill", r"^file\.json: its reader needs more than 64 MiB of memory; give another$"),
    ],
)
def test_every_failure_is_one_line(argument: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        call(argument)
    assert "\n" not in str(caught.value)


def test_a_child_that_never_returns_is_stopped() -> None:
    with child_process.Child(OUTCOMES, 64 << 20) as child:
        child.call(b"echo", 60.0, "file.json", "give another")
        with pytest.raises(UserError, match=r"^file\.json: its reader took more than 0.2 s; give another$"):
            child.call(b"hang", 0.2, "file.json", "give another")
