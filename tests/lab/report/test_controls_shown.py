"""Controls in reports: never recommended; arms that lose moments are compared with reset."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest

from planaria.lab.compare.race_results import ComparisonResults, add_reset_ratios
from planaria.lab.compare.run_comparison import best_search_arm
from planaria.lab.report.comparison import verdict, write_comparison
from planaria.lab.report.comparison_figures import price_figure
from planaria.lab.report.comparison_table import columns, rows, show_table
from planaria.lab.report.for_paper import write_for_paper
from planaria.lab.report.winner_figure import hours_of_arms, winning_arms
from planaria.trials.spread import bootstrap
from support.report.synthetic_comparison import HELD, MANNERS, SEEDS, Manner, compared


@pytest.fixture(scope="module")
def held() -> ComparisonResults:
    return compared(HELD)


def test_steps_are_compared_with_reset_arms_that_differ_in_nothing_else(held: ComparisonResults) -> None:
    by = {arm.name: arm for arm in held.arms}
    for run, alone in zip(by["echo"].runs, by["reset"].runs, strict=True):
        assert run.ticks and alone.ticks and run.reset_ratio == run.ticks / alone.ticks
    assert all(run.reset_ratio is None for run in by["checkfree-plus"].runs), "its routes differ from reset's"
    assert all(run.reset_ratio is None for name in ("fault-free", "oracle", "reset") for run in by[name].runs)
    swapped = Manner({"routing.kind": "swapped", "recovery.strategy": "reset"}, control="reset")
    both = {arm.name: arm for arm in compared({**HELD, "reset-swapped": swapped}).arms}
    other = both["reset-swapped"].runs
    assert all(run.reset_ratio == (run.ticks or 0) / (o.ticks or 1) for run, o in
               zip(both["checkfree-plus"].runs, other, strict=True))  # fmt: skip


def test_lost_moments_are_compared_with_an_arm_that_differs_in_nothing_else() -> None:
    changes = {"optim.beta2": "0.95"}
    more = {
        "calm-95": Manner(changes, faults=False, slower=1.2),
        "reset-95": Manner({**changes, "recovery.strategy": "reset"}, slower=1.2, control="reset"),
    }
    found = compared({**HELD, **more})
    by = {arm.name: arm for arm in found.arms}
    alone = found.reset_cost(by["reset-95"])
    assert alone is not None and alone.mean == pytest.approx(1.0, abs=0.02)
    assert (own := found.reset_cost(by["reset"])) is not None and own.mean == pytest.approx(0.95, abs=0.02)
    without = found.model_copy(update={"arms": [arm for arm in found.arms if arm.name != "calm-95"]})
    assert without.reset_cost(by["reset-95"]) is None


def test_an_arm_that_missed_has_no_ratio_to_reset(held: ComparisonResults) -> None:
    arms = list(held.arms)
    runs = [arms[3].runs[0].model_copy(update={"ticks": None}), *arms[3].runs[1:]]
    arms[3] = arms[3].model_copy(update={"runs": runs})
    (again,) = [arm for arm in add_reset_ratios(arms) if arm.name == "echo"]
    assert again.runs[0].reset_ratio is None and again.spread("reset_ratio") is None


def test_the_table_has_reset_ratios_the_floor_and_the_effect_of_lost_moments(
    held: ComparisonResults, capsys: pytest.CaptureFixture[str]
) -> None:
    show_table(held)
    shown = capsys.readouterr().out
    (reset,) = [arm for arm in held.arms if arm.name == "reset"]
    ratio = reset.spread("ratio")
    assert ratio is not None and ratio.mean < 0.97
    assert f"controls      Losing moments alone takes × {ratio.mean:.3f}" in shown
    assert "of the steps without failures" in shown
    assert "× reset" in shown and "reset (control)" in shown and "oracle (control)" in shown
    floor = held.arms[1].spread("hours")
    assert floor is not None and f"controls      The floor is {floor.mean:.2f} h, ×" in shown


def test_no_control_is_named_as_the_fastest_or_drawn_as_a_choice(held: ComparisonResults, tmp_path: Path) -> None:
    reset = next(arm for arm in held.arms if arm.name == "reset").spread("hours")
    echo = next(arm for arm in held.arms if arm.name == "echo").spread("hours")
    assert reset is not None and echo is not None and reset.mean < echo.mean
    found = verdict(held)
    assert "echo reached the target first" in found.summary
    assert "Losing moments alone takes × 0.9" in found.summary and "over that, steps of echo × 1.0" in found.summary
    assert "The floor is" in found.summary
    assert {name for row in winning_arms(hours_of_arms(held, [0.05, 0.2], [1.0, 1.5], None)) for name in row} <= {
        "echo",
        "checkfree-plus",
    }
    text = write_comparison(held, tmp_path / "report.html").read_text()
    assert 'data-sheet="controls"' in text and 'id="loss-steps"' in text
    front = price_figure(held).data[-1]
    marks = {t.hovertemplate.split("</b>")[0].removeprefix("<b>"): t for t in price_figure(held).data[:-1]}
    assert marks["reset"].y[0] not in front.y


def test_a_comparison_without_a_reset_arm_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared()
    assert "No arm shows what losing moments alone does" in verdict(found).summary
    show_table(found)
    assert "add the control reset" in capsys.readouterr().out
    exact = compared({"fault-free": MANNERS["fault-free"], "twin": Manner({}, exact=True)})
    assert "moments" not in verdict(exact).summary


def test_without_a_clock_there_are_no_hours_and_steps_decide(
    held: ComparisonResults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unpriced(found: ComparisonResults) -> ComparisonResults:
        arms = [
            arm.model_copy(
                update={
                    "step_s": 0.0,
                    "runs": [run.model_copy(update={"hours": 0.0, "hours_ratio": None}) for run in arm.runs],
                }
            )
            for arm in found.arms
        ]
        return found.model_copy(update={"arms": arms})

    found = unpriced(held)
    assert not any("hours" in column for column in columns(found))
    steps = [arm.spread("ticks") for arm in found.ranked()[1:]]
    assert steps == sorted(steps, key=lambda spread: spread.mean if spread else 0.0)
    show_table(found)
    shown = capsys.readouterr().out
    assert "0.0 h" not in shown and "floor" not in shown and "by which steps take no time" in shown
    text = write_comparison(found, tmp_path / "report.html").read_text()
    assert "0.0 h<" not in text and "0.00 h" not in text and 'id="loss-steps"' in text
    assert "fastest with failures" in text and " steps<" in text
    assert not any("hours" in name for name in write_for_paper(found, tmp_path / "paper"))


def test_intervals_are_shown_with_five_seeds_or_more(held: ComparisonResults) -> None:
    assert "95 % of ×" not in columns(held) and held.arms[3].interval("ratio") is None
    many = held.model_copy(
        update={
            "arms": [arm.model_copy(update={"runs": arm.runs * 2}) for arm in held.arms],
            "failures": held.failures * 2,
        }
    )
    place = columns(many).index("95 % of ×")
    (cell,) = [row[place] for row in rows(many) if row[0] == "echo"]
    ratios = [run.ratio for run in many.arms[3].runs if run.ratio is not None]
    assert cell == "{:.3f} … {:.3f}".format(*bootstrap(ratios))
    assert len(ratios) == 2 * len(SEEDS)


def test_the_search_is_listed_and_its_best_point_is_the_tuned_arm(capsys: pytest.CaptureFixture[str]) -> None:
    points = {
        "fault-free": MANNERS["fault-free"],
        "lr 0.004": Manner({"optim.lr": "0.004"}, faults=False, slower=0.9),
        "lr 0.008": Manner({"optim.lr": "0.008"}, faults=False, setback=60, slower=1.4),
    }
    found = compared(points)
    best = best_search_arm(found.arms)
    assert best.name == "tuned" and best.changes == {"optim.lr": "0.004"}
    whole = compared(HELD).model_copy(update={"search": found.arms})
    whole = whole.model_copy(update={"arms": [whole.arms[0], best, *whole.arms[1:]]})
    show_table(whole)
    shown = " ".join(capsys.readouterr().out.split())
    assert "tuned optim.lr = 0.004; steps of each point over fault-free: lr 0.004 0.9" in shown and "lr 0.008" in shown


@pytest.mark.slow
def test_files_for_a_paper_have_every_number_and_are_the_same_again(held: ComparisonResults, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = write_for_paper(held, tmp_path / "one")
    assert sorted(names) == sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"table.csv", "table.tex", "runs.csv", "curves.csv"} < set(names)
    assert {
        f"{figure}.{kind}" for figure in ("loss_steps", "loss_hours", "to_target") for kind in ("pdf", "svg")
    } < set(names)
    table = list(csv.DictReader(io.StringIO((tmp_path / "one" / "table.csv").read_text())))
    assert [row["arm"] for row in table] == [arm.name for arm in held.ranked()]
    echo = next(row for row in table if row["arm"] == "echo")
    spread = held.arms[3].spread("reset_ratio")
    assert spread is not None
    assert [float(echo[f"reset_ratio{end}"]) for end in ("", "_least", "_most")] == pytest.approx([*spread])
    curves = list(csv.DictReader(io.StringIO((tmp_path / "one" / "curves.csv").read_text())))
    assert len(curves) == sum(len(curve) for arm in held.arms for curve in arm.curves)
    assert (tmp_path / "one" / "loss_steps.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in (tmp_path / "one" / "loss_hours.svg").read_text()
    write_for_paper(held, tmp_path / "two")
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_without_matplotlib_there_are_tables(
    held: ComparisonResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_for_paper(held, tmp_path) == ["table.csv", "table.tex", "runs.csv", "curves.csv"]
