"""The report of a comparison: its verdict in words and numbers, and one HTML page that works offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from planaria.lab.compare.race_results import ENOUGH, Compared, Run, Scored
from planaria.lab.report.comparison_figures import failures_figure, hours_figure, loss_figure, price_figure
from planaria.lab.report.comparison_table import DIGEST, between, called, seeds_of, struck, target
from planaria.lab.report.winner_figure import hours_at, redundant_arm, winners_figure, without_failures
from planaria.lab.trials.spread import Spread, shown
from planaria.report import page
from planaria.report.verdict import Verdict
from planaria.report.words import amount, counted, listed


def write_comparison(found: Compared, file: Path) -> Path:
    """Write the report of a comparison to ``file``, whole or not at all; its path.

    :raises UserError: when it cannot be written.
    """
    text = page.document(f"{found.name} compared · planaria", body(found))
    return page.write(file, text)


def body(found: Compared) -> Iterator[str]:
    """The report's sections, as HTML."""
    arrived = [arm for arm in found.ranked()[1:] if not arm.missed]
    summary = (
        f"{counted(len(found.arms), 'arm')}, {seeds_of(found)}, up to {counted(found.steps, 'step')} each, struck by "
        f"the same failures. The target is {target(found)}. Hours are those of {found.clock}."
    )
    yield page.heading(found.name, verdict(found), summary)
    yield page.cards(_facts(found, arrived))
    yield from _races(found)
    yield from _controls(found)
    yield from _winners(found)
    yield from _failures(found)
    yield from _details(found)
    yield page.footer("Written by planaria compare; comparison.json beside this page has every number.")


def _facts(found: Compared, arrived: Sequence[Scored]) -> Iterator[tuple[str, str, str]]:
    of, unit = ("hours", "h") if found.priced else ("ticks", "steps")
    free = found.arms[0].spread(of)
    what = "hours" if found.priced else "steps"
    yield "without failures", "–" if free is None else _unit(free.mean, unit), f"{what} to target, mean over seeds"
    best = [arm for arm in arrived if arm.faults and not arm.control]
    if best and (spread := best[0].spread(of)) is not None:
        yield "quickest with failures", _unit(spread.mean, unit), best[0].name
    if found.floor is not None and (least := found.floor.spread(of)) is not None:
        yield "floor", _unit(least.mean, unit), "failures that lose nothing but time"
    counts = [len(failures.faults) for failures in found.failures]
    yield "failures", f"{sum(counts) / len(counts):.3g}", f"in {counted(found.steps, 'step')}, mean over seeds"
    yield "failure rate", f"{100 * found.hourly:g} %", "that a stage fails within an hour"


def _unit(number: float, unit: str) -> str:
    return f"{amount(number)} h" if unit == "h" else f"{number:,.0f}"


def _races(found: Compared) -> Iterator[str]:
    if any(arm.courses for arm in found.arms):
        yield page.section(
            "Loss over steps",
            "Mean over seeds; the band goes from the least to the most. Steps that a rollback undid count.",
            page.chart(loss_figure(found, "steps"), "loss-steps"),
        )
    if not found.priced:
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
    if found.machines_differ and found.priced:
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


def _controls(found: Compared) -> Iterator[str]:
    """Steps over those of the fault-free arm and of the controls, with intervals; and the search."""
    held = any(run.reset_ratio is not None for arm in found.arms for run in arm.runs)
    if held or len(found.failures) >= ENOUGH:
        yield page.section(
            "Held against the controls",
            "Steps to the target. Reset loses a struck stage's moments and nothing else, and whoever rebuilds a stage "
            "from weights alone loses them too: what such an arm gains or loses by that is in its ratio to the "
            "fault-free arm, and not in that to reset. The oracle loses nothing. Intervals are bootstrapped, 95 %, "
            f"from {ENOUGH} seeds on; of few seeds they are too narrow.",
            page.table(
                "controls",
                ["arm", "× fault-free", "95 %", "× reset", "95 %"],
                [
                    [called(arm), *(cell for of in ("ratio", "reset_ratio") for cell in _with_interval(arm, of))]
                    for arm in found.ranked()[1:]
                ],
                numbers_from=1,
            ),
        )
    if found.search:
        rows = [
            [point.name, *(shown(point.spread(of), form) for of, form in (("ticks", ".0f"), ("ratio", ".3f")))]
            for point in found.search
        ]
        yield page.section(
            "The search without failures",
            "Each point with every seed; the one that takes the fewest steps is the arm tuned. It was chosen by these "
            "very seeds, so it looks a little better than it is. Points at the edge of the search may not be the best.",
            page.table("search", ["point", "steps to target", "× fault-free"], rows, numbers_from=1),
        )


def _with_interval(arm: Scored, of: str) -> list[str]:
    return [shown(arm.spread(of)), between(arm.interval(of))]


def _winners(found: Compared) -> Iterator[str]:
    arms = [arm for arm in found.contestants if not arm.missed]
    if not arms or not found.hourly or not found.priced:
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
        title = f"{struck(failures)} · {failures.digest[:DIGEST]}"
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
        page.table("runs", head, [_row(found, arm, run) for arm in found.ranked() for run in arm.runs], numbers_from=3),
    )
    groups = [(arm.name, [(key, value, False) for key, value in arm.changes.items()]) for arm in found.arms]
    yield page.section(
        "What each arm changes",
        "All else is the recipe's, for every arm.",
        page.settings([(name, entries or [("nothing", "", False)]) for name, entries in groups]),
    )


def _row(found: Compared, arm: Scored, run: Run) -> list[str]:
    taken = (run.hours, run.machine_hours) if found.priced else (None, None)
    return [
        arm.name,
        run.trace[:DIGEST] if arm.faults else "none",
        run.stopped or "–",
        str(run.seed),
        _number(run.ticks, ".0f") if run.ticks is not None else "not reached",
        _number(run.ratio, ".3f"),
        _number(taken[0], ".1f"),
        _number(taken[1], ".0f"),
        _number(run.final, ".4f"),
        str(run.failures),
        str(run.steps_lost),
        str(run.saves),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


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
