"""The table of a comparison, with the same columns on the terminal, as LaTeX and as CSV."""

from __future__ import annotations

import re

from rich.text import Text

from planaria.lab.compare.race_results import ENOUGH, ArmScore, ComparisonResults, SeedTrace
from planaria.lab.compare.race_spec import SMOOTHED
from planaria.lab.trials.spread import seeds_shown, shown
from planaria.report.phrases import amount, counted
from planaria.report.tables import Table, show

DIGEST = 16
"""Hex digits shown of a trace's digest."""
STEPS = {"steps to target": ("ticks", ".0f"), "× fault-free": ("ratio", ".3f")}
"""Column → number of a run, and its format."""
RESET = {"× reset": ("reset_ratio", ".3f")}
"""Columns added if a control loses moments alone."""
HOURS = {"hours to target": ("hours", ".1f"), "× hours": ("hours_ratio", ".3f")}
"""Columns added if steps take time."""
MACHINES = {"machine-hours": ("machine_hours", ".0f")}
"""Columns added if arms differ in machines."""
FINAL = {"final loss": ("final", ".3f")}
INTERVAL = "95 % of ×"
"""Column of the bootstrap intervals of ratios to the fault-free arm."""


def show_table(found: ComparisonResults) -> None:
    """Print every arm's mean [least … most] over the seeds, and explanations."""
    title = f"{found.name}: mean [least … most] of {seeds_of(found)}"
    console = show([Table(title, columns(found), rows(found))])
    for failures in (*found.failures, *found.further):
        console.print(f"trace         {failures.digest[:DIGEST]} {struck(failures)}", highlight=False)
    console.print(Text(f"clock         {found.clock}{'' if found.priced else ', by which steps take no time'}"))
    console.print(Text(f"target        {target(found)}"))
    for line in (floor(found), resets(found), searched(found)):
        if line:
            console.print(Text(line))


def struck(failures: SeedTrace) -> str:
    replica = f", replica {failures.replica}" if failures.replica else ""
    return f"seed {failures.seed}{replica}, {counted(len(failures.faults), 'failure')}"


def spreads(found: ComparisonResults) -> dict[str, tuple[str, str]]:
    """Return the relevant columns: column → number of a run, and its format."""
    held = any(run.reset_ratio is not None for arm in found.arms for run in arm.runs)
    hours = HOURS | (MACHINES if found.machines_differ else {}) if found.priced else {}
    return STEPS | (RESET if held else {}) | hours | FINAL


def columns(found: ComparisonResults) -> list[str]:
    """Return the head of the table."""
    head = ["arm", *spreads(found), "traffic", *(["of weights"] if exchanged(found) else []), "memory", "failures"]
    if _intervals(found):
        head.insert(3, INTERVAL)
    return head


def rows(found: ComparisonResults) -> list[list[str]]:
    """Return the table's rows, best arm first."""
    return [_cells(found, arm) for arm in found.ranked()]


def numbers(found: ComparisonResults) -> list[dict[str, object]]:
    """Return the table as numbers: mean, minimum and maximum over the seeds; None where a seed has no number."""
    every = (*(of for of, _ in (STEPS | RESET | HOURS | MACHINES | FINAL).values()), "failures")
    found_rows: list[dict[str, object]] = []
    for arm in found.ranked():
        row: dict[str, object] = {"arm": arm.name, "control": bool(arm.control)}
        for name in every:
            known = None if "hours" in name and not found.priced else arm.spread(name)
            mean, least, most = known or (None, None, None)
            row |= {name: mean, f"{name}_least": least, f"{name}_most": most}
        for name in ("ratio", "reset_ratio", "hours_ratio"):
            row[f"{name}_low95"], row[f"{name}_high95"] = arm.interval(name) or (None, None)
        shares = {"traffic": arm.traffic, "of_weights": arm.weights, "memory": arm.memory}
        found_rows.append(row | shares | {"missed": arm.missed})
    return found_rows


