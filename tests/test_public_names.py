"""``import planaria``: its public names, and lazy imports."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go
import pytest

import planaria
from planaria.lab.compare.api import ComparisonResult
from planaria.lab.compare.race_results import ArmRun, ArmScore, SeedTrace
from planaria.lab.compare.race_spec import load
from support.report.plain_arms import arm_run, arm_score, results


def test_importing_planaria_imports_nothing_else() -> None:
    program = (
        "import sys, planaria\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('torch', 'pydantic', 'plotly')))\n"
        "print([name for name in sys.modules if name.startswith('planaria.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_every_public_name_exists_and_is_documented() -> None:
    assert {"train", "compare", "load", "Run", "ReferenceEngine", "UserError", "RunStopped"} <= set(planaria.__all__)
    assert set(planaria.__all__) <= set(dir(planaria))
    modules = {module.name for module in pkgutil.iter_modules(planaria.__path__)}
    assert not modules & set(planaria.__all__), "importing such a module would replace the public name"
    for name in planaria.__all__:
        if name != "__version__":
            assert getattr(planaria, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        planaria.trian  # type: ignore[attr-defined]  # noqa: B018


def test_declared_and_lazy_imports_agree() -> None:
    """The imports for type checkers are those at run time."""
    text = Path(planaria.__file__).read_text()
    typed = {line.split()[-1]: line.split()[1] for line in text.splitlines() if line.startswith("    from planaria.")}
    assert typed == planaria._HOMES


def runs(ratio: float) -> Iterator[ArmRun]:
    for seed in (1, 2):
        yield arm_run(2.5 * ratio, ratio, 100 * ratio, seed=seed, target=3.0, final=2.5, failures=3)


@pytest.fixture
def result(tmp_path: Path) -> ComparisonResult:
    def arm(name: str, ratio: float, faults: bool) -> ArmScore:
        curves = [[(0.1 * n, 5.0 - 0.2 * n) for n in range(10)]] * 2
        costs = {"step_s": 90.0, "save_s": 9.0, "traffic": 0.01, "memory": 0.5}
        return arm_score(name, *runs(ratio), faults=faults, curves=curves, **costs)

    failures = [SeedTrace(seed=seed, digest="0" * 64, faults=[(5, 2)]) for seed in (1, 2)]
    arms = [arm("fault-free", 1.0, False), arm("50_%_of & more", 1.25, True), arm("quick", 1.125, True)]
    return ComparisonResult(results(*arms, name="race", clock="clock.toml", failures=failures), tmp_path)


def test_a_comparison_as_tables(result: ComparisonResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = result.table()
    assert [row["arm"] for row in rows] == ["fault-free", "quick", "50_%_of & more"]
    assert (rows[1]["ratio"], rows[1]["ratio_least"], rows[1]["ratio_most"], rows[1]["missed"]) == (1.125,) * 3 + (0,)
    raced = [(row["arm"], row["seed"], row["ticks"]) for row in result.runs()]
    assert raced[2:4] == [("quick", 1, 112.5), ("quick", 2, 112.5)]


def test_a_comparison_as_latex_and_html(result: ComparisonResult) -> None:
    lines = result.to_latex().splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrrr}" and lines[-1] == r"\end{tabular}"
    assert (
        lines[2].startswith(r"arm & steps to target & $\times$ fault-free & hours to target") and lines[2][-2:] == r"\\"
    )
    assert lines[6].startswith(r"50\_\%\_of \& more & 125 & 1.250 & 3.1 &") and r"1 \% & 50 \%" in lines[6]
    assert all(line.count(" & ") == 8 for line in lines[4:7])
    page = result.to_html()
    assert {"loss", "hours", "prices", "winners", "failures0", "failures1"} == result.figures.keys()
    assert all(f'id="{name}"' in page for name in result.figures) and isinstance(result.figure("hours"), go.Figure)
    with pytest.raises(planaria.UserError, match="hour: the report has no such figure; did you mean 'hours'"):
        result.figure("hour")


def test_seeds_and_arms_of_a_comparison_can_be_chosen(tmp_path: Path) -> None:
    comparison, arms = load(planaria.lab.compare.api.find("recovery"), {}, seeds=[5], only=["redundant", "echo-2bit"])
    assert comparison.seeds == [5] and [arm.name for arm in arms] == ["fault-free", "echo-2bit", "redundant"]
    for given, line in (
        ({"seeds": [1, 1]}, "compare.seeds"),
        (
            {"arms": ["ekko-2bit"]},
            "compare.arms.ekko-2bit: neither an arm nor a strategy; did you mean 'echo-2bit'",
        ),
        ({"arms": []}, "compare.arms"),
        ({"stepz": 3}, "stepz: unknown setting; did you mean 'steps'"),
    ):
        with pytest.raises(planaria.UserError, match=line):
            planaria.compare("recovery", out=str(tmp_path / "runs"), progress=False, **given)
    assert not (tmp_path / "runs").exists()
