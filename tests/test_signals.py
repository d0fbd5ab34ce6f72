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
from planaria.runtime.engine.stopping import stop_asked


@pytest.fixture
def hang_up() -> Iterator[None]:
    """A hang-up ends this process, as is usual, whatever the process that started it thinks of them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", STOPS)
def test_the_first_is_noted_and_the_second_interrupts_but_for_a_hang_up(number: signal.Signals) -> None:
    with stop_asked() as asked:
        os.kill(os.getpid(), number)
        assert asked() == number.name
        if number == signal.SIGHUP:
            os.kill(os.getpid(), number)
        else:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", STOPS)
def test_any_of_them_interrupts_a_command_and_hanging_up_again_does_not_disturb_its_end(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in STOPS]
    with interrupted():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        if number == signal.SIGHUP:
            os.kill(os.getpid(), number)
    assert [signal.getsignal(n) for n in STOPS] == before


@pytest.mark.usefixtures("hang_up")
def test_who_is_to_outlive_its_terminal_does() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupted(), stop_asked() as asked:
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


def test_ctrl_c_while_the_command_is_imported_ends_it_in_silence() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    command = [sys.executable, "-c", WHILE_IMPORTED, project["scripts"]["planaria"]]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
