from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.common.signals import STOPS, interrupted
from planaria.runtime.engine.stopping import stop_requested


@pytest.fixture
def hang_up() -> Iterator[None]:
    """Restore the default action of SIGHUP, whatever was inherited."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", STOPS)
def test_the_first_signal_is_noted_and_the_second_interrupts_except_sighup(number: signal.Signals) -> None:
    with stop_requested() as asked:
        os.kill(os.getpid(), number)
        assert asked() == number.name
        if number == signal.SIGHUP:
            os.kill(os.getpid(), number)
        else:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", STOPS)
def test_any_signal_interrupts_and_a_second_sighup_is_ignored(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in STOPS]
    with interrupted():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        if number == signal.SIGHUP:
            os.kill(os.getpid(), number)
    assert [signal.getsignal(n) for n in STOPS] == before


@pytest.mark.usefixtures("hang_up")
def test_an_ignored_sighup_stays_ignored() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupted(), stop_requested() as asked:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not asked()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


WHILE_IMPORTED = """
import os, signal, sys
from importlib import import_module

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "planaria.cli.entry":
            os.kill(os.getpid(), signal.SIGINT)

module, name = sys.argv[1].split(":")
entry = getattr(import_module(module), name)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["recipes"]
entry()
"""


def test_ctrl_c_during_imports_ends_the_command_silently() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    command = [sys.executable, "-c", WHILE_IMPORTED, project["scripts"]["planaria"]]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
