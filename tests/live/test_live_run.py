"""Real runs that are observed: by the live page, through which a worker is killed, by a trace and by a tracker."""

from __future__ import annotations

import gzip
import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import planaria
from planaria.config import recipe
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.report.live_page.frames import apply_patch
from planaria.report.run.perfetto import write_trace
from planaria.report.run.recoveries import recoveries
from support.live.harness import assert_no_orphans, checked, facts, folder_of, tiny
from support.processes import Command
from support.report.synthetic_run import tally_of
from support.trace_rules import agrees_with_log
from support.trace_rules import checked as rules_kept

FOREVER = 100_000


class Watcher:
    """Reads a run's stream, and keeps the state it describes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._at, self._token = (parts.hostname or "", parts.port), parse_qs(parts.query)["token"][0]
        self.state: dict[str, Any] = {}
        self.lines: list[str] = []
        self._line = self._open("GET", "/api/runs/0/frames")
        self._stream = self._line.getresponse()
        self._read = self._frames()

    def _open(self, method: str, path: str, body: str | None = None) -> http.client.HTTPConnection:
        line = http.client.HTTPConnection(*self._at, timeout=60)
        line.request(method, path, body, {"authorization": f"Bearer {self._token}"})
        return line

    def _frames(self) -> Iterator[dict[str, Any]]:
        while line := self._stream.readline().decode():
            if line.startswith("data: ["):
                yield from json.loads(line.removeprefix("data: "))

    def until(self, seen: Any) -> None:
        """Read until the state meets a condition."""
        while not seen(self.state):
            frame = next(self._read)  # StopIteration: the stream has ended too soon
            self.state = apply_patch(self.state, frame["set"])
            self.lines += [frame["line"]["text"]] if "line" in frame else []

    def rest(self) -> None:
        """Read until the stream ends."""
        for frame in self._read:
            self.state = apply_patch(self.state, frame["set"])

    def strike(self, worker: str, incarnation: int, fault: str) -> tuple[int, str]:
        body = json.dumps({"worker": worker, "incarnation": incarnation, "fault": fault})
        answer = self._open("POST", "/api/runs/0/faults", body).getresponse()
        return answer.status, answer.read().decode()


@contextmanager
def watched(folder: Path, *flags: str, steps: int = FOREVER) -> Iterator[tuple[Command, Watcher]]:
    """Start ``planaria train --live`` of a tiny run, and a watcher."""
    config = tiny(folder, steps=steps)
    file = folder / "run.toml"
    file.write_text(recipe.dump(config))
    process = Command("train", file, "--quiet", "--live", *flags)
    try:
        while line := process.line():
            if line.startswith("live page"):
                yield process, Watcher(line.split()[-1])
                break
        else:
            raise AssertionError("no live page")
    finally:
        process.kill()
        process.communicate()
        assert_no_orphans(folder_of(config))


def at(state: dict[str, Any], node: int) -> tuple[str, dict[str, Any]] | None:
    """Return the worker that holds a node, and its state."""
    shown = state.get("nodes", {}).get(str(node), {})
    return (shown["worker"], state["workers"][shown["worker"]]) if shown.get("state") == "holds" else None


def test_a_kill_through_the_page_and_the_recovery_in_its_stream(tmp_path: Path) -> None:
    with watched(tmp_path, "--live-chaos") as (process, watcher):
        watcher.until(lambda state: state.get("step", 0) >= 5 and at(state, 2))
        (name, worker), other = at(watcher.state, 2), at(watcher.state, 3)
        done = json.dumps({"done": f"slow for {other[0]} (stage 3), at its next any"}, separators=(",", ":"))
        assert watcher.strike(other[0], other[1]["incarnation"], "slow") == (200, done)
        status, output = watcher.strike(name, worker["incarnation"], "kill")
        assert status == 200 and f"SIGKILL to {name} (pid {worker['pid']}" in output
        watcher.until(lambda state: "ended" in state.get("recoveries", {}).get("0", {}))
        recovery = watcher.state["recoveries"]["0"]
        assert recovery["nodes"] == [2] and recovery["workers"] == [name] and recovery["outcome"] == "recovered"
        assert set(recovery["phases"]) >= {"replaced", "linked", "rebuilt", "redone"}
        assert at(watcher.state, 2)[0] != name
        assert any("lost" in line for line in watcher.lines) and any("rebuilt in" in line for line in watcher.lines)
        status, output = watcher.strike(name, worker["incarnation"], "kill")
        assert status == 409 and "has already exited" in output, "its id may be another process's now"
        process.send_signal(signal.SIGTERM)
        watcher.rest()
        assert watcher.state["over"] == "stopped", "watchers see the end"
        assert process.wait(60) == 1
    injected = facts(read_run(tmp_path / "runs" / "run"), e.FaultInjected)
    assert {(fault.worker, fault.signal) for fault in injected} == {(name, "SIGKILL"), (other[0], "slow")}


@pytest.mark.slow
def test_without_permission_no_fault_is_injected_and_a_killed_run_leaves_no_server(tmp_path: Path) -> None:
    with watched(tmp_path) as (process, watcher):
        watcher.until(lambda state: state.get("step", 0) >= 2 and at(state, 2))
        status, output = watcher.strike("w2", 1, "kill")
        assert status == 403 and "--live-chaos" in output
        process.kill()
        watcher.rest()  # the stream ends: no process holds the other end of the server's pipe
        assert not watcher.state.get("over")


def test_a_kill_is_reported_alike_by_the_log_the_trace_and_a_tracker(tmp_path: Path) -> None:
    trace = tmp_path / "kill.json"
    trace.write_text('{"version": 1, "faults": [{"step": 5, "stage": 2, "moment": "forward", "offset": 0.5}]}')
    config = tiny(tmp_path, steps=10, chaos={"trace": str(trace)}, checkpoint={"every": 4})
    planaria.train(config, progress=False)
    folder = folder_of(config)
    assert_no_orphans(folder)
    record = checked(folder)
    (timing,) = recoveries(record)
    assert timing.outcome == "recovered" and timing.fault_t is not None and timing.total is not None

    events = json.loads(gzip.decompress(write_trace(folder).read_bytes()))["traceEvents"]
    rules_kept(events)
    agrees_with_log(record, events)
    kinds = {x["name"] for x in events if x["ph"] == "X"}
    assert {"forward", "backward", "optimizer", "save"} <= kinds

    tally = tally_of(record)
    curves = EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    (point,) = curves.Scalars("recovery_s")
    assert abs(point.value - timing.total) < 1e-5 * timing.total, "TensorBoard keeps 32 bits"
    last = {name: curves.Scalars(name)[-1].value for name in ("steps", "recoveries", "workers_lost", "generation")}
    assert last == {"steps": 10, "recoveries": 1, "workers_lost": 1, "generation": tally.generations[0]}
    assert (tally.recoveries, tally.lost.total(), tally.steps) == ({"recovered": 1}, 1, 10)
    assert 0 < curves.Scalars("sent_bytes")[-1].value <= tally.sent.total()
