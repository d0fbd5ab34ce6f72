"""A stop while no network works: what workers hold is saved, and the error is named."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import checked, ending, facts, live, tiny
from netns import NotAllowedError, own_loopback

from planaria.control import decisions as d
from planaria.control.logs import read_run
from planaria.runtime.checkpoint.store import CheckpointStore


@pytest.mark.slow
def test_a_run_that_is_stopped_while_its_loopback_is_down_saves_its_last_commit(tmp_path: Path) -> None:
    try:
        with own_loopback() as name:
            prefix = ["ip", "netns", "exec", name]
            config = tiny(tmp_path, stages=2, steps=10_000, fleet={"stop_s": 1.0, "spares": 0})
            with live(config, prefix) as run:
                run.wait_until(lambda record: len(facts(record, d.Commit)) > 3, 150.0)
                subprocess.run([*prefix, "ip", "link", "set", "lo", "down"], check=True)
                before = -1
                while (now := len(facts(read_run(run.folder), d.Commit))) != before:  # until a step is stuck
                    before = now
                    time.sleep(0.5)
                run.process.send_signal(signal.SIGTERM)
                code, errors = run.end(100.0)
    except NotAllowedError as error:
        pytest.skip(str(error))
    record = checked(run.folder)
    step = len(facts(record, d.Commit))
    assert code == 1 and f"planaria: stopped by SIGTERM; step {step} was dropped: no result from stages" in errors
    assert "(cannot connect to 127.0.0.1:" in errors and ending(record).outcome == "stopped"
    newest = CheckpointStore(run.folder / "checkpoints").newest()
    assert newest is not None and newest.whole and newest.step == step
