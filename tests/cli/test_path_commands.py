"""Several paths between sites: in plans, in ``planaria plan --update`` after a changed link, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import exit_code, refused

RECIPE = """
name = "two"
[pipeline]
stages = 2
microbatches = 4
microbatch_size = 1
[routing]
data_nodes = 1
[network]
topology = "topology.toml"
forward_s = [0.0, 0.01, 0.01]
backward_s = [0.0, 0.02, 0.02]
"""
TOPOLOGY = """
[[link]]
id = "north"
sites = ["A", "B"]
latency_ms = 5
bandwidth_mbit = 100
[[link]]
id = "south"
sites = ["A", "B"]
latency_ms = 5
bandwidth_mbit = 100
[[nodes]]
site = "A"
count = 3
role = "worker"
[[nodes]]
site = "B"
role = "data"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "topology.toml").write_text(TOPOLOGY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan() -> int:
    return exit_code("plan", "recipe.toml", "--budget", "200moves", "--to", "plan.json", "--quiet")


@pytest.mark.slow
def test_a_plan_has_paths_and_a_slow_link_moves_some(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    out = capsys.readouterr().out
    assert "edges between sites, and their paths" in out and "this plan, paths by hashing" in out
    assert "the busiest link carries" in out and "gap" in out
    written = json.loads((home / "plan.json").read_text())
    assert {edge["path"] for edge in written["paths"]["edges"]} == {"north", "south"}
    assert "the busiest link carries" in (home / "plan.html").read_text()

    paths = ("plan", "recipe.toml", "--update", "--routing.schedule", "plan.json")
    assert exit_code(*paths) == 0
    assert "moved         0 of" in capsys.readouterr().out
    (home / "topology.toml").write_text(TOPOLOGY.replace("bandwidth_mbit = 100", "bandwidth_mbit = 10", 1))
    assert exit_code(*paths, "--moves", "5", "--to", "moved.json") == 0
    out = capsys.readouterr().out
    assert "path before" in out and "moved         0 of" not in out
    moved = json.loads((home / "moved.json").read_text())
    assert moved["step_s"] >= written["step_s"]
    assert moved["paths"]["links"]["north: A → B"] == 10e6 / 8


def test_invalid_schedules_and_topologies_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    capsys.readouterr()

    def mistake(*words: str) -> str:
        return refused(capsys, *words)

    assert "routing.schedule is not set" in mistake("plan", "recipe.toml", "--update")
    known = ("plan", "recipe.toml", "--update", "--routing.schedule", "plan.json")
    assert "--moves -1: use 0 or more" in mistake(*known, "--moves", "-1")
    assert "--moves 2 requires --update" in mistake("plan", "recipe.toml", "--moves", "2")
    assert "--budget 9s: limits a search" in mistake(*known, "--budget", "9s")
    assert "pipeline.microbatches" in mistake(*known, "--pipeline.microbatches", "6")
    (home / "topology.toml").write_text(TOPOLOGY.replace("count = 3", "count = 4"))
    assert "its nodes are not those of network.topology (B 1)" in mistake(*known)
    assert "lists several paths" in mistake("network", "measure", "recipe.toml", "--to", "found")
    (home / "topology.toml").write_text('matrix = "twelve_cities"\n[[nodes]]\nsite = "Iowa"\ncount = 4\n')
    assert "has no [[link]] entries" in mistake(*known)
    tree = json.loads((home / "plan.json").read_text())
    del tree["paths"]
    (home / "plan.json").write_text(json.dumps(tree))
    (home / "topology.toml").write_text(TOPOLOGY)
    assert "was planned with one path between two sites" in mistake(*known)
