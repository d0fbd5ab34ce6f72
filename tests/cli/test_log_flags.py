"""``--log-level``, ``--log-json`` and PLANARIA_LOG on runs with workers in processes."""

from __future__ import annotations

import base64
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import pytest

from planaria.runtime.transport.listener import connect
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.relay import End, relay_at
from planaria.runtime.transport.secure import StrangerError, new_key
from support.command_line import refused
from support.processes import planaria
from support.tiny_recipe import written
from support.waiting import until


class Done(NamedTuple):
    """A finished run: its printed text, and its workers' logs."""

    printed: CompletedProcess[str]
    workers: dict[str, str]
    key: bytes


def run(folder: Path, *flags: str) -> Done:
    """Train the tiny recipe on workers in processes; stage 2 is lost and rebuilt."""
    written(folder)
    words = ("--engine", "fleet", "--fleet.key", "run.key", "--prompt", "")
    done = planaria("train", "tiny.toml", *words, *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    logs = {file.stem: file.read_text() for file in (folder / "runs" / "tiny" / "workers").iterdir()}
    return Done(done, logs, bytes.fromhex((folder / "run.key").read_text()))


@pytest.fixture(scope="module")
def debug(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with every message, as JSON lines."""
    return run(tmp_path_factory.mktemp("debug"), "--log-level", "debug", "--log-json")


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_workers_inherit_level_and_format(debug: Done) -> None:
    assert len(debug.workers) == 6
    for worker, text in debug.workers.items():
        lines = parsed(text)
        assert {(line["run"], line["worker"]) for line in lines} == {("tiny", worker)}
        assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
    everything = [line for text in debug.workers.values() for line in parsed(text)]
    assert {line["level"] for line in everything} == {"debug", "info"}
    rebuilt = [
        line for line in everything if line["message"].startswith("formed generation 2 (recovered), state: rebuild by=")
    ]
    assert [(line["stage"], line["generation"], line["step"]) for line in rebuilt] == [(2, 2, 3)]
    assert any("edge to stage 2 broken" in line["message"] for line in everything)


def test_the_controller_logs_its_events_to_standard_error(debug: Done) -> None:
    lines = parsed(debug.printed.stderr)
    assert {line.get("run") for line in lines if line["logger"] == "planaria.runtime.controller.controller"} == {"tiny"}
    lost = [line for line in lines if line["message"].startswith("worker_lost ")]
    assert [(line["level"], line["worker"]) for line in lost] == [("info", "w2")]
    assert any(line["message"].startswith("stage_committed ") and line["level"] == "debug" for line in lines)
    assert "step 8/8" in debug.printed.stdout and '"logger"' not in debug.printed.stdout


def forms(key: bytes) -> list[str]:
    """Return the texts in which a key could be written."""
    coded = base64.b64encode(key).decode().rstrip("="), base64.urlsafe_b64encode(key).decode().rstrip("=")
    return [key.hex(), key.hex().upper(), *coded, str(key), repr(list(key))[1:-1]]


def test_no_log_contains_the_key(debug: Done) -> None:
    assert len(debug.key) >= 16
    for text in (*debug.workers.values(), debug.printed.stderr, debug.printed.stdout):
        assert not [form for form in forms(debug.key) if form in text]


def test_a_flag_overrides_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_LOG", "debug")
    done = run(tmp_path, "--log-level", "error")
    assert done.printed.stderr == "" and set(done.workers.values()) == {""}


@pytest.mark.parametrize(
    "command", ["train demo", "join runs/x", "network relay --key-file k", "compare race", "swarm train x"]
)
def test_an_unknown_level_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, *command.split(), "--log-level", "loud", silent=True)
    assert "'--log-level': 'loud' is not one of" in error and "debug" in error and "--help" in error


def test_an_unknown_level_in_the_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANARIA_LOG", "loud")
    assert "PLANARIA_LOG = 'loud': use debug" in refused(capsys, "recipes", silent=True)


def test_a_relay_logs_connections_without_its_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "planaria")
    key, other = new_key(), new_key()
    listener, relay = relay_at("127.0.0.1", 0, key)
    ports = [Port("127.0.0.1", key) for _ in range(2)]
    try:
        with pytest.raises((StrangerError, OSError)):
            connect(listener.address, other, b"x", 5.0)
        until(lambda: f"rejected a connection to port {listener.port}" in caplog.text)
        with ThreadPoolExecutor() as pool:
            ends: tuple[End, End] = "waits", "calls"
            meet = [
                pool.submit(p.connect_over_relay, listener.address, "g1:0-1", e, 30.0, bool)
                for p, e in zip(ports, ends, strict=True)
            ]
            for met in meet:
                channel = met.result()
                assert channel is not None
                channel.close()
    finally:
        for port in ports:
            port.close()
        listener.close()
        relay.close()
    until(lambda: "connected both ends of edge g1:0-1" in caplog.text)
    assert not [form for secret in (key, other) for form in forms(secret) if form in caplog.text]
