"""The table of a comparison, with the same columns on the terminal, as LaTeX and as CSV."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from rich.text import Text

from planaria.lab.compare.race_results import MIN_SEEDS, ArmScore, ComparisonResults, SeedTrace
from planaria.lab.compare.race_spec import SMOOTHING_WINDOW
from planaria.lab.report.equal_costs import equal_costs_table, has_equal_costs
from planaria.report.phrases import format_count, format_number, join_names
from planaria.report.tables import Table, show
from planaria.trials.spread import format_seeds, format_spread

DIGEST = 16
"""hex digits shown of a trace's digest"""
STEPS = {"steps to target": ("ticks", ".0f"), "× fault-free": ("ratio", ".3f")}
"""column → number of a run, and its format"""
RESET = {"× reset": ("reset_ratio", ".3f")}
"""columns added if a control loses moments alone"""
HOURS = {"hours to target": ("hours", ".1f"), "× hours": ("hours_ratio", ".3f")}
"""columns added if steps take time; short races have more digits of hours, see :func:`hours_form`"""
MACHINES = {"machine-hours": ("machine_hours", ".0f")}
"""columns added if arms differ in machines"""
FINAL = {"final loss": ("final", ".3f")}
INTERVAL = "95 % of ×"
"""column of the bootstrap intervals of ratios to the fault-free arm"""


def show_table(results: ComparisonResults) -> None:
    """Print every arm's mean [least … most] over the seeds, and explanations."""
    title = f"{results.name}: mean [least … most] of {format_seeds_of(results)}"
    more_tables = [equal_costs_table(results)] if has_equal_costs(results) else []
    console = show([Table(title, columns(results), rows(results)), *more_tables])
    for failures in () if results.without_failures else (*results.failures, *results.replica_failures):
        console.print(f"trace         {failures.digest[:DIGEST]} {describe_failures(failures)}", highlight=False)
    console.print(Text(f"clock         {results.clock}{'' if results.priced else ', by which steps take no time'}"))
    console.print(Text(f"target        {describe_target(results)}"))
    for sentence in control_sentences(results):
        console.print(Text(f"controls      {sentence}"))
    if results.search:
        console.print(Text(search_sentence(results)))


def describe_failures(failures: SeedTrace) -> str:
    replica = f", replica {failures.replica}" if failures.replica else ""
    return f"seed {failures.seed}{replica}, {format_count(len(failures.faults), 'failure')}"


def number_columns(results: ComparisonResults) -> dict[str, tuple[str, str]]:
    """Return the relevant columns: column → number of a run, and its format."""
    with_reset = any(run.reset_ratio is not None for arm in results.arms for run in arm.runs)
    hours = HOURS | {"hours to target": ("hours", hours_form(results))} if results.priced else {}
    machines = MACHINES if results.priced and results.machines_differ else {}
    return STEPS | (RESET if with_reset else {}) | hours | machines | FINAL


def hours_form(results: ComparisonResults) -> str:
    """Return the format of hours: one decimal, or three significant digits of the fault-free arm's if it took less."""
    free = results.arms[0].spread("hours")
    if free is None or not 0 < free.mean < 1:
        return ".1f"
    return f".{2 - math.floor(math.log10(free.mean))}f"


def columns(results: ComparisonResults) -> list[str]:
    """Return the head of the table."""
    head = [
        "arm",
        *number_columns(results),
        "traffic",
        *(["of weights"] if has_exchange(results) else []),
        "memory",
        "failures",
    ]
    if _has_intervals(results):
        head.insert(3, INTERVAL)
    return head


def rows(results: ComparisonResults) -> list[list[str]]:
    """Return the table's rows, best arm first."""
    return [_cells(results, arm) for arm in results.ranked()]


def numbers(results: ComparisonResults) -> list[dict[str, object]]:
    """Return the table as numbers: mean, minimum and maximum over the seeds, with None where a seed has no number."""
    every = (*(of for of, _ in (STEPS | RESET | HOURS | MACHINES | FINAL).values()), "failures")
    table_rows: list[dict[str, object]] = []
    for arm in results.ranked():
        row: dict[str, object] = {"arm": arm.name, "control": bool(arm.control)}
        for name in every:
            known = None if "hours" in name and not results.priced else arm.spread(name)
            mean, least, most = known or (None, None, None)
            row |= {name: mean, f"{name}_least": least, f"{name}_most": most}
        for name in ("ratio", "reset_ratio", "hours_ratio"):
            row[f"{name}_low95"], row[f"{name}_high95"] = arm.interval(name) or (None, None)
        shares = {"traffic": arm.traffic, "of_weights": arm.traffic_per_weight_byte, "memory": arm.memory}
        table_rows.append(row | shares | {"missed": arm.missed})
    return table_rows