def _intervals(found: ComparisonResults) -> bool:
    return len(found.failures) >= ENOUGH


def _cells(found: ComparisonResults, arm: ArmScore) -> list[str]:
    cells = [shown(arm.spread(of), form) for of, form in spreads(found).values()]
    if arm.missed:
        cells[0] = f"not reached in {arm.missed} of {counted(len(arm.runs), 'seed')}"
    if _intervals(found):
        cells.insert(2, between(arm.interval("ratio")))
    shares = (arm.traffic, *([arm.weights] if exchanged(found) else []), arm.memory)
    return [called(arm), *cells, *(f"{100 * share:.3g} %" for share in shares), shown(arm.spread("failures"), ".3g")]


def exchanged(found: ComparisonResults) -> bool:
    """Return whether replicas exchange anything."""
    return any(arm.weights for arm in found.arms)


def called(arm: ArmScore) -> str:
    """Return an arm's name, marked if it is a control."""
    return f"{arm.name} (control)" if arm.control else arm.name


def between(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.3f} … {interval[1]:.3f}"


def seeds_of(found: ComparisonResults) -> str:
    return seeds_shown(failures.seed for failures in found.failures)


def target(found: ComparisonResults) -> str:
    return (
        f"the fault-free arm's loss with the same seed after {100 * found.target_at:g} % of {found.steps} steps; "
        f"a loss is the mean of {SMOOTHED} validations in a row; steps that a rollback undid count"
    )


def floor(found: ComparisonResults) -> str:
    """Describe the hours of a recovery that loses nothing but time."""
    arm = found.floor
    if arm is None or not found.priced or (hours := arm.spread("hours")) is None:
        return ""
    ratio = shown(arm.spread("hours_ratio"))
    return (
        f"floor         {amount(hours.mean)} h, × {ratio} of the fault-free hours: failures that lose nothing but the "
        "time of a replacement"
    )


def resets(found: ComparisonResults) -> str:
    """Describe the effect of losing moments alone, without which ratios to the fault-free arm mislead."""
    alone = [f"{arm.name} × {shown(found.alone(arm))}" for arm in found.arms if arm.control == "reset"]
    if alone:
        return f"moments       lost alone, with nothing else: {'; '.join(alone)} of the steps without failures"
    if any(arm.exact is False for arm in found.contestants):
        return (
            "moments       some arms lose moments, and no arm shows what that alone does; race reset beside them "
            "(--arms …,reset,oracle)"
        )
    return ""


def searched(found: ComparisonResults) -> str:
    """Describe the search without failures."""
    if not found.search:
        return ""
    tried = "; ".join(f"{point.name} {shown(point.spread('ratio'))}" for point in found.search[1:])
    best = next(arm for arm in found.arms if arm.name == "tuned")
    which = ", ".join(f"{name} = {value}" for name, value in best.changes.items()) or "the recipe's own settings"
    return f"tuned         {which}; steps of each point over fault-free: {tried}"


_SPECIAL = re.compile(r"[&%$#_{}~^\\]")
_WORDS = {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}


def latex(found: ComparisonResults) -> str:
    """Return the terminal's table as a ``tabular``, mean [least … most] over the seeds; requires ``booktabs``."""
    head, *below = (" & ".join(map(escaped, row)) + r" \\" for row in [columns(found), *rows(found)])
    body = "\n".join([r"\toprule", head, r"\midrule", *below, r"\bottomrule"])
    return f"\\begin{{tabular}}{{l{'r' * head.count(' & ')}}}\n{body}\n\\end{{tabular}}\n"


def escaped(text: str) -> str:
    """Escape text for LaTeX."""
    safe = _SPECIAL.sub(lambda found: _WORDS.get(found[0], "\\" + found[0]), text)
    return safe.replace("×", r"$\times$").replace("…", r"\dots{}").replace("–", "--")
