"""Terminals that are closed and readers that go away: the run is saved and nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.runtime.fleet.joining import RUN_ADDRESS_FILE
from support.live.harness import Live, checked, ending, facts, folder_of, live, losses, newest, outcomes, resume, tiny

FOREVER = 10_000


@contextmanager
def shown(config: RunConfig, output: int, terminal: bool) -> Iterator[Live]:
    """``planaria train`` with its progress display on ``output``; that may be the terminal of its session."""
    file = Path(config.out).parent / f"{config.name}.toml"
    file.write_text(recipe.dump(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "planaria", "train", str(file)],
        stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, start_new_session=True,
        preexec_fn=(lambda: _own(output)) if terminal else None,
    )  # fmt: skip
    os.close(output)
    run = Live(folder_of(config), process)
    try:
        yield run
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _own(terminal: int) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the test process may ignore it
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def saved(run: Live) -> int:
    assert newest(run.folder).whole
    return newest(run.folder).step


@pytest.mark.slow
def test_a_closed_terminal_saves_and_stops(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    with shown(tiny(tmp_path, steps=FOREVER), theirs, terminal=True) as run:
        begun = run.wait_until(lambda record: len(losses(record)) >= 5)
        os.close(ours)
        assert run.end()[0] == 1
    assert not (run.folder / RUN_ADDRESS_FILE).exists()
    record = checked(run.folder)
    assert (ending(record).outcome, ending(record).reason) == ("stopped", "SIGHUP")
    assert saved(run) == len(losses(record)) >= len(losses(begun))
    again = resume(run.folder, train__steps=str(saved(run) + 3))
    assert ending(again).outcome == "finished" and outcomes(again) == ["started", "started"]


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    """As behind ``| head -1``."""
    ours, theirs = os.pipe()
    with shown(tiny(tmp_path, steps=40), theirs, terminal=False) as run:
        assert os.read(ours, 1)
        os.close(ours)
        assert run.end()[0] == 0
    assert not (run.folder / RUN_ADDRESS_FILE).exists()
    record = checked(run.folder)
    assert ending(record).outcome == "finished" and saved(run) == 40
    (reported,) = facts(record, e.Trouble)
    assert "standard output" in reported.detail and "Broken pipe" in reported.detail
    assert (run.folder / "model").is_dir() and (run.folder / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fleet", "inline"])
def test_a_terminal_that_hangs_up_twice_does_not_interrupt(tmp_path: Path, engine: str) -> None:
    """The terminal and its shell each send SIGHUP."""
    config = tiny(tmp_path, steps=FOREVER).model_copy(update={"engine": engine})
    with live(config, prefix=["env", "--default-signal=HUP"]) as run:
        run.wait_until(lambda record: len(losses(record)) >= 5)
        for _ in range(2):
            os.killpg(run.process.pid, signal.SIGHUP)
        code, errors = run.end()
    assert code == 1 and "SIGHUP" in errors and errors.count("\n") == 1, errors
    assert not (run.folder / RUN_ADDRESS_FILE).exists()
    assert saved(run) == len(losses(read_run(run.folder)))