def _has_intervals(results: ComparisonResults) -> bool:
    return len(results.failures) >= MIN_SEEDS


def _cells(results: ComparisonResults, arm: ArmScore) -> list[str]:
    cells = [format_spread(arm.spread(of), form) for of, form in number_columns(results).values()]
    if arm.missed:
        cells[0] = f"not reached in {arm.missed} of {format_count(len(arm.runs), 'seed')}"
    if _has_intervals(results):
        cells.insert(2, range_text(arm.interval("ratio")))
    shares = (arm.traffic, *([arm.traffic_per_weight_byte] if has_exchange(results) else []), arm.memory)
    return [
        arm_title(arm),
        *cells,
        *(f"{100 * share:.3g} %" for share in shares),
        format_spread(arm.spread("failures"), ".3g"),
    ]


def has_exchange(results: ComparisonResults) -> bool:
    """Return whether replicas exchange anything."""
    return any(arm.traffic_per_weight_byte for arm in results.arms)


def arm_title(arm: ArmScore) -> str:
    """Return an arm's name, marked if it is a control."""
    return f"{arm.name} (control)" if arm.control else arm.name


def range_text(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.3f} … {interval[1]:.3f}"


def format_seeds_of(results: ComparisonResults) -> str:
    return format_seeds(failures.seed for failures in results.failures)


def describe_target(results: ComparisonResults) -> str:
    return (
        f"the fault-free arm's loss with the same seed after {100 * results.target_at:g} % of {results.steps} steps; "
        f"a loss is the mean of {SMOOTHING_WINDOW} validations in a row; steps that a rollback undid count"
    )


def control_sentences(results: ComparisonResults) -> Iterator[str]:
    """Yield what the controls show: the share of an arm's steps that lost moments explain, and the floor."""
    if results.without_failures:
        return
    relative = [(arm, spread) for arm in results.contestants if (spread := arm.spread("reset_ratio")) is not None]
    inexact = [f"{arm.name} × {spread.mean:.3f}" for arm, spread in relative if not arm.exact]
    resets = [(arm, results.reset_cost(arm)) for arm in results.arms if arm.control == "reset"]
    alone = [f"× {format_spread(ratio)} ({arm.name})" for arm, ratio in resets if ratio is not None]
    if alone:
        over = f"; over that, steps of {join_names(inexact)}" if inexact else ""
        yield f"Losing moments alone takes {join_names(alone)} of the steps without failures{over}."
    elif any(arm.exact is False for arm in results.contestants):
        yield (
            "No arm shows what losing moments alone does to arms that lose them, so their steps may mislead; add the "
            "control reset (--arms …,reset,oracle)."
        )
    floor = results.oracle
    if floor is not None and results.priced and (least := floor.spread("hours")) is not None:
        ratio = format_spread(floor.spread("hours_ratio"))
        yield (
            f"The floor is {format_number(least.mean)} h, × {ratio} of the fault-free hours: failures that lose only "
            "the time of a replacement."
        )


def search_sentence(results: ComparisonResults) -> str:
    """Describe the search without failures."""
    tried = "; ".join(f"{point.name} {format_spread(point.spread('ratio'))}" for point in results.search[1:])
    best = next(arm for arm in results.arms if arm.name == "tuned")
    which = ", ".join(f"{name} = {setting}" for name, setting in best.changes.items()) or "the recipe's own settings"
    return f"tuned         {which}; steps of each point over fault-free: {tried}"


_SPECIAL = re.compile(r"[&%$#_{}~^\\]")
_WORDS = {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}


def latex(results: ComparisonResults) -> str:
    """Return the terminal's table as a ``tabular``, mean [least … most] over the seeds; requires ``booktabs``."""
    head, *below = (" & ".join(map(escape_latex, row)) + r" \\" for row in [columns(results), *rows(results)])
    body = "\n".join([r"\toprule", head, r"\midrule", *below, r"\bottomrule"])
    return f"\\begin{{tabular}}{{l{'r' * head.count(' & ')}}}\n{body}\n\\end{{tabular}}\n"


def escape_latex(text: str) -> str:
    """Escape text for LaTeX."""
    safe = _SPECIAL.sub(lambda match: _WORDS.get(match[0], "\\" + match[0]), text)
    return safe.replace("×", r"$\times$").replace("…", r"\dots{}").replace("–", "--")
