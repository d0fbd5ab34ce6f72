"""Where each arm of a comparison would win: over failure rates that were not raced, and costs of redundancy. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from planaria.lab.compare.race_results import Compared, Scored


def without_failures(found: Compared, arm: Scored) -> float:
    """The arm's steps to the target over the fault-free arm's if nothing fails: 1, or what its routing costs.

    That is known from an arm that was spared the failures and takes the same routes; without one it counts as 1.
    """
    for other in found.arms:
        ratio = other.spread("ratio")
        if not other.faults and other.routing == arm.routing and ratio is not None:
            return ratio[0]
    return 1.0


def hours_at(found: Compared, arm: Scored, hourly: float, step_s: float | None = None) -> float | None:
    """Hours to the target at another failure rate; None if the arm did not reach it. ``step_s`` replaces its own.

    On a straight line: with r₀ the ratio without failures, r the one that was raced at rate h₀, D the hours that
    failures stopped the raced arm, U those of its uploads, and m = log(1 − h) / log(1 − h₀) times as many failures,
    hours(h) = T · step · (r₀ + (r − r₀) m) + D m + U, for T fault-free steps.
    """
    raced, ticks, hours = arm.spread("ratio"), arm.spread("ticks"), arm.spread("hours")
    if raced is None or ticks is None or hours is None:
        return None
    free = ticks[0] / raced[0]
    still = without_failures(found, arm)
    more = math.log1p(-hourly) / math.log1p(-found.hourly)
    step = arm.step_s if step_s is None else step_s
    uploads = statistics.fmean(run.saves for run in arm.runs) * arm.save_s / 3600
    down = hours[0] - ticks[0] * arm.step_s / 3600 - uploads
    return free * step * (still + (raced[0] - still) * more) / 3600 + down * more + uploads


def winners(found: Compared, rates: Sequence[float], costs: Sequence[float], redundant: str | None) -> list[list[str]]:
    """For every cost of redundancy (a row) and failure rate, the arm with the fewest hours.

    A cost is the step time of the arm ``redundant`` over that of the fault-free arm.
    """
    contestants = [arm for arm in found.contestants if arm.spread("hours") is not None]
    plain = found.arms[0].step_s
    table = []
    for cost in costs:
        row = []
        for rate in rates:
            hours = {
                a.name: hours_at(found, a, rate, plain * cost if a.name == redundant else None) for a in contestants
            }
            row.append(min(hours, key=lambda name: hours[name] or float("inf")) if hours else "")
        table.append(row)
    return table
