"""A worker's log: its format, uncaught exceptions and warnings in it, and the error that a failed start quotes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.common.logs import LogSettings
from planaria.config.schema import RunConfig
from planaria.runtime.worker.log_file import last_error
from planaria.runtime.worker.setup import SETUP, Setup

PROGRAM = """
import logging, sys, threading, warnings
from pathlib import Path
from planaria.common.logs import LogSettings
from planaria.runtime.worker.log_file import begin_log

begin_log(Path(sys.argv[1]), "demo", "w3", LogSettings(json=sys.argv[2] == "json"))
log = logging.getLogger("planaria.here")
log.debug("unseen")
log.info("begins")
warnings.warn("an old call")
thread = threading.Thread(target=lambda: {}["missing"], name="beat")
thread.start()
thread.join()
raise ValueError("the weights are lost")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_workers_log_holds_messages_warnings_and_exceptions(form: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    text = (tmp_path / "workers" / "w3.log").read_text()
    assert "begins" in text and "an old call" in text and "unseen" not in text
    assert "uncaught exception in thread beat" in text and "KeyError: 'missing'" in text
    assert last_error(tmp_path, lost=False) == "w3: ValueError: the weights are lost"
    if form == "json":
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["level"] for line in lines] == ["info", "warning", "critical", "critical"]
        assert {(line["run"], line["worker"]) for line in lines} == {("demo", "w3")}


def test_the_last_error_is_found_among_lines_of_both_formats(tmp_path: Path) -> None:
    log = tmp_path / "workers" / "w0.log"
    log.parent.mkdir()
    log.write_text("cut off}\n{not json\n" + json.dumps({"message": "MemoryError: only quoted"}) + "\n")
    assert last_error(tmp_path, lost=False) == ""
    assert "to free memory" in last_error(tmp_path, lost=True)
    trace = "Traceback (most recent call last):\n  ...\ntorch.OutOfMemoryError: 3 GB"
    log.write_text(f"{log.read_text()}{json.dumps({'exception': trace})}\n{json.dumps({'exception': 3})}\n")
    assert last_error(tmp_path, lost=True) == "w0: OutOfMemoryError: 3 GB"
    log.write_text(f"{log.read_text()}  File 'x.py'\nValueError: from a library\n12:00:00.000 INFO worker w0: after\n")
    assert last_error(tmp_path, lost=True) == "w0: ValueError: from a library"


def test_a_machine_that_joins_keeps_its_own_settings() -> None:
    setup = Setup(RunConfig(), Path("/run"), Path("/data"), "127.0.0.1", log=LogSettings("debug", json=True))
    sent = SETUP.dump_json(setup)
    assert "log" not in json.loads(sent) and SETUP.validate_json(sent).log == LogSettings()
