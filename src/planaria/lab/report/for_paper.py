"""A comparison's table and figures as files for a paper: CSV, LaTeX, PDF and SVG.

Plotly, which the report uses, needs a browser to write PDF; this module uses matplotlib if it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.lab.compare.race_results import ComparisonResults, smoothed_losses
from planaria.lab.report.comparison_figures import Over, bands, colours
from planaria.lab.report.comparison_table import arm_title, latex, numbers
from planaria.lab.report.equal_costs import budgets, cost_headings, equal_costs, has_equal_costs
from planaria.report.sheets import Cell, as_csv
from planaria.trials.result_cache import make_folder
from planaria.trials.spread import format_spread

WIDTH = 5.5
"""width of a figure, inches: one and a half columns of a paper"""
HEIGHT = 3.4
"""default height of a figure, inches"""
FORMATS = ("pdf", "svg")


def write_for_paper(results: ComparisonResults, folder: Path) -> list[str]:
    """Write all files into ``folder``, and return their names; without matplotlib, only tables.

    :raises UserError: when the folder is not writable.
    """
    make_folder(folder)
    tables = {"table.csv": _csv(numbers(results)), "table.tex": latex(results), "runs.csv": _csv(_run_rows(results))}
    files = {name: text.encode() for name, text in (tables | {"curves.csv": _csv(_curve_rows(results))}).items()}
    for name, figure in figures(results).items():
        files |= {f"{name}.{kind}": encode(figure, kind) for kind in FORMATS}
    try:
        for name, content in files.items():
            atomic.write_bytes(folder / name, content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); use another folder with --to") from None
    return [*files]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    body: list[Sequence[Cell]] = [["" if cell is None else cell for cell in row.values()] for row in rows]
    return as_csv([[*rows[0]], *body])


def _run_rows(results: ComparisonResults) -> list[dict[str, Any]]:
    return [
        {"arm": arm.name, **run.model_dump()} for arm in (*results.ranked(), *results.search[1:]) for run in arm.runs
    ]


def _curve_rows(results: ComparisonResults) -> list[dict[str, Any]]:
    """Return every validation: smoothed loss over executed steps and hours."""
    return [
        {"arm": arm.name, "seed": run.seed, "steps": tick, "hours": hours, "loss": loss}
        for arm in results.arms
        for run, course, curve in zip(arm.runs, arm.courses, arm.curves, strict=True)
        for (tick, loss), (hours, _) in zip(smoothed_losses(course.points), curve, strict=True)
    ]


def figures(results: ComparisonResults) -> dict[str, Any]:
    """Return file name → matplotlib figure; empty without matplotlib."""
    try:
        import_module("matplotlib")
    except ImportError:
        return {}
    overs: list[Over] = ["steps", "hours"] if results.priced else ["steps"]
    drawn = {f"loss_{over}": _loss_figure(results, over) for over in overs}
    drawn["to_target"] = _target_figure(results)
    drawn["equal_costs"] = _equal_costs_figure(results)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _loss_figure(results: ComparisonResults, over: Over) -> Any:
    """Plot the mean over seeds as a line, minimum to maximum as a band; return None without data."""
    known = {arm.name: drawn for arm in results.arms if (drawn := bands(arm, over)) is not None}
    if not known:
        return None
    figure, axes = empty_figure(HEIGHT)
    shade = colours(results)
    for name, (at, spreads) in known.items():
        axes.plot(at, [spread.mean for spread in spreads], color=shade[name], linewidth=1.1, label=plain_text(name))
        low, high = ([getattr(spread, side) for spread in spreads] for side in ("least", "most"))
        axes.fill_between(at, low, high, color=shade[name], alpha=0.13, linewidth=0)
    axes.set_xlabel("executed steps" if over == "steps" else "hours")
    axes.set_ylabel("validation loss, nats per token")
    axes.legend(fontsize=6.5, frameon=False)
    return figure


def _target_figure(results: ComparisonResults) -> Any:
    """Plot hours to the target, or steps if they take no time: mean, and minimum to maximum."""
    measure = "hours" if results.priced else "ticks"
    known = [(arm, spread) for arm in reversed(results.ranked()) if (spread := arm.spread(measure)) is not None]
    figure, axes = empty_figure(0.6 + 0.28 * len(known))
    means = [spread.mean for _, spread in known]
    errors = [[spread.mean - spread.least for _, spread in known], [spread.most - spread.mean for _, spread in known]]
    names = [plain_text(arm_title(arm)) for arm, _ in known]
    shade = colours(results)
    axes.barh(names, means, xerr=errors, color=[shade[arm.name] for arm, _ in known], height=0.65, ecolor="#1d2733")
    for index, (arm, _) in enumerate(known):
        axes.text(0, index, f"  × {format_spread(arm.spread('ratio'))} steps", va="center", fontsize=6, color="white")
    axes.set_xlabel("hours to target" if results.priced else "steps to target")
    return figure


def _equal_costs_figure(results: ComparisonResults) -> Any:
    """Plot each arm's loss at equal steps, equal time and equal bytes: mean, and minimum to maximum."""
    if not has_equal_costs(results):
        return None
    rows, (first, _, sent) = equal_costs(results)[::-1], cost_headings(budgets(results))
    figure, axes = empty_figure(0.8 + 0.24 * len(rows))
    marks = [("final", "final", "o"), ("at_first_end", first, "|"), ("at_megabytes", f"{sent} per replica", "x")]
    for (name, title, mark), shade, lift in zip(marks, ("#1d2733", "#2f6fde", "#d9603b"), (0.2, 0, -0.2), strict=True):
        known = [(n + lift, of) for n, row in enumerate(rows) if (of := getattr(row, name)) is not None]
        means = [of.mean for _, of in known]
        ends = [[of.mean - of.least for _, of in known], [of.most - of.mean for _, of in known]]
        style = {"fmt": mark, "color": shade, "markersize": 4, "linewidth": 0.8, "label": title}
        axes.errorbar(means, [at for at, _ in known], xerr=ends, **style)
    axes.set_yticks(range(len(rows)), [f"{plain_text(r.arm.name)}, {1000 * r.step_megabytes:.1f} kB" for r in rows])
    axes.set_xlabel("smoothed validation loss, nats per token")
    axes.legend(fontsize=6.5, frameon=False)
    return figure


def empty_figure(high: float) -> tuple[Any, Any]:
    """Return a figure and its axes, without global state."""
    figure = import_module("matplotlib.figure").Figure(figsize=(WIDTH, high), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plain_text(name: str) -> str:
    """Escape a name that matplotlib could take for mathematics."""
    return name.replace("$", r"\$")


def encode(figure: Any, kind: str) -> bytes:
    """Return the figure as bytes that depend on its numbers only: no date, and deterministic ids."""
    out = BytesIO()
    metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
    with import_module("matplotlib").rc_context({"svg.hashsalt": "planaria", "pdf.fonttype": 42}):
        figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()
