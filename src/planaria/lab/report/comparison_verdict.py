"""A comparison in words and two numbers: who came first, how surely, and what failures cost it."""

from __future__ import annotations

from planaria.lab.compare.race_results import Compared, Scored
from planaria.lab.trials.spread import Spread
from planaria.report.verdict import Verdict
from planaria.report.words import amount, counted, listed

LEAST_FAILURES = 5
"""failures over all seeds, below which the order of two arms is not reported as a ranking"""


def failures(arm: Scored) -> int:
    """Return the failures that an arm met before the target, over all seeds."""
    return sum(run.failures for run in arm.runs)


def verdict(found: Compared) -> Verdict:
    """Good: every arm reached the target. Arms are ordered by hours, or by steps where the clock has no prices."""
    of, unit = ("hours", "h") if found.priced else ("ticks", "steps")
    struck = [(arm, spread) for arm in found.contestants if (spread := arm.spread(of)) is not None]
    struck.sort(key=lambda pair: pair[1].mean)
    others, missed = found.arms[1:], [arm for arm in found.arms[1:] if arm.missed]
    arrived = len(others) - len(missed)
    badge = "every arm reached the target" if not missed else f"{arrived} of {counted(len(others), 'arm')} reached it"
    return Verdict(
        good=not missed,
        badge=badge,
        said=_said(found, struck, unit) + _held(found) + (f" {badge[0].upper()}{badge[1:]}." if missed else ""),
        numbers=_numbers(found, struck, of, unit),
        lost=_lost(missed, others),
    )


def _said(found: Compared, struck: list[tuple[Scored, Spread]], unit: str) -> str:
    if not struck:
        return "No arm that failures struck reached the target with every seed, so there is no order to tell."
    (first, mine), *rest = struck
    said = f"With failures at {100 * found.hourly:g} % an hour, {first.name} reached the target first, "
    said += f"after {_shown(mine.mean, unit)}"
    if not rest:
        return f"{said}; no other arm that failures struck reached it with every seed."
    second, theirs = rest[0]
    gap = _shown(theirs.mean - mine.mean, unit)
    if (met := min(failures(first), failures(second))) < LEAST_FAILURES:
        return (
            f"Too few failures to rank: {second.name} and {first.name} met at least {counted(met, 'failure')} before "
            f"the target over {counted(len(first.runs), 'seed')}; a ranking needs {LEAST_FAILURES} or more. "
            f"{first.name} took {_shown(mine.mean, unit)}, {second.name} {gap} more."
        )
    seeds = len(first.runs)
    if seeds == 1:
        return f"{said}, {gap} before {second.name}; one seed does not tell whether that is chance."
    if _always(first, second, unit):
        return f"{said}, {gap} before {second.name}, and before it with each of {counted(seeds, 'seed')}."
    return f"{said}, {gap} before {second.name}, but not with every one of {counted(seeds, 'seed')}: the two are close."


def _held(found: Compared) -> str:
    """What the controls make of it: how much of an arm's steps losing moments alone explains, and the floor."""
    said = ""
    held = [(arm, spread) for arm in found.contestants if (spread := arm.spread("reset_ratio")) is not None]
    inexact = [f"{arm.name} × {spread.mean:.3f}" for arm, spread in held if not arm.exact]
    resets = [(arm, found.alone(arm)) for arm in found.arms if arm.control == "reset"]
    alone = [f"× {ratio.mean:.3f} ({arm.name})" for arm, ratio in resets if ratio is not None]
    if inexact and alone:
        said += f" Losing moments alone takes {listed(alone)} of the steps without failures"
        said += f"; over that, steps of {listed(inexact)}."
    elif any(arm.exact is False for arm in found.contestants):
        said += (
            " No arm shows what losing moments alone does to arms that lose them (reset), so their steps may mislead."
        )
    floor = found.floor
    if floor is not None and found.priced and (least := floor.spread("hours")) is not None:
        said += f" The floor is {_shown(least.mean, 'h')}: failures that lose nothing but the time of a replacement."
    return said


def _shown(number: float, unit: str) -> str:
    return f"{amount(number)} h" if unit == "h" else f"{number:,.0f} {unit}"


def _always(first: Scored, second: Scored, unit: str) -> bool:
    """Was it ahead with every seed?"""
    of = "hours" if unit == "h" else "ticks"
    pairs = zip(first.runs, second.runs, strict=True)
    return all(getattr(mine, of) < getattr(theirs, of) for mine, theirs in pairs)


def _numbers(found: Compared, struck: list[tuple[Scored, Spread]], of: str, unit: str) -> list[tuple[str, str]]:
    if not struck:
        free = found.arms[0].spread(of)
        return [] if free is None else [(_shown(free.mean, unit), "to the target without failures")]
    first, mine = struck[0]
    numbers = []
    ratio = first.spread("hours_ratio" if of == "hours" else "ratio")
    if ratio is not None:
        what = "hours" if of == "hours" else "steps"
        numbers.append((f"× {ratio.mean:.3f}", f"{what} of {first.name} over those without failures"))
    if struck[1:]:
        last, slowest = struck[-1]
        numbers.append(
            (f"× {slowest.mean / mine.mean:.2f}", f"the slowest that arrived, {last.name}, over the quickest")
        )
    return numbers


def _lost(missed: list[Scored], others: list[Scored]) -> str:
    parts = [f"{arm.name} missed the target in {arm.missed} of {counted(len(arm.runs), 'seed')}" for arm in missed]
    undone = {arm.name: sum(run.steps_lost for run in arm.runs) for arm in others}
    rolled = [f"{name} {counted(steps, 'step')}" for name, steps in undone.items() if steps]
    if rolled:
        parts.append(f"undone by rollbacks over all seeds: {listed(rolled)}")
    stopped = [arm.name for arm in others if any(run.stopped for run in arm.runs)]
    if stopped:
        parts.append(f"{listed(stopped)} could not go on with some seed")
    return f"Lost: {'; '.join(parts)}." if parts else "Nothing was lost: no arm missed the target or rolled back."
