"""Accounting and reports of `benchmarks.trl`; TRL itself runs where its environment exists."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from benchmarks.harness import ROOT
from benchmarks.trl import ALONE, FOUR, TRL, Ran, at, learning_rows, metered, per_update, ran, recipe, started, trainer
from hypothesis import given as over
from hypothesis import strategies as st

from benchmarks import trl as beside
from planaria.common.errors import RunStopped
from planaria.swarm.assemble import make_task
from planaria.swarm.peer.random_draws import shared_problems

PYTHON = ROOT.parent / "venv-trl/bin/python"
ORPHAN = """
import os, time
if os.fork() == 0:
    time.sleep(0.2)
    while time.process_time() < 0.6: pass
"""


def flags(**more: object) -> argparse.Namespace:
    plain = {"python": PYTHON, "every": 1, "rounds": 2, "prompts": 2, "group": 4, "warmup": 2}
    return argparse.Namespace(**plain | more)


@over(curve=st.lists(st.floats(0, 1), min_size=1, max_size=9), beyond=st.floats(0, 100))
def test_a_curve_is_interpolated_between_its_points(curve: list[float], beyond: float) -> None:
    assert [at(curve, n) for n in range(len(curve))] == curve
    assert at(curve, len(curve) - 1 + beyond) == curve[-1]
    assert all(min(curve) - 1e-12 <= at(curve, n / 3) <= max(curve) + 1e-12 for n in range(3 * len(curve)))


def test_accuracy_at_equal_time_accounts_for_cost() -> None:
    runs = {side: [Ran([0.0, 0.5, 1.0], seconds)] for side, seconds in ((FOUR, 11.0), (ALONE, 3.0), (TRL, 5.0))}
    cost = {side: per_update(found, [Ran([0.0], 1.0)], rounds=11) for side, found in runs.items()}
    rows = {row.what: row.value for row in learning_rows(flags(every=5, rounds=10), runs, cost)}
    assert cost == {FOUR: [1.0], ALONE: [0.2], TRL: [0.4]}
    equal = "accuracy after 2.0 CPU s of training: "
    assert [rows[equal + side] for side in (FOUR, ALONE, TRL)] == pytest.approx([0.2, 1.0, 0.5])
    assert rows[equal + FOUR + " less TRL"] == pytest.approx(-0.3)


def test_the_time_of_orphans_is_counted_and_older_children_are_not_awaited(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as older:
        assert metered([sys.executable, "-c", ORPHAN], tmp_path / "out.txt") > 0.5
        assert older.poll() is None
        older.kill()


def test_a_failed_run_names_its_output_file(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"ended with 3; its output is in .*out\.txt"):
        metered([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "out.txt")


def test_trl_gets_the_swarm_s_problems_and_sampling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words: list[str] = []

    def noted(command: Sequence[str], out: Path) -> float:
        words.extend(command)
        return 0.0

    monkeypatch.setattr(beside, "metered", noted)
    config = recipe(flags(), 4, 2, 1e-3, 7, kind="pretrained", options={"path": "start"})
    trainer(flags(), config, tmp_path)
    job = json.loads(words[-1])
    training = make_task(config).training
    assert job["problems"] == [n for number in range(2) for n in shared_problems(7, number, training, 2)]
    assert (job["top_k"], job["max_new"], job["group"], job["lr"]) == (3, 40, 4, 1e-3)


def test_a_missing_trl_environment_is_reported_in_one_line_with_the_fix() -> None:
    command = [sys.executable, "-m", "benchmarks.trl", "--python", "nowhere"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1 and "nowhere" in found.stderr
    assert "pip install -c constraints.txt" in found.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("side", [TRL, ALONE])
def test_both_sides_learn_from_the_same_start(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == TRL and not PYTHON.is_file():
        pytest.skip(f"TRL's environment is not in {PYTHON}")
    monkeypatch.setattr(beside, "RUNS", tmp_path / "runs")
    torch.set_num_threads(1)
    begun = started(flags())
    found = ran(flags(), side, begun, 2, 1e-2, 1)
    assert len(found.curve) == 3 and found.seconds > 0
