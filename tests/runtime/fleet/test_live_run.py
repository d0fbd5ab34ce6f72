"""A real run that is watched: a worker is killed through the page, and the recovery is seen in its stream."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from harness import assert_no_orphans, folder_of, tiny
from planaria.config import recipe
from planaria.control import events as e
from planaria.control.logs import read_run
from planaria.report.live_page.frames import patched
from processes import Command

FOREVER = 100_000


class Watcher:
    """Reads a run's stream, and keeps the state that it leads to."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._at, self._token = (parts.hostname or "", parts.port), parse_qs(parts.query)["token"][0]
        self.state: dict[str, Any] = {}
        self.told: list[str] = []
        self._line = self._open("GET", "/api/runs/0/frames")
        self._stream = self._line.getresponse()
        self._read = self._frames()

    def _open(self, method: str, path: str, body: str | None = None) -> http.client.HTTPConnection:
        line = http.client.HTTPConnection(*self._at, timeout=60)
        line.request(method, path, body, {"authorization": f"Bearer {self._token}"})
        return line

    def _frames(self) -> Iterator[dict[str, Any]]:
        while said := self._stream.readline().decode():
            if said.startswith("data: ["):
                yield from json.loads(said.removeprefix("data: "))

    def until(self, seen: Any) -> None:
        """Reads on until what is to be seen meets a condition."""
        while not seen(self.state):
            frame = next(self._read)  # StopIteration: the stream has ended too soon
            self.state = patched(self.state, frame["set"])
            self.told += [frame["told"]["text"]] if "told" in frame else []

    def rest(self) -> None:
        """Reads until the stream ends."""
        for frame in self._read:
            self.state = patched(self.state, frame["set"])

    def strike(self, worker: str, incarnation: int, fault: str) -> tuple[int, str]:
        body = json.dumps({"worker": worker, "incarnation": incarnation, "fault": fault})
        answer = self._open("POST", "/api/runs/0/strike", body).getresponse()
        return answer.status, answer.read().decode()


@contextmanager
def watched(folder: Path, *flags: str, steps: int = FOREVER) -> Iterator[tuple[Command, Watcher]]:
    """``planaria train --live`` of a tiny run, and somebody who watches it."""
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
    """Who works at a node."""
    said = state.get("nodes", {}).get(str(node), {})
    return (said["worker"], state["workers"][said["worker"]]) if said.get("state") == "holds" else None


def test_a_kill_through_the_page_and_the_rebirth_in_its_stream(tmp_path: Path) -> None:
    with watched(tmp_path, "--live-chaos") as (process, watcher):
        watcher.until(lambda state: state.get("step", 0) >= 5 and at(state, 2))
        held = at(watcher.state, 2)
        assert held is not None
        other = at(watcher.state, 3)
        assert other is not None
        assert watcher.strike(other[0], other[1]["incarnation"], "slow") == (
            200,
            json.dumps({"done": f"slow for {other[0]} (stage 3), at its next any"}, separators=(",", ":")),
        )
        name, worker = held
        status, said = watcher.strike(name, worker["incarnation"], "kill")
        assert status == 200 and f"SIGKILL to {name} (pid {worker['pid']}" in said
        watcher.until(lambda state: "ended" in state.get("recoveries", {}).get("0", {}))
        recovery = watcher.state["recoveries"]["0"]
        assert recovery["nodes"] == [2] and recovery["workers"] == [name] and recovery["outcome"] == "recovered"
        assert set(recovery["phases"]) >= {"replaced", "linked", "rebuilt", "redone"}
        heir = at(watcher.state, 2)
        assert heir is not None and heir[0] != name
        assert any("lost" in line for line in watcher.told) and any("rebuilt" in line for line in watcher.told)
        status, said = watcher.strike(name, worker["incarnation"], "kill")
        assert status == 409 and "gone already" in said, "it may be somebody else by now"
        process.send_signal(signal.SIGTERM)
        watcher.rest()
        assert watcher.state["over"] == "stopped", "watchers see the end"
        assert process.wait(60) == 1
    struck = [fact for _, fact in read_run(tmp_path / "runs" / "run").history if isinstance(fact, e.FaultInjected)]
    assert {(fault.worker, fault.signal) for fault in struck} == {(name, "SIGKILL"), (other[0], "slow")}


@pytest.mark.slow
def test_without_leave_nobody_is_struck_and_a_killed_run_leaves_no_server(tmp_path: Path) -> None:
    with watched(tmp_path) as (process, watcher):
        watcher.until(lambda state: state.get("step", 0) >= 2 and at(state, 2))
        status, said = watcher.strike("w2", 1, "kill")
        assert status == 403 and "--live-chaos" in said
        process.kill()
        watcher.rest()  # its stream ends, since nobody holds the other end of the server's pipe
        assert not watcher.state.get("over")
