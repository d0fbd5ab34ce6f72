"""What a comparison found, as a table on the terminal and as one HTML page that works offline."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planaria.compare.results import Compared, Scored
from planaria.errors import UserError
from planaria.observe import comparison_figures as figures
from planaria.observe import page

HEAD = [
    "arm", "steps to target", "ratio", "hours to target", "ratio", "final loss", "traffic", "memory", "failures",
]  # fmt: skip


def show_table(found: Compared) -> None:
    """Print every arm: mean over seeds, and the least and the most."""
    table = Table(title=f"{found.name}: {found.steps} steps, {len(found.failures)} seeds", title_justify="left")
    for column in HEAD:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in ranked(found):
        table.add_row(*_cells(arm))
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    for line in _explained(found):
        console.print(line, markup=False, highlight=False)


def write_comparison(found: Compared, file: Path) -> Path:
    """Write the report of a comparison to ``file``, whole or not at all; its path.

    :raises UserError: when the file cannot be written.
    """
    text = page.document(f"{found.name} · planaria compare", _body(found))
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        raise UserError(f"{file}: the report cannot be written ({error.strerror}); choose another place") from error
    return file


def ranked(found: Compared) -> list[Scored]:
    """Fault-free first, then by mean hours to the target; arms that did not reach it with every seed come last."""
    first, *others = found.arms
    return [first, *sorted(others, key=lambda arm: (arm.spread("hours") or (float("inf"),))[0])]


def _cells(arm: Scored) -> list[str]:
    reached = sum(run.ticks is not None for run in arm.runs)
    missed = f"not reached by {len(arm.runs) - reached} of {len(arm.runs)} seeds"
    return [
        arm.name,
        _spread(arm, "ticks", ".0f") or missed,
        _spread(arm, "ratio", ".2f") or "–",
        _spread(arm, "hours", ".1f") or "–",
        _spread(arm, "hours_ratio", ".2f") or "–",
        _spread(arm, "final", ".3f") or "–",
        f"{100 * arm.traffic:.1f} %",
        f"{100 * arm.memory:.0f} %",
        " + ".join(str(run.failures) for run in arm.runs),
    ]


def _spread(arm: Scored, of: str, form: str) -> str:
    """'mean [least … most]'; empty if a seed lacks the number."""
    found = arm.spread(of)
    return "" if found is None else f"{found[0]:{form}} [{found[1]:{form}} … {found[2]:{form}}]"


def _explained(found: Compared) -> list[str]:
    digests = ", ".join(f"seed {one.seed} {one.digest[:16]}" for one in found.failures)
    return [
        f"target: the fault-free arm's loss with the same seed after {100 * found.target_at:g} % of the steps; "
        "ratios are over the fault-free arm's steps and hours",
        f"hours: by the clock of {found.clock}; traffic: bytes of copies over activations and gradients; memory: of "
        "copies over weights and moments",
        f"failures: {100 * found.hourly:g} % an hour and stage; traces {digests}",
    ]


def _body(found: Compared) -> Iterator[str]:
    arms = ranked(found)
    yield page.heading(found.name, f"{len(arms)} arms × {len(found.failures)} seeds", True, " ".join(_explained(found)))
    yield page.section(
        "Loss over hours",
        "Validation loss (mean of three) by the clock; a line is the mean over seeds, its band the least and the most. "
        "Dotted: the target, as the mean over seeds.",
        page.chart(figures.loss_over_hours(found, arms), "loss"),
    )
    yield page.section(
        "Hours to the target",
        "Mean over seeds; whiskers from the least to the most. An arm that missed it with a seed has no bar.",
        page.chart(figures.hours_bars(arms), "bars"),
        page.table(HEAD, [_cells(arm) for arm in arms], 1),
    )
    yield page.section(
        "What is kept against what is lost",
        "Steps to the target beyond the fault-free arm's, over the traffic that copies add to every step. Circles grow "
        "with the memory that copies take.",
        page.chart(figures.pareto(found, arms), "pareto"),
    )
    yield page.section(
        "Where each arm wins",
        "Fewest hours over the failure rate and the cost of redundancy (its step time over the plain one's). Losses "
        "grow on a straight line from no failures through the rate that was raced; the cross marks this comparison.",
        page.chart(figures.winners_map(found), "winners"),
    )
    yield page.section(
        "The failures",
        "Every arm of a seed meets the same.",
        page.chart(figures.failures_strip(found), "failures"),
    )
    yield page.section("Every run", "By arm and seed.", page.table(_RUN, list(_runs(arms)), 3))
    changes = [(arm.name, ", ".join(f"{k} = {v}" for k, v in arm.changes.items()) or "nothing") for arm in arms]
    yield page.section("What each arm changes", "Against the recipe.", page.table(["arm", "changes"], changes, 2))
    yield page.footer("Written by planaria compare. Every number is in comparison.json beside this page.")


_RUN = [
    "arm", "seed", "trace", "target", "steps", "ratio", "hours", "ratio", "final loss", "failures", "rolled back",
    "stopped",
]  # fmt: skip


def _runs(arms: list[Scored]) -> Iterator[list[str]]:
    for arm in arms:
        for run in arm.runs:
            numbers = [(run.ticks, ".0f"), (run.ratio, ".3f"), (run.hours, ".2f"), (run.hours_ratio, ".3f")]
            yield [
                arm.name,
                str(run.seed),
                run.trace[:12] if arm.faults else "none",
                f"{run.target:.3f}",
                *("–" if value is None else f"{value:{form}}" for value, form in numbers),
                "–" if run.final is None else f"{run.final:.3f}",
                str(run.failures),
                f"{run.steps_lost} steps",
                run.stopped,
            ]
