"""``planaria compare``'s answer: a table on the terminal, and one HTML page that works offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from planaria.compare.race_results import Compared, Failures, Run, Scored
from planaria.compare.race_spec import SMOOTHED
from planaria.compare.winners import hours_at, without_failures
from planaria.observe import page
from planaria.observe.tables import Table, show
from planaria.observe.trials.comparison_figures import failures_figure, hours_figure, loss_figure, price_figure
from planaria.observe.trials.comparison_verdict import verdict
from planaria.observe.trials.winner_figure import redundant_arm, winners_figure
from planaria.observe.words import amount, counted
from planaria.trials.spread import seeds_shown, shown

DIGEST = 16
"""hex digits of a trace's digest that are shown"""
SPREADS = {
    "steps to target": ("ticks", ".0f"),
    "× fault-free": ("ratio", ".3f"),
    "hours to target": ("hours", ".1f"),
    "× hours": ("hours_ratio", ".3f"),
    "final loss": ("final", ".3f"),
}
"""column → number of a run, and how it is written"""
MACHINES = {"machine-hours": ("machine_hours", ".0f")}
"""likewise, where arms differ in it"""


def show_table(found: Compared) -> None:
    """Print every arm's mean [least … most] over the seeds, and what the numbers mean."""
    title = f"{found.name}: mean [least … most] of {_seeds(found)}"
    console = show([Table(title, columns(found), rows(found))])
    for failures in (*found.failures, *found.further):
        console.print(f"trace         {failures.digest[:DIGEST]} {_struck(failures)}", highlight=False)
    console.print(Text(f"clock         {found.clock}"))
    console.print(Text(f"target        {_target(found)}"))


def write_comparison(found: Compared, file: Path) -> Path:
    """Write the report of a comparison to ``file``, whole or not at all; its path.

    :raises UserError: when it cannot be written.
    """
    text = page.document(f"{found.name} compared · planaria", body(found))
    return page.write(file, text)


def _struck(failures: Failures) -> str:
    replica = f", replica {failures.replica}" if failures.replica else ""
    return f"seed {failures.seed}{replica}, {counted(len(failures.faults), 'failure')}"


def _spreads(found: Compared) -> dict[str, tuple[str, str]]:
    return SPREADS | (MACHINES if found.machines_differ else {})


def columns(found: Compared) -> list[str]:
    """The head of the table."""
    return ["arm", *_spreads(found), "traffic", "memory", "failures"]


def rows(found: Compared) -> list[list[str]]:
    """The table's rows, best arm first."""
    return [_cells(arm, list(_spreads(found).values())) for arm in found.ranked()]


def _cells(arm: Scored, spreads: Sequence[tuple[str, str]]) -> list[str]:
    cells = [shown(arm.spread(of), form) for of, form in spreads]
    if arm.missed:
        cells[0] = f"not reached in {arm.missed} of {counted(len(arm.runs), 'seed')}"
    traffic, memory = (f"{100 * share:.3g} %" for share in (arm.traffic, arm.memory))
    return [arm.name, *cells, traffic, memory, shown(arm.spread("failures"), ".3g")]


def _seeds(found: Compared) -> str:
    return seeds_shown(failures.seed for failures in found.failures)


def _target(found: Compared) -> str:
    return (
        f"the fault-free arm's loss with the same seed after {100 * found.target_at:g} % of {found.steps} steps; "
        f"a loss is the mean of {SMOOTHED} validations in a row; steps that a rollback undid count"
    )


def body(found: Compared) -> Iterator[str]:
    """The report's sections, as HTML."""
    arrived = [arm for arm in found.ranked()[1:] if not arm.missed]
    summary = (
        f"{counted(len(found.arms), 'arm')}, {_seeds(found)}, up to {counted(found.steps, 'step')} each, struck by the "
        f"same failures. The target is {_target(found)}. Hours are those of {found.clock}."
    )
    yield page.heading(found.name, verdict(found), summary)
    yield page.cards(_facts(found, arrived))
    yield from _races(found)
    yield from _winners(found)
    yield from _failures(found)
    yield from _details(found)
    yield page.footer("Written by planaria compare; comparison.json beside this page has every number.")


def _facts(found: Compared, arrived: Sequence[Scored]) -> Iterator[tuple[str, str, str]]:
    free = found.arms[0].spread("hours")
    yield "without failures", "–" if free is None else f"{amount(free[0])} h", "hours to target, mean over seeds"
    struck = [arm for arm in arrived if arm.faults]
    if struck and (hours := struck[0].spread("hours")) is not None:
        yield "quickest with failures", f"{amount(hours[0])} h", struck[0].name
    counts = [len(failures.faults) for failures in found.failures]
    yield "failures", f"{sum(counts) / len(counts):.3g}", f"in {counted(found.steps, 'step')}, mean over seeds"
    yield "failure rate", f"{100 * found.hourly:g} %", "that a stage fails within an hour"


