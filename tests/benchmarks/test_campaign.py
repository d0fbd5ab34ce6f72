"""A campaign of two small runs: no errors, a second sitting adds nothing, and both ledgers detect planted errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.campaign import Fact, Ledger, facts
from benchmarks.campaign_runs import SPECIES, draw

from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.faults.trace import Trace
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.preparation.config_checks import check

ROOT = Path(__file__).parents[2]
RUNS = ["--only", "checkfree, checkpoint", "noloco", "--faults-a-run", "7", "--faults", "5", "--seed", "72"]


def run_campaign(folder: Path) -> str:
    """Run the small campaign and return its output."""
    command = [sys.executable, "-m", "benchmarks.campaign", *RUNS, "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def campaign_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished small campaign."""
    folder = tmp_path_factory.mktemp("campaign")
    output = run_campaign(folder)
    assert output.count("finished") >= 2 and "FAIL" not in output
    return folder / "seed-72"


@pytest.mark.slow
def test_all_runs_finish_and_a_second_campaign_repeats_none(campaign_folder: Path) -> None:
    files = sorted(campaign_folder.glob("run-*/verdict.json"))
    verdicts = [json.loads(file.read_text()) for file in files]
    assert {verdict["species"] for verdict in verdicts} == {"checkfree, checkpoint", "noloco"}
    assert all(verdict["outcome"] == "finished" and not verdict["wrong"] for verdict in verdicts)
    assert sum(sum(verdict["faults"].values()) for verdict in verdicts) >= 10, verdicts
    assert any(verdict["parts"] > 1 for verdict in verdicts), "a controller was killed or stopped, and the run resumed"
    written = [file.stat().st_mtime_ns for file in files]
    assert "faults injected" in run_campaign(campaign_folder.parent)
    assert [file.stat().st_mtime_ns for file in files] == written


def last(log: list[Fact], kind: str) -> Fact:
    return next(fact for fact in reversed(log) if fact["kind"] == kind and fact.get("mode", "train") == "train")


def no_commit(log: list[Fact]) -> None:
    log.remove(last(log, "commit"))


def same_block(log: list[Fact]) -> None:
    last(log, "run_step")["block"] = 0


def unlike_resume(log: list[Fact]) -> None:
    last(log, "run_started")["blocks_ahead"].append(10**6)


def larger_checkpoint(log: list[Fact]) -> None:
    last(log, "seal")["first_block"] += 1


def missing_stage(log: list[Fact]) -> None:
    log.remove(last(log, "stage_committed"))


@pytest.mark.parametrize("plant", [no_commit, same_block, unlike_resume, larger_checkpoint, missing_stage])
@pytest.mark.slow
def test_an_error_planted_in_a_real_log_is_found(campaign_folder: Path, plant: Callable[[list[Fact]], None]) -> None:
    for run in sorted(campaign_folder.glob("run-*/runs/run")):
        log = facts(run)
        assert Ledger(log).problems == [] == prove_exactly_once(read_run(run))
        if plant is not unlike_resume or sum(fact["kind"] == "run_started" for fact in log) > 1:
            plant(log)
            assert Ledger(log).problems


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_plans_are_valid_and_reproducible(seed: int) -> None:
    """Planaria accepts every recipe, and every fault has an existing place."""
    for number in range(len(SPECIES)):
        plan = draw(seed, number)
        check(RunConfig.model_validate(plan["sections"]))
        Trace.model_validate({"faults": tuple(plan["faults"])})
        assert plan == draw(seed, number) and len(plan["faults"]) >= 28
