"""Measurements of links by real processes, and their end when a node dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from pathlib import Path

import pytest

from planaria.cli import main
from planaria.common.errors import RunStopped
from planaria.control.facts.events import Fact
from planaria.pipeline.network.costs import MBIT
from planaria.pipeline.network.topology import read
from planaria.report.observe.bars import SurveyProgress
from planaria.runtime.engine.link_survey import SurveyLeader
from planaria.runtime.engine.link_survey_node import LinkFailed
from planaria.runtime.fleet.base import Reported, WorkerEnded

# Links are long and slow, so that the milliseconds a busy machine adds per thread matter little.
TOPOLOGY = """
matrix = { latency_ms = "latency.csv", bandwidth_mbit = "bandwidth.csv" }
same_site = { latency_ms = 120, bandwidth_mbit = 20 }
queueing = false
[[nodes]]
site = "Bern"
count = 2
[[nodes]]
site = "Oslo"
speed = 2.0
memory = 5
role = "data"
"""
RECIPE = '[network]\ntopology = "known.toml"\n[fleet]\nmissed = 200\n'
"""test machines are busy: only silence of 50 s counts as a death"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "known.toml").write_text(TOPOLOGY)
    (tmp_path / "latency.csv").write_text(",Bern,Oslo,Rome\nBern,,200,9\nOslo,200,,9\n")
    (tmp_path / "bandwidth.csv").write_text(",Bern,Oslo,Rome\nBern,,8,9\nOslo,2,,9\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def measure(recipe: Path, *flags: str) -> int | str | None:
    """``planaria network measure`` in this process; its exit code. No node may be left."""
    with pytest.raises(SystemExit) as exit_:
        main(["network", "measure", str(recipe), "--to", str(recipe.parent / "found"), *flags])
    assert not nodes()
    return exit_.value.code


def nodes() -> dict[str, int]:
    """Return the living nodes among the children of this process: kernel name (15 characters) → process id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            name, _, rest = stat.read_text().partition("(")[2].rpartition(") ")
            state, parent = rest.split()[:2]
            ours = state != "Z" and int(parent) == os.getpid() and name != "planaria forks"
            if ours and name.startswith("planaria "):
                found[name] = int(stat.parent.name)
    return found


def signal_node(monkeypatch: pytest.MonkeyPatch, name: str, number: signal.Signals, after_s: float = 0.0) -> None:
    """Send a signal to a node ``after_s`` seconds after the first pair has been measured."""
    original: Callable[[SurveyProgress, str], None] = SurveyProgress.update
    signalled: list[int] = []

    def strikes(progress: SurveyProgress, text: str) -> None:
        original(progress, text)
        if not signalled:
            pid = nodes()[f"planaria {name}.0"[:15]]
            signalled.append(pid)
            if after_s:
                threading.Timer(after_s, os.kill, (pid, number)).start()
            else:
                os.kill(pid, number)

    monkeypatch.setattr(SurveyProgress, "update", strikes)


@pytest.mark.slow
def test_known_links_are_measured(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(recipe, "--network.emulate", "true", "--network.link_time_scale", "0.5") == 0
    out, err = capsys.readouterr()
    assert "3/3 pairs" in out and str(recipe.parent / "found" / "topology.toml") in out and not err
    given, found = read(recipe.parent / "known.toml", 0.5), read(recipe.parent / "found" / "topology.toml")
    assert found.nodes == given.nodes
    assert found.queueing == given.queueing
    assert found.links.keys() == {(a, b) for a in ("Bern", "Oslo") for b in ("Bern", "Oslo")}
    for (a, b), (latency, bandwidth) in found.links.items():
        if (a, b) == ("Oslo", "Oslo"):  # one node: the default
            assert (latency, bandwidth) == (0.001, 16000 * MBIT)
            continue
        known, capacity = given.latency_s(a, b), 1 / given.transmit_s(a, b, 1)
        assert abs(latency - known) < 0.15 * known + 0.002
        assert capacity / 1.3 < bandwidth < capacity * 1.3


def test_nodes_of_this_machine_are_measured(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text("[pipeline]\nstages = 2\n[fleet]\nmissed = 200\n")
    assert measure(recipe, "--quiet") == 0
    assert "pairs" not in capsys.readouterr().out
    folder = recipe.parent / "found"
    assert sorted(file.name for file in folder.iterdir()) == ["bandwidth_mbit.csv", "latency_ms.csv", "topology.toml"]
    found = read(folder / "topology.toml")
    assert [node.site for node in found.nodes] == ["node 0", "node 1", "node 2"]
    for a, b in ((0, 1), (1, 0), (2, 0)):
        latency, bandwidth = found.links[f"node {a}", f"node {b}"]
        assert latency < 1 < bandwidth / MBIT
    assert measure(recipe, "--nodes", "2") == 0
    assert len(read(folder / "topology.toml").nodes) == 2


def test_a_dead_node_is_named_and_nothing_is_written(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_node(monkeypatch, "Oslo 1", signal.SIGKILL)  # of three pairs, the second or third is Oslo's
    assert measure(recipe) == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("planaria: link Bern ") and " – Oslo 1: Oslo 1 exited (connection" in err
    assert "nothing was written" in err
    assert not (recipe.parent / "found").exists()


@pytest.mark.slow
def test_a_node_that_dies_during_its_measurement_is_named(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe.write_text("[network]\nemulate = true\nlatency_s = 0.04\nbandwidth = 1e6\n[fleet]\nmissed = 200\n")
    signal_node(monkeypatch, "node 0", signal.SIGKILL, after_s=0.7)
    assert measure(recipe, "--nodes", "3", "--quiet") == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("planaria: link node 0 – node ") and ": node 0 exited (connection" in err


@pytest.mark.slow
def test_an_unreachable_node_is_named_after_the_timeout(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_node(monkeypatch, "Oslo 1", signal.SIGSTOP)
    assert measure(recipe, "--fleet.timeout_s", "3", "--quiet") == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("planaria: link Bern ") and " – Oslo 1: could not be opened" in err
    assert not (recipe.parent / "found").exists()


class PretendFleet:
    """Returns the notices of a script, one list per poll."""

    def __init__(self, script: list[list[Reported | WorkerEnded]]) -> None:
        self.script = script

    def poll(self, timeout_s: float) -> list[Reported | WorkerEnded]:
        return self.script.pop(0) if self.script else []

    def send(self, worker: str, text: bytes) -> None:
        """Drop the message."""


def reported(node: str, report: Fact) -> Reported:
    return Reported(node, 0, report.model_dump_json().encode())


BROKEN = LinkFailed(link="survey:0-1", detail="Connection closed by peer")
LINES = dict.fromkeys(permutations(range(3), 2), (0.0, None))


@pytest.mark.parametrize(
    ("script", "output"),
    [
        (
            [[reported("a", BROKEN)], [WorkerEnded("b", 0, "connection", "pid 7")]],
            "link a – b: b exited (connection, pid 7);",
        ),
        ([[reported("a", BROKEN)]], "link a – b: Connection closed by peer;"),
        (
            [[reported("a", LinkFailed(link="survey:0-2", detail="old"))], [reported("b", BROKEN)]],
            "link a – b: Connection closed",
        ),
        ([[WorkerEnded("c", 0, "heartbeat", "silent for 9 s")]], "c exited (heartbeat, silent for 9 s);"),
    ],
)
def test_a_broken_edge_is_explained_by_a_death_or_named(
    script: list[list[Reported | WorkerEnded]], output: str
) -> None:
    leader = SurveyLeader(PretendFleet(script), "abc", LINES, lambda *_: None)
    leader._addresses = dict.fromkeys(range(3), "nowhere")
    with pytest.raises(RunStopped) as stopped:
        leader.measure([(0, 1)])
    assert str(stopped.value).startswith(output)


def test_a_failure_keeps_an_older_measurement(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recipe.parent / "found"
    folder.mkdir()
    (folder / "topology.toml").write_text("older")
    signal_node(monkeypatch, "Bern 1", signal.SIGKILL)
    assert measure(recipe, "--quiet") == 1
    assert [file.read_text() for file in folder.iterdir()] == ["older"]
