"""``planaria lab demo``: errors, the numbers of its table, and a short run of three arms with a SIGKILL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planaria.config import recipe, shipped
from planaria.faults.trace import read
from planaria.lab.commands.demo import DEMOS, Outcome, body, rows
from planaria.report import page
from planaria.report.tables import Table
from planaria.runtime.api.configure import configure
from support.command_line import exit_code, refused


def outcome(arm: str, step_s: float, losses: list[float], recoveries: tuple[float, ...] = ()) -> Outcome:
    times = [step_s * (number + 1) for number in range(len(losses))]
    return Outcome(arm, f"runs/{arm}", times, losses, step_s, 8e6 / step_s, 3.0, [*recoveries])


DENSE = outcome("bf16", 2.0, [6.0, 5.0, 4.0, 3.0, 2.0])
CODED = outcome("6/4", 1.0, [6.0, 5.0, 4.0, 2.9, 2.0], (0.25,))
WORSE = outcome("4/4", 1.0, [6.0, 5.0, 4.0, 3.1, 2.5])


def test_seconds_to_a_loss_end_with_the_first_step_that_reaches_it() -> None:
    assert DENSE.seconds_to(5.0) == 6.0 and DENSE.seconds_to(6.0) == 2.0
    assert CODED.seconds_to(DENSE.smoothed[-1]) == 5.0
    assert WORSE.seconds_to(DENSE.smoothed[-1]) is None


def test_the_table_states_losses_and_targets_that_were_not_reached() -> None:
    dense, coded, worse = rows([DENSE, CODED, WORSE])
    assert dense == ["bf16", "2.00", "4.0", "3.500", "3.000", "10.0", "10.0", "–"]
    assert coded[1:4] == ["1.00", "8.0", "3.475"] and coded[-2:] == ["5.0", "0.25"]
    assert worse[-2] == "not reached (+0.150)"


def test_the_report_has_a_curve_for_each_arm() -> None:
    outcomes = [DENSE, CODED, WORSE]
    sections = list(body("home-links", outcomes, Table("", ["arm"], [["bf16"]])))
    drawn = page.figures(body("home-links", outcomes, Table("", ["arm"], [["bf16"]])))["loss"]
    assert [curve.name for curve in drawn.data] == ["bf16", "6/4", "4/4"]
    assert list(drawn.data[0].y) == DENSE.smoothed and "+0.150 (4/4)" in sections[0]


@pytest.mark.parametrize("name", DEMOS)
def test_arms_differ_from_the_recipe_in_few_settings(name: str) -> None:
    shipped_recipe, arms = DEMOS[name]
    path = shipped.find(shipped_recipe)
    base, *others = [recipe.flatten(configure(path, settings={**own})) for own in arms.values()]
    for other in others:
        assert {key for key in base if base[key] != other.get(key)} <= {"pipeline.wire", "chaos.trace"}


def test_one_arm_of_home_links_kills_a_middle_stage_half_way() -> None:
    shipped_recipe, arms = DEMOS["home-links"]
    *free, killed = [configure(shipped.find(shipped_recipe), settings={**own}) for own in arms.values()]
    assert [config.chaos.trace for config in free] == [None, None] and killed.chaos.trace is not None
    (fault,) = read(Path(killed.chaos.trace)).faults
    assert (fault.signal, fault.step) == ("kill", killed.train.steps // 2)
    assert 1 < fault.stage < killed.pipeline.stages
    assert killed.network.bandwidth == 200e6 / 8 and killed.network.latency_s == 0.05
    assert killed.network.emulate == "links"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["home-link"], "home-link: unknown demo; did you mean 'home-links'?"),
        (["home-links", "--pipeline.wire", "fp32"], "--pipeline.wire fp32: differs between the arms of home-links"),
        (["home-links", "--to", "chart.png"], "--to chart.png: use a file name that ends with .pdf or .svg"),
        (["home-links", "--chaos.trace", "none.json"], "none.json"),
        (["home-links", "--pipeline.stages", "3"], "model.layers"),
    ],
)
def test_mistakes_are_refused_before_any_run(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "lab", "demo", *arguments, silent=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_demo_ends_with_a_table_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace.json"
    trace.write_text('{"faults": [{"step": 6, "stage": 2, "moment": "forward"}]}')
    small = ["--train.steps", "8", "--train.eval_every", "8", "--pipeline.microbatch_size", "4"]
    links = ["--network.latency_s", "0.002", "--chaos.trace", str(trace), "--quiet"]
    assert exit_code("lab", "demo", "home-links", *small, *links) == 0
    out, folder = capsys.readouterr().out, tmp_path / "runs" / "home-links"
    assert "runs/home-links/report.html" in out and "6/4, one SIGKILL" in out
    assert "<h1>home-links" in (folder / "report.html").read_text()
    dense, coded, killed = json.loads((folder / "demo.json").read_text())["arms"]
    assert [len(arm["losses"]) for arm in (dense, coded, killed)] == [8, 8, 8]
    assert 2.25 < dense["step_bytes"] / coded["step_bytes"] < 16 / 5.25, (
        "less than of messages alone: echo sends copies"
    )
    assert dense["recoveries_s"] == coded["recoveries_s"] == [] and len(killed["recoveries_s"]) == 1
    assert killed["losses"][:6] == coded["losses"][:6]
