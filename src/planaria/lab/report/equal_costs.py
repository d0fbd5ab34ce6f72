"""Losses of a comparison at equal steps, equal hours and equal bytes. Pure arithmetic on its results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planaria.lab.compare.race_results import ArmScore, ComparisonResults, smoothed_losses
from planaria.report.phrases import format_number
from planaria.report.tables import Table
from planaria.trials.spread import Spread, format_spread, spread

Curve = Sequence[tuple[float, float]]
"""(cost, smoothed loss), by cost"""
HOUR, MEGABYTE = 3600.0, 1e6


@dataclass(frozen=True)
class Budgets:
    """Costs at which losses are compared."""

    first_end: float
    """hours at which the first arm ends"""
    control_end: float
    """hours at which the fault-free arm ends"""
    megabytes: float
    """median over the arms of the megabytes that a replica sends in a run; at least half of the arms send this much"""


@dataclass(frozen=True)
class EqualCosts:
    """One arm's losses at equal costs, over the seeds, or None if a seed has no smoothed validation that early."""

    arm: ArmScore
    control: ArmScore
    final: Spread | None
    over_control: Spread | None
    """final loss minus the control's with the same seed"""
    at_first_end: Spread | None
    at_control_end: Spread | None
    at_megabytes: Spread | None
    """an arm that sends less in total has its final loss here"""
    step_megabytes: float
    """megabytes that a replica sends to others in a step"""


def control_of(results: ComparisonResults, arm: ArmScore) -> ArmScore:
    """Return the arm without changes of the exchange, of which the arm has all others except the learning rate.

    It is the fault-free arm if there is none, or for such an arm itself.
    """

    def other_changes(of: ArmScore) -> dict[str, str]:
        return {key: setting for key, setting in of.changes.items() if key != "optim.lr" and not key.startswith("exch")}

    def exchanges(of: ArmScore) -> bool:
        return any(key.startswith("exchange.") for key in of.changes)

    own = other_changes(arm)
    same = (other for other in results.arms if not exchanges(other) and other_changes(other) == own)
    return next(same, results.arms[0]) if exchanges(arm) else results.arms[0]


def loss_at_cost(curve: Curve, budget: float) -> float | None:
    """Return the loss at a cost, interpolated; the last loss beyond the curve, and None before it."""
    if not curve or budget < curve[0][0]:
        return None
    return float(np.interp(budget, *np.transpose(curve)))


def step_megabytes(arm: ArmScore) -> float:
    """Return the megabytes that a replica sends to others in a step."""
    return arm.step_bytes / (arm.inputs.replicas if arm.inputs else 1) / MEGABYTE


def byte_curves(arm: ArmScore) -> list[Curve]:
    """Return for each seed (megabytes that a replica has sent, smoothed loss)."""
    return [
        [(tick * step_megabytes(arm), loss) for tick, loss in smoothed_losses(course.points)] for course in arm.courses
    ]


def budgets(results: ComparisonResults) -> Budgets:
    """Return the costs at which losses are compared."""
    ends = [min((curve[-1][0] for curve in arm.curves if curve), default=0.0) for arm in results.arms]
    return Budgets(min(ends), ends[0], statistics.median_low(results.steps * step_megabytes(a) for a in results.arms))


def equal_costs(results: ComparisonResults) -> list[EqualCosts]:
    """Return the losses of every arm with courses, the lowest final loss first."""
    at = budgets(results)
    rows = []
    for arm in results.arms:
        control, sent = control_of(results, arm), byte_curves(arm)
        pairs = zip(arm.runs, control.runs, strict=True)
        gaps = [None if own.final is None or its.final is None else own.final - its.final for own, its in pairs]
        rows.append(
            EqualCosts(
                arm, control, arm.spread("final"), spread(gaps),
                spread(loss_at_cost(curve, at.first_end) for curve in arm.curves),
                spread(loss_at_cost(curve, at.control_end) for curve in arm.curves),
                spread(loss_at_cost(curve, at.megabytes) for curve in sent),
                step_megabytes(arm),
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: row.final.mean if row.final else float("inf"))


def cost_headings(at: Budgets) -> list[str]:
    """Return the heads of the columns of losses at equal hours and bytes."""
    times = (
        f"at {hours:.1f} h" if hours >= 1 else f"at {HOUR * hours:.1f} s" for hours in (at.first_end, at.control_end)
    )
    return [*times, f"at {format_number(at.megabytes)} MB"]


def has_equal_costs(results: ComparisonResults) -> bool:
    """Return whether replicas exchange anything, and the results have courses and inputs for losses at equal costs."""
    exchange = any(arm.traffic_per_weight_byte for arm in results.arms)
    return exchange and results.priced and all(arm.courses and arm.inputs for arm in results.arms)


def equal_costs_table(results: ComparisonResults) -> Table:
    """Return the table of :func:`equal_costs`."""
    at = budgets(results)
    head = ["arm", "final loss", "− control", "control", *cost_headings(at), "kB per step"]
    rows = [
        [
            row.arm.name, format_spread(row.final), format_spread(row.over_control), row.control.name,
            format_spread(row.at_first_end), format_spread(row.at_control_end), format_spread(row.at_megabytes),
            f"{1000 * row.step_megabytes:.1f}",
        ]
        for row in equal_costs(results)
    ]  # fmt: skip
    return Table(f"{results.name}: losses at equal steps, equal time and equal bytes", head, rows)
