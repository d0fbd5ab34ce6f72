"""Logging: formats, context, settings from the environment, and processes without a configuration."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest

from planaria.common import logs
from planaria.common.errors import UserError
from planaria.common.logs import JsonFormatter, LogSettings, TextFormatter

log = logging.getLogger("planaria.somewhere")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    logs.reset()


def record(message: str, *args: object, error: BaseException | None = None, **more: object) -> logging.LogRecord:
    about = None if error is None else (type(error), error, None)
    made = logging.LogRecord("planaria.somewhere", logging.INFO, "file.py", 1, message, args, about)
    made.created, made.msecs = 1_795_833_249.3816, 381.6
    made.__dict__.update(more)
    return made


@pytest.mark.parametrize(
    ("context", "source"),
    [
        ({}, "planaria.somewhere"),
        ({"run": "demo"}, "planaria.somewhere"),
        ({"run": "demo", "worker": "w3"}, "worker w3"),
        ({"worker": "w3", "replica": 0, "stage": 2, "generation": 4, "step": 17}, "worker w3, stage 2, step 17"),
        ({"run": "demo", "peer": "p0"}, "peer p0"),
    ],
)
def test_a_line_of_text_names_time_level_source_and_message(context: dict[str, object], source: str) -> None:
    line = TextFormatter().format(record("formed generation %d", 4, context=context))
    time, rest = line.split(" ", 1)
    assert datetime.strptime(time, "%H:%M:%S.%f").microsecond == 381_000
    assert rest == f"INFO {source}: formed generation 4"


def test_a_message_cannot_forge_lines() -> None:
    forged = record("a\n12:00:00.000 ERROR\r\x1b[2J %s", "é\u2028", context={})
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(forged)
        assert len(line.splitlines()) == 1 and "\x1b" not in line


def test_a_json_line_holds_time_level_logger_message_and_context() -> None:
    made = record("half of %s", "é", context={"run": "demo", "stage": 2}, fields={"step": 3})
    assert json.loads(JsonFormatter().format(made)) == {
        "time": "2026-11-28T02:34:09.381Z",
        "level": "info",
        "logger": "planaria.somewhere",
        "message": "half of é",
        "run": "demo",
        "stage": 2,
        "step": 3,
    }


def test_both_formats_show_an_exception() -> None:
    made = record("failed", error=ValueError("too large"), context={})
    assert TextFormatter().format(made).splitlines()[1:] == ["ValueError: too large"]
    assert json.loads(JsonFormatter().format(made))["exception"] == "ValueError: too large"


def test_messages_from_the_level_on_are_written_with_the_context_of_their_thread() -> None:
    stream, step = io.StringIO(), 0
    logs.configure("info", json=True, stream=stream, run="demo")
    log.debug("unseen")
    with logs.add_context(lambda: {"step": step}):
        step = 5
        log.info("seen")
    log.info("later")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["run"], first["step"]) == ("seen", "demo", 5)
    assert second["message"] == "later" and "step" not in second


def test_a_second_configuration_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure("debug", stream=first)
    logs.configure("warning", stream=second)
    log.info("unseen")
    log.warning("seen")
    assert not first.getvalue() and second.getvalue().endswith("WARNING planaria.somewhere: seen\n")
    logs.reset()
    log.warning("unseen")
    assert second.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", LogSettings()),
        ("debug", LogSettings("debug")),
        ("json", LogSettings(json=True)),
        ("error, json", LogSettings("error", json=True)),
    ],
)
def test_the_environment_sets_level_and_format(
    text: str, settings: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(logs.VARIABLE, text)
    assert logs.from_environment() == settings
    monkeypatch.setenv(logs.VARIABLE, str(settings))
    assert logs.from_environment() == settings


@pytest.mark.parametrize("text", ["loud", "debug,info", "DEBUG"])
def test_other_values_of_the_environment_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, text)
    with pytest.raises(UserError, match=f"^PLANARIA_LOG = '{text}': use debug, info, warning, error, json, or"):
        logs.from_environment()


def test_a_command_hands_its_settings_to_the_processes_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "debug,json")
    with logs.command_logs("error"):
        assert logs.from_environment() == LogSettings("error", json=True)
        assert logging.getLogger("planaria").level == logging.ERROR
    assert os.environ[logs.VARIABLE] == "debug,json" and logging.getLogger("planaria").level == logging.NOTSET


def test_the_library_configures_nothing() -> None:
    program = (
        "import logging, planaria, planaria.common.logs\n"
        "own = logging.getLogger('planaria')\n"
        "print([type(handler).__name__ for handler in own.handlers], logging.root.handlers, own.level)\n"
        "own.error('unseen')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"['NullHandler'] [] {logging.NOTSET}\n", "")