def _races(found: Compared) -> Iterator[str]:
    if not found.arms[0].step_s:
        yield page.section("No hours", f"{found.clock} gives no prices in [network], so steps take no time in it.")
    else:
        yield page.section(
            "Loss over hours",
            "Mean over seeds, as far as all of them went; the band goes from the least to the most. The first hours "
            "lie above the picture (double-click to see them); click on an arm's name to hide it.",
            page.chart(loss_figure(found), "loss"),
        )
        yield page.section(
            "Hours to the target",
            "Mean over seeds; the whisker goes from the least to the most, the dotted line is the fault-free arm.",
            page.chart(hours_figure(found), "hours"),
        )
    if found.machines_differ and found.arms[0].step_s:
        counts = ", ".join(f"{arm.name} {arm.workers}" for arm in found.arms)
        yield page.section(
            "Machine-hours to the target",
            f"Hours times the machines that train; spares do not count: {counts}.",
            page.chart(hours_figure(found, "machine_hours", "machine-hours"), "machine-hours"),
        )
    missing = [arm.name for arm in found.arms if arm.missed]
    yield page.section(
        "What is paid before, and what after",
        "To the right: bytes that copies add to every step, whether anything fails or not. Upwards: steps to the "
        "target over the fault-free arm's. A mark's area is the memory that copies take, as a share of all weights and "
        "moments. Lower left is better; the dashed line is the Pareto front. Uploads of checkpoints are not traffic "
        "here; they are in the hours."
        + (f" Not drawn, for they missed the target: {', '.join(missing)}." if missing else ""),
        page.chart(price_figure(found), "prices"),
    )


def _winners(found: Compared) -> Iterator[str]:
    arms = [arm for arm in found.arms if arm.faults and not arm.missed]
    if not arms or not found.hourly or not found.arms[0].step_s:
        return
    rates = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    rows = [
        [arm.name, f"{without_failures(found, arm):.3f}", *(_hours(found, arm, rate) for rate in rates)] for arm in arms
    ]
    yield page.section(
        "Where each strategy wins",
        "Fewest hours to the target if stages failed at another rate (across), or if redundant computation took longer "
        "or less long (up); the star is what it took here. hours(h) = T · step · (r₀ + (r − r₀) · m) + D · m + U, "
        "where T is the fault-free arm's steps, r₀ an arm's ratio of steps without failures, r the raced one, D the "
        "hours that failures stopped the raced arm, U those of its uploads, and m how many times as many failures "
        "there are at rate h. A straight line through two points: far from the raced rate it is a guess. Arms stay as "
        "raced, checkpoint intervals too. Whoever missed the target is out."
        + (" That some arms have more machines is not counted here." if found.machines_differ else "")
        + ("" if redundant_arm(found) else " No arm here computes redundantly, so nothing changes upwards."),
        page.chart(winners_figure(found), "winners"),
        page.subheading("Hours to the target at other failure rates, each with its own step"),
        page.table("rates", ["arm", "r₀", *(f"{100 * rate:g} % an hour" for rate in rates)], rows, numbers_from=1),
    )


def _hours(found: Compared, arm: Scored, hourly: float) -> str:
    return _number(hours_at(found, arm, hourly), ".1f")


def _failures(found: Compared) -> Iterator[str]:
    strips = []
    for number, failures in enumerate((*found.failures, *found.further)):
        title = f"{_struck(failures)} · {failures.digest[:DIGEST]}"
        strips += [page.subheading(title), page.chart(failures_figure(found, failures), f"failures{number}")]
    said = "Each mark is a stage that is lost before a step, in every arm alike."
    also = " Further replicas, where an arm has them, fail at the same rate by themselves." if found.further else ""
    yield page.section("The failures", said + also, *strips)


def _details(found: Compared) -> Iterator[str]:
    head = ["arm", "trace", "stopped", "seed", "steps", "ratio", "hours", "machine-hours", "final loss"]
    head += ["failures", "undone", "saves"]
    yield page.section(
        "Every run",
        "Steps and hours to the target; the ratio is of steps, to the fault-free arm's with the same seed. Failures "
        "and saves (checkpoints) on the way to it, or in all if it was missed; undone: steps lost to rollbacks. "
        "Stopped: why an arm could not go on.",
        page.table("runs", head, [_row(arm, run) for arm in found.ranked() for run in arm.runs], numbers_from=3),
    )
    groups = [(arm.name, [(key, value, False) for key, value in arm.changes.items()]) for arm in found.arms]
    yield page.section(
        "What each arm changes",
        "All else is the recipe's, for every arm.",
        page.settings([(name, entries or [("nothing", "", False)]) for name, entries in groups]),
    )


def _row(arm: Scored, run: Run) -> list[str]:
    return [
        arm.name,
        run.trace[:DIGEST] if arm.faults else "none",
        run.stopped or "–",
        str(run.seed),
        _number(run.ticks, ".0f") if run.ticks is not None else "not reached",
        _number(run.ratio, ".3f"),
        _number(run.hours, ".1f"),
        _number(run.machine_hours, ".0f"),
        _number(run.final, ".4f"),
        str(run.failures),
        str(run.steps_lost),
        str(run.saves),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
