"""``planaria compare``: dry runs, options of failures, and files for a paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planaria
from planaria import cli
from planaria.config import shipped
from planaria.config.schema import RunConfig
from planaria.lab import dry_run
from planaria.lab.compare.api import trace_overrides
from planaria.lab.compare.race_job import Race
from planaria.lab.compare.race_spec import load
from planaria.lab.dry_run import Pace, remaining_s
from planaria.lab.report.comparison_table import columns, rows
from planaria.models.llama_stages import parameter_count
from support import dialogue_corpus
from support.recomputed_comparison import table_cells
from support.tiny_recipe import written

TRACE = "[compare.trace]\nhourly = 0.9\nstep_s = 300.0\nexempt = [1, 4]\n"


def recipe_of(folder: Path, extra: str = "") -> Path:
    recipe = written(folder)
    with recipe.open("a") as file:
        file.write(f"[compare]\nseeds = [1, 2]\n{extra}{TRACE}[compare.arms.echo]\nrecovery.strategy = 'echo'\n")
    return recipe


def test_a_dry_run_prints_arms_seeds_steps_and_time_and_races_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, "search = { lr = [0.005, 0.01] }\n")
    assert cli.run(["compare", str(recipe), "--dry-run", "--steps", "24", "--train.eval_every", "2", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "tiny: 5 arms, seeds 1, 2, 24 steps each" in out
    for name in ("fault-free", "echo", "oracle", "reset", "lr 0.01"):
        assert f"  {name}  " in out
    assert "10 races, 0 of them kept from before" in out and "takes         about" in out
    assert not (tmp_path / "runs").exists()


def test_arms_that_differ_only_in_rates_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[RunConfig] = []

    def measure(config: RunConfig, dataset: object) -> Pace:
        timed.append(config)
        return Pace(step_s=float(len(timed)), validation_s=0.0)

    monkeypatch.setattr(dry_run, "measure_speed", measure)
    _, arms = load(shipped.find("exchanges"), {})
    paces = dry_run.measure_arms(arms, None, quiet=True)  # type: ignore[arg-type]
    assert len(arms) == len(paces) == 64 and len(timed) == 16
    assert paces["diloco_2e-3"] == paces["diloco_8e-3"] != paces["eager_2e-3"]


def test_a_dry_run_rejects_what_a_run_rejects(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    with pytest.raises(
        planaria.UserError, match=r"tiny.toml: compare.arms.ecko: neither an arm nor a strategy.*'echo'\?"
    ):
        cli.run(["compare", str(recipe), "--dry-run", "--arms", "ecko"])
    with pytest.raises(
        planaria.UserError, match=r"--failure-domain machines: no such kind of failure; did you mean 'machine'\?"
    ):
        cli.run(["compare", str(recipe), "--dry-run", "--failure-domain", "machines"])


@pytest.mark.parametrize("lost", ["adjacent", "machine", "region"])
def test_lost_replaces_the_recipe_s_rule_of_failures(tmp_path: Path, lost: str) -> None:
    recipe = recipe_of(tmp_path)
    laid = trace_overrides(None, lost)  # type: ignore[arg-type]
    comparison, _ = load(recipe, {"train.eval_every": "1"}, trace_overrides=laid)
    assert (comparison.trace.failure_domain, comparison.trace.forbid_adjacent) == (lost, False)
    race, _ = load(shipped.find("recovery"), {}, trace_overrides=laid)
    assert race.trace.failure_domain == lost and not race.trace.forbid_adjacent, "the recipe forbids neighbours"


def test_arms_recognise_dialogues(tmp_path: Path) -> None:
    found = dialogue_corpus.write_dialogues(tmp_path)
    flags = {"data.source": found["source"], "data.template": found["template"], "train.eval_every": "1"}
    _, arms = load(recipe_of(tmp_path), flags)
    assert {(arm.config.data.format, arm.config.data.document_mask) for arm in arms} == {("messages", True)}


def test_the_remaining_time_is_an_even_share_or_the_longest_race() -> None:
    config = RunConfig.model_validate({"train": {"steps": 100, "eval_every": 10}})
    races = [Race.model_construct(arm=arm, config=config) for arm in ("a", "b", "a", "b")]
    paces = {"a": Pace(step_s=1.0, validation_s=2.0), "b": Pace(step_s=9.0, validation_s=0.0)}
    short, long = (paces[arm].of(config) for arm in "ab")
    assert (short, long) == (124.0, 904.0)
    assert remaining_s(races, [False] * 4, paces, 2) == short + long
    assert remaining_s(races, [True, False, True, False], paces, 4) == long
    assert remaining_s(races, [True] * 4, paces, 2) == 0.0


def test_the_two_races_differ_only_in_size() -> None:
    (small, arms), (large, others) = (load(shipped.find(f"race_{size}"), {}) for size in ("small", "large"))
    assert parameter_count(others[0].config.model) >= 8 * parameter_count(arms[0].config.model)
    assert small.seeds == large.seeds and len(small.seeds) >= 5
    assert small.trace == large.trace and small.clock == large.clock and small.target_at == large.target_at
    names = {arm.name for arm in others if not arm.searched}
    assert {"oracle", "reset", "reset-95", "fault-free-95"} <= names <= {arm.name for arm in arms}
    assert all(any(arm.searched for arm in each) for each in (arms, others))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comparison_with_controls_a_search_and_files_for_a_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, "search = { lr = [0.005, 0.01] }\n")
    command = [
        "compare",
        str(recipe),
        "--steps",
        "24",
        "--train.eval_every",
        "2",
        "--quiet",
        "--failure-domain",
        "machine",
    ]
    assert cli.run([*command, "--to", str(tmp_path / "paper")]) == 0
    out = capsys.readouterr().out
    assert "oracle (control)" in out and "reset (control)" in out and "tuned         " in out
    assert "by which steps take no time" in out and "hours" not in out.partition("target        ")[0]
    files = {path.name for path in (tmp_path / "paper").iterdir()}
    assert {"table.csv", "table.tex", "runs.csv", "curves.csv"} <= files
    found = planaria.compare(
        recipe, failure_domain="machine", progress=False, settings={"train.steps": 24, "train.eval_every": 2}
    ).results
    oracle, free = (next(arm for arm in found.arms if arm.name == name) for name in ("oracle", "fault-free"))
    for one, other in zip(oracle.courses, free.courses, strict=True):
        assert one.points == other.points and one.loss_events and not other.loss_events, "bit for bit, through failures"
    cells = table_cells(json.loads((tmp_path / "runs" / "tiny-compare" / "comparison.json").read_text()))
    for row in rows(found):
        printed = dict(zip(columns(found), row, strict=True))
        own = cells[printed["arm"].removesuffix(" (control)")]
        missed = "not reached" in printed["steps to target"]
        same = ("× fault-free", "traffic") if missed else own.keys() & printed.keys()
        assert {column: own[column] for column in same} == {column: printed[column] for column in same}, printed["arm"]
    assert float(cells["echo"]["traffic"].removesuffix(" %")) > 0, "echoes send something"
    assert {len(met.stages) for met in oracle.courses[0].loss_events} <= {1, 2}
    assert (tmp_path / "runs" / "tiny-compare" / "oracle.1.json").is_file()
