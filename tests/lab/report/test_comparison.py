from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from planaria.lab.compare.race_results import ArmScore, ComparisonResults, SeedTrace
from planaria.lab.report.comparison import write_comparison
from planaria.lab.report.comparison_figures import (
    colours,
    hours_figure,
    loss_figure,
    pareto_front,
    price_figure,
)
from planaria.lab.report.comparison_table import latex, show_table
from planaria.lab.report.winner_figure import redundant_arm, winners_figure
from planaria.report.tables import WIDE
from support.report.synthetic_comparison import MANNERS, MISSING, SEEDS, Manner, compared, digest


@pytest.fixture(scope="module")
def found() -> ComparisonResults:
    return compared()


@pytest.fixture(scope="module")
def text(found: ComparisonResults, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("comparison")
    out = write_comparison(found, folder / "report.html")
    assert list(folder.iterdir()) == [out]
    return out.read_text()


def table_of(found: ComparisonResults, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show_table(found)
    return capsys.readouterr().out.splitlines()


def test_table_has_fault_free_first_then_the_quickest_and_those_that_missed_last(
    found: ComparisonResults, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = table_of(found, capsys)
    order = [name for line in lines for name in MANNERS if line.startswith(f"  {name} ")]
    hours = {arm.name: arm.spread("hours") for arm in found.arms}
    assert order[0] == "fault-free" and order[-1] == MISSING and len(order) == len(MANNERS)
    middle = [hours[name] or (0.0,) for name in order[1:-1]]
    assert middle == sorted(middle)


def test_the_table_has_results_and_their_meaning(found: ComparisonResults, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table_of(found, capsys)
    printed = "\n".join(lines)
    assert max(map(len, lines)) <= WIDE and "<i>worms: mean [least … most] of seeds 1, 3, 4" in printed
    (row,) = [line for line in lines if line.startswith("  checkpoint-50 ")]
    mean, least, most = found.arms[2].spread("ticks") or (0, 0, 0)
    assert f"{mean:.0f} [{least:.0f} … {most:.0f}]" in row
    (missed,) = [line for line in lines if MISSING in line]
    assert "not reached in 3 of 3 seeds" in missed
    assert all(digest(seed)[:16] in printed for seed in SEEDS)
    assert "llama_500m.toml" in printed and "after 60 % of 1000 steps" in printed


def test_a_race_without_failures_is_not_described_by_failures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    codec = Manner({"pipeline.wire": "6/4"}, faults=False, step_s=0.4)
    codecs = compared({"fault-free": Manner({}, faults=False, step_s=0.9), "codec": codec})
    text = write_comparison(codecs, tmp_path / "report.html").read_text()
    assert "up to 1,000 steps each, without failures" in text
    assert not any(title in text for title in ("The failures", "failure rate", "Cost and harm", "losing moments"))
    lines = "\n".join(table_of(codecs, capsys))
    hours = codecs.arms[1].spread("hours")
    assert hours is not None and f"{hours.mean:.3f}" in lines and "trace  " not in lines


def test_a_seed_that_missed_is_reported_and_excludes_a_mean(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared()
    arm = found.arms[2]
    runs = [arm.runs[0].model_copy(update={"ticks": None, "hours": None, "ratio": None}), *arm.runs[1:]]
    found.arms[2] = arm.model_copy(update={"runs": runs})
    (row,) = [line for line in table_of(found, capsys) if line.startswith("  checkpoint-50 ")]
    assert "not reached in 1 of 3 seeds" in row
    assert "checkpoint-50" not in hours_figure(found).data[0].y


@pytest.mark.slow
def test_machine_hours_are_shown_if_arms_differ_in_machines(
    found: ComparisonResults, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not any("machine-hours" in line for line in table_of(found, capsys)) and 'id="machine-hours"' not in text
    twins = compared({**MANNERS, "hot": Manner({"exchange.replicas": "2"}, step_s=50.0, workers=14)})
    struck = SeedTrace(seed=3, digest="f" * 64, faults=[(5, 2), (9, 1)], replica=1)
    twins = twins.model_copy(update={"replica_failures": [struck]})
    lines = table_of(twins, capsys)
    assert max(map(len, lines)) <= WIDE and any("machine-hours" in line for line in lines)
    hours, both = twins.arms[-1].spread("hours"), twins.arms[-1].spread("machine_hours")
    assert hours is not None and both is not None and both == pytest.approx([14 * each for each in hours])
    (row,) = [line for line in lines if line.startswith("  hot ")]
    assert f"{both.mean:.0f} [{both.least:.0f} … {both.most:.0f}]" in row
    assert "trace         ffffffffffffffff seed 3, replica 1, 2 failures" in lines
    bar = hours_figure(twins, "machine_hours", "machine-hours").data[0]
    assert bar.x[bar.y.index("hot")] == both.mean
    page = write_comparison(twins, tmp_path / "report.html").read_text()
    assert 'id="machine-hours"' in page and "hot 14" in page
    assert all(f">{run.machine_hours:.0f}<" in page for run in twins.arms[-1].runs)
    assert 'id="failures3"' in page and "seed 3, replica 1, 2 failures" in page
    assert latex(twins).splitlines()[2].count("machine-hours") == 1


def test_names_from_outside_are_not_markup(text: str) -> None:
    own = re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.DOTALL)
    assert "&lt;i&gt;worms" in own and "<i>worms" not in own
    assert "redraw &lt;b&gt;&amp;" in own and "redraw <b>" not in own


def test_the_page_lists_every_run_and_every_change(found: ComparisonResults, text: str) -> None:
    for arm in found.arms:
        for run in arm.runs:
            assert run.final is not None and f"{run.final:.4f}" in text
        for key, value in arm.changes.items():
            assert f"<td>{key}</td><td>{value}</td>" in text
    assert "tick 990: stage 2 is out of reach" in text
    assert "3 of 4 arms reached it" in text


def test_the_loss_band_contains_all_seeds(found: ComparisonResults) -> None:
    fig = loss_figure(found)
    lines = {trace.name: trace for trace in fig.data if trace.mode == "lines" and trace.name}
    bands = {trace.legendgroup: trace for trace in fig.data if trace.fill == "toself"}
    assert len(lines) == len(bands) == len(MANNERS)
    band, line = bands["fault-free"], lines["fault-free"]
    count = len(line.x)
    most, least = band.y[:count], band.y[count:][::-1]
    assert all(low <= mean <= high for low, mean, high in zip(least, line.y, most, strict=True))
    (target,) = [shape.y0 for shape in fig.layout.shapes]
    assert target == pytest.approx(sum(run.target for run in found.arms[0].runs) / len(SEEDS))
    # The line crosses the target where the bars say so.
    reached = next(hours for hours, loss in zip(line.x, line.y, strict=True) if loss <= target)
    assert reached == pytest.approx(found.arms[0].spread("hours")[0], rel=0.02)  # type: ignore[index]


def test_prices_are_on_a_logarithmic_axis_with_a_zero(found: ComparisonResults) -> None:
    fig = price_figure(found)
    ticks = dict(zip(fig.layout.xaxis.ticktext, fig.layout.xaxis.tickvals, strict=True))
    marks = {trace.hovertemplate.split("</b>")[0].removeprefix("<b>"): trace for trace in fig.data[:-1]}
    assert marks["fault-free"].x[0] == marks["checkpoint-50"].x[0] == ticks["0"]
    assert ticks["0.1 %"] < marks["checkfree-plus"].x[0] < ticks["1 %"]
    assert ticks["10 %"] < marks["redundant"].x[0] < ticks["100 %"]
    assert marks["redundant"].marker.size > marks["checkpoint-50"].marker.size
    assert marks["checkpoint-50"].y[0] == pytest.approx(100 * (found.arms[2].spread("ratio")[0] - 1))  # type: ignore[index]
    assert len(marks) == len(MANNERS) - 1, "who missed the target has no place"
    assert fig.data[-1].line.shape == "hv" and marks["fault-free"].y[0] not in fig.data[-1].y


def test_prices_below_those_of_the_reference_are_drawn(found: ComparisonResults) -> None:
    cheaper = [arm.model_copy(update={"memory": -0.5, "traffic": -0.2}) for arm in found.arms]
    fig = price_figure(found.model_copy(update={"arms": cheaper}))
    assert {trace.marker.size for trace in fig.data[:-1]} == {10}


def test_labels_of_prices_do_not_overlap() -> None:
    manners = {"fault-free": MANNERS["fault-free"], **{f"same {n}": MANNERS["checkpoint-50"] for n in range(4)}}
    names = [note for note in price_figure(compared(manners)).layout.annotations if note.text.startswith("same")]
    heights = sorted(note.ay for note in names)
    assert all(b - a > 12 for a, b in itertools.pairwise(heights))


def test_winners_are_drawn_in_the_arms_own_colours(found: ComparisonResults) -> None:
    fig = winners_figure(found)
    heat = fig.data[0]
    names = {text.split(":")[0] for row in heat.text for text in row}
    assert names == {"checkfree-plus", "redundant"}
    assert {colour for _, colour in heat.colorscale} == {colours(found)[name] for name in names}
    assert heat.text[0][-1].startswith("redundant") and heat.text[-1][0].startswith("checkfree-plus")
    star = fig.data[-1]
    assert star.x == (10.0,) and star.y[0] == pytest.approx(129.0 / 91.3)


def test_redundancy_without_its_computation_has_no_step_to_vary() -> None:
    found = compared()
    assert redundant_arm(found) == "redundant"
    found.arms[3] = found.arms[3].model_copy(update={"computes_copies": False})
    assert redundant_arm(found) is None


@pytest.mark.parametrize(
    ("changes", "computes"),
    [
        ({"recovery.strategy": "redundant, checkpoint"}, True),
        ({"recovery.strategy": "redundant", "recovery.options.forward": "False"}, False),
        ({"recovery.strategy": "checkfree"}, False),
    ],
)
def test_older_results_name_the_arms_that_compute_copies(changes: dict[str, str], computes: bool) -> None:
    fields = compared().arms[3].model_dump(mode="json", exclude={"computes_copies"}) | {"changes": changes}
    assert ArmScore.model_validate(fields).computes_copies is computes


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("lacking", ["prices", "rate", "arms", "survivors", "curves"])
def test_a_page_is_written_without_optional_parts(lacking: str, tmp_path: Path) -> None:
    manners = {name: MANNERS[name] for name in ("fault-free", MISSING)} if lacking == "survivors" else MANNERS
    manners = {"fault-free": MANNERS["fault-free"]} if lacking == "arms" else manners
    found = compared(manners, hourly=0.0 if lacking == "rate" else 0.1)
    if lacking == "prices":
        found = found.model_copy(
            update={"arms": [arm.model_copy(update={"step_s": 0.0, "save_s": 0.0}) for arm in found.arms]}
        )
    if lacking == "curves":
        found.arms[1] = found.arms[1].model_copy(update={"curves": [[], [], []]})
    text = write_comparison(found, tmp_path / "report.html").read_text()
    assert ('id="winners"' in text) == (lacking == "curves")
    assert ('id="loss"' in text) == (lacking != "prices")


def test_the_pareto_front_has_no_dominated_arm() -> None:
    points = [(0.0, 9.0), (1.0, 4.0), (2.0, 4.0), None, (3.0, 1.0), (2.5, 5.0), (0.0, 10.0)]
    assert pareto_front(points) == [0, 1, 4]
    assert pareto_front([None]) == []
