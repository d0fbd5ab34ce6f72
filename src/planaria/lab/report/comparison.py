"""The HTML report of a comparison, with its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planaria.lab.compare.race_results import (
    MIN_FAILURES,
    MIN_SEEDS,
    ArmRun,
    ArmScore,
    ComparisonResults,
    Ranking,
    failures,
    ranking,
)
from planaria.lab.report.comparison_figures import failures_figure, hours_figure, loss_figure, price_figure
from planaria.lab.report.comparison_table import (
    DIGEST,
    arm_title,
    control_sentences,
    describe_failures,
    describe_target,
    format_seeds_of,
    hours_form,
    range_text,
)
from planaria.lab.report.equal_costs import equal_costs_table, has_equal_costs
from planaria.lab.report.winner_figure import fault_free_ratio, hours_at, redundant_arm, winners_figure
from planaria.report import page
from planaria.report.phrases import format_count, format_number, join_names
from planaria.report.verdict import Verdict
from planaria.trials.spread import format_spread

UNITS = {"hours": "h", "ticks": "steps"}


def write_comparison(results: ComparisonResults, file: Path) -> Path:
    """Write the report of a comparison to ``file`` atomically, and return its path.

    :raises UserError: when the file is not writable.
    """
    text = page.document(f"{results.name} compared · planaria", body(results))
    return page.write(file, text)


def body(results: ComparisonResults) -> Iterator[str]:
    """Yield the report's sections as HTML."""
    summary = (
        f"{format_count(len(results.arms), 'arm')}, {format_seeds_of(results)}, up to "
        f"{format_count(results.steps, 'step')} each, {'without' if results.without_failures else 'with the same'} "
        "failures. "
        f"The target is {describe_target(results)}. Hours are those of {results.clock}."
    )
    yield page.heading(results.name, verdict(results), summary)
    yield page.cards(_facts(results))
    yield from _race_sections(results)
    yield from _equal_costs(results)
    yield from _control_sections(results)
    if not results.without_failures:
        yield from _winner_section(results)
        yield from _failure_section(results)
    yield from _detail_sections(results)
    yield page.footer("Written by planaria compare; comparison.json next to this page has every number.")


def _facts(results: ComparisonResults) -> Iterator[tuple[str, str, str]]:
    of, unit = ("hours", "h") if results.priced else ("ticks", "steps")
    free = results.arms[0].spread(of)
    label = "hours" if results.priced else "steps"
    yield (
        "without failures",
        "–" if free is None else _format_value(free.mean, unit),
        f"{label} to target, mean over seeds",
    )
    if (winner := results.winner()) and (spread := winner.spread(of)) is not None:
        label = "fastest" if results.without_failures else "fastest with failures"
        yield label, _format_value(spread.mean, unit), winner.name
    if results.oracle is not None and (least := results.oracle.spread(of)) is not None:
        yield "floor", _format_value(least.mean, unit), "failures that lose only time"
    if results.without_failures:
        return
    counts = [len(trace.faults) for trace in results.failures]
    yield "failures", f"{sum(counts) / len(counts):.3g}", f"in {format_count(results.steps, 'step')}, mean over seeds"
    yield "failure rate", f"{100 * results.hourly:g} %", "that a stage fails within an hour"


def _format_value(number: float, unit: str) -> str:
    return f"{format_number(number)} h" if unit == "h" else f"{number:,.0f}"


def _race_sections(results: ComparisonResults) -> Iterator[str]:
    if any(arm.courses for arm in results.arms):
        yield page.section(
            "Loss over steps",
            "Mean over seeds; the band is the range over seeds. Steps that a rollback undid count. Higher losses lie "
            "above the picture (double-click to see them).",
            page.chart(loss_figure(results, "steps"), "loss-steps"),
        )
    if not results.priced:
        yield page.section("No hours", f"{results.clock} has no costs in [network], so steps take no time.")
    else:
        yield page.section(
            "Loss over hours",
            "Mean over seeds, up to the shortest run; the band is the range over seeds. Higher losses lie above the "
            "picture (double-click to see them); click on an arm's name to hide it.",
            page.chart(loss_figure(results), "loss"),
        )
        yield page.section(
            "Hours to the target",
            "Mean over seeds; the whisker is the range over seeds, the dotted line is the fault-free arm.",
            page.chart(hours_figure(results), "hours"),
        )
    if results.machines_differ and results.priced:
        counts = ", ".join(f"{arm.name} {arm.workers}" for arm in results.arms)
        yield page.section(
            "Machine-hours to the target",
            f"Hours times the machines that train; spares do not count: {counts}.",
            page.chart(hours_figure(results, "machine_hours", "machine-hours"), "machine-hours"),
        )
    if results.without_failures and not any(arm.traffic or arm.memory for arm in results.arms):
        return
    missing = [arm.name for arm in results.arms if arm.missed]
    yield page.section(
        "Cost and harm",
        "To the right: bytes that copies add to every step, with or without failures. Upwards: steps to the target "
        "over the fault-free arm's. A mark's area is the memory of copies, as a share of all weights and moments. "
        "Lower left is better; the dashed line is the Pareto front. Uploads of checkpoints count in the hours, not in "
        "the traffic." + (f" Not drawn, because they missed the target: {', '.join(missing)}." if missing else ""),
        page.chart(price_figure(results), "prices"),
    )


def _equal_costs(results: ComparisonResults) -> Iterator[str]:
    if has_equal_costs(results):
        yield page.section(
            "Losses at equal costs",
            "At the time when the first arm ends, at that when the fault-free arm ends, and after as many bytes as a "
            "replica sends in the median arm; an arm that has already ended has its final loss. Learning rates of "
            "unfinished arms are still falling. A dash: before the first smoothed loss. The control has no changes of "
            "the exchange and all others but the learning rate; its loss with the same seed is subtracted.",
            equal_costs_table(results).html("equal-costs"),
        )


def _control_sections(results: ComparisonResults) -> Iterator[str]:
    """Show the ratios to the fault-free arm and to the controls, with intervals; and the search."""
    with_reset = any(run.reset_ratio is not None for arm in results.arms for run in arm.runs)
    if with_reset or len(results.failures) >= MIN_SEEDS:
        yield page.section(
            "Comparison with the controls",
            "Steps to the target. Reset loses a failed stage's moments and nothing else. Arms that rebuild a stage "
            "from weights alone lose them too; the effect is in their ratio to the fault-free arm, not in that to "
            f"reset. The oracle loses nothing. 95 % bootstrap intervals, for {MIN_SEEDS} seeds or more; for few seeds "
            "they are too narrow.",
            page.table(
                "controls",
                ["arm", "× fault-free", "95 %", "× reset", "95 %"],
                [
                    [arm_title(arm), *_with_interval(arm, "ratio"), *_with_interval(arm, "reset_ratio")]
                    for arm in results.ranked()[1:]
                ],
                numbers_from=1,
            ),
        )
    if results.search:
        rows = [
            [point.name, *(format_spread(point.spread(of), form) for of, form in (("ticks", ".0f"), ("ratio", ".3f")))]
            for point in results.search
        ]
        yield page.section(
            "The search without failures",
            "Each point with every seed; the one with the fewest steps is the arm tuned. It is selected on the same "
            "seeds, so its result is slightly optimistic. Points at the edge of the search may not be optimal.",
            page.table("search", ["point", "steps to target", "× fault-free"], rows, numbers_from=1),
        )


def _with_interval(arm: ArmScore, of: str) -> list[str]:
    return [format_spread(arm.spread(of)), range_text(arm.interval(of))]


def _winner_section(results: ComparisonResults) -> Iterator[str]:
    arms = [arm for arm in results.contestants if not arm.missed]
    if not arms or not results.hourly or not results.priced:
        return
    rates = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    rows = [
        [
            arm.name,
            f"{fault_free_ratio(results, arm):.3f}",
            *(_format_optional(hours_at(results, arm, r), hours_form(results)) for r in rates),
        ]
        for arm in arms
    ]
    yield page.section(
        "Where each strategy wins",
        "Fewest hours to the target at other failure rates (horizontal) and costs of redundant computation (vertical); "
        "the star marks the raced conditions. hours(h) = T · step · (r₀ + (r − r₀) · m) + D · m + U, where T is the "
        "fault-free arm's steps, r₀ an arm's ratio of steps without failures, r the raced one, D the hours that "
        "failures stopped the raced arm, U those of its uploads, and m the ratio of failures at rate h to those raced. "
        "It is linear through two points, so it is uncertain far from the raced rate. Arms keep their settings, "
        "checkpoint intervals included. Arms that missed the target are omitted."
        + (" Numbers of machines are not taken into account." if results.machines_differ else "")
        + ("" if redundant_arm(results) else " No arm computes redundantly, so the vertical axis has no effect."),
        page.chart(winners_figure(results), "winners"),
        page.subheading("Hours to the target at other failure rates, each with its own step"),
        page.table("rates", ["arm", "r₀", *(f"{100 * rate:g} % an hour" for rate in rates)], rows, numbers_from=1),
    )


def _failure_section(results: ComparisonResults) -> Iterator[str]:
    strips = []
    for number, trace in enumerate((*results.failures, *results.replica_failures)):
        title = f"{describe_failures(trace)} · {trace.digest[:DIGEST]}"
        strips += [page.subheading(title), page.chart(failures_figure(results, trace), f"failures{number}")]
    text = "Each mark is a stage lost before a step, in every arm."
    if results.replica_failures:
        text += " Further replicas, where an arm has them, fail independently at the same rate."
    yield page.section("The failures", text, *strips)


def _detail_sections(results: ComparisonResults) -> Iterator[str]:
    head = ["arm", "trace", "stopped", "seed", "steps", "ratio", "hours", "machine-hours", "final loss"]
    head += ["failures", "undone", "saves"]
    yield page.section(
        "Every run",
        "Steps and hours to the target; the ratio is of steps, to the fault-free arm's with the same seed. Failures "
        "and saves (checkpoints) on the way to it, or in total if it was missed; undone: steps lost to rollbacks. "
        "Stopped: why an arm stopped early.",
        page.table(
            "runs", head, [_row(results, arm, run) for arm in results.ranked() for run in arm.runs], numbers_from=3
        ),
    )
    groups = [(arm.name, [(key, setting, False) for key, setting in arm.changes.items()]) for arm in results.arms]
    yield page.section(
        "Changes of each arm",
        "All other settings are the recipe's, for every arm.",
        page.settings([(name, entries or [("nothing", "", False)]) for name, entries in groups]),
    )


def _row(results: ComparisonResults, arm: ArmScore, run: ArmRun) -> list[str]:
    durations = (run.hours, run.machine_hours) if results.priced else (None, None)
    return [
        arm.name,
        run.trace[:DIGEST] if arm.faults else "none",
        run.stopped or "–",
        str(run.seed),
        _format_optional(run.ticks, ".0f") if run.ticks is not None else "not reached",
        _format_optional(run.ratio, ".3f"),
        _format_optional(durations[0], hours_form(results)),
        _format_optional(durations[1], ".0f"),
        _format_optional(run.final, ".4f"),
        str(run.failures),
        str(run.steps_lost),
        str(run.saves),
    ]


def _format_optional(number: float | None, form: str) -> str:
    return "–" if number is None else format(number, form)


def verdict(results: ComparisonResults) -> Verdict:
    """Summarise the comparison; good if every arm reached the target."""
    ranked = ranking(results)
    others, missed = results.arms[1:], [arm for arm in results.arms[1:] if arm.missed]
    arrived = len(others) - len(missed)
    badge = (
        "every arm reached the target" if not missed else f"{arrived} of {format_count(len(others), 'arm')} reached it"
    )
    return Verdict(
        good=not missed,
        badge=badge,
        summary=_ranking_sentence(results, ranked)
        + "".join(f" {sentence}" for sentence in control_sentences(results))
        + (f" {badge[0].upper()}{badge[1:]}." if missed else ""),
        numbers=_deciding_numbers(results, ranked),
        cost=_cost_sentence(missed, others),
    )


def _ranking_sentence(results: ComparisonResults, ranked: Ranking) -> str:
    if not ranked.arms:
        return "No arm with failures reached the target with every seed, so there is no ranking."
    unit = UNITS[ranked.unit]
    first, own = ranked.arms[0]
    duration = _format_with_unit(own.mean, unit)
    failing = f"With failures at {100 * results.hourly:g} % an hour"
    when = "Without failures" if results.without_failures else failing
    text = f"{when}, {first.name} reached the target first, after {duration}"
    if ranked.certainty == "alone":
        return f"{text}; no other arm{'' if results.without_failures else ' with failures'} reached it with every seed."
    second, theirs = ranked.arms[1]
    gap, seeds = _format_with_unit(theirs.mean - own.mean, unit), format_count(len(first.runs), "seed")
    text += f", {gap} before {second.name}"
    match ranked.certainty:
        case "too few failures":
            fewest = format_count(min(failures(first), failures(second)), "failure")
            return (
                f"Too few failures to rank: {second.name} and {first.name} had at least {fewest} before the target "
                f"over {seeds}; a ranking needs {MIN_FAILURES} or more. "
                f"{first.name} took {duration}, {second.name} {gap} more."
            )
        case "one seed":
            return f"{text}; with one seed this may be chance."
        case "every seed":
            return f"{text}, and before it with each of {seeds}."
    return f"{text}, but not with every one of {seeds}: the two are close."


def _format_with_unit(number: float, unit: str) -> str:
    return _format_value(number, unit) + ("" if unit == "h" else f" {unit}")


def _deciding_numbers(results: ComparisonResults, ranked: Ranking) -> list[tuple[str, str]]:
    if not ranked.arms:
        free = results.arms[0].spread(ranked.unit)
        return (
            []
            if free is None
            else [(_format_with_unit(free.mean, UNITS[ranked.unit]), "to the target without failures")]
        )
    first, own = ranked.arms[0]
    last, slowest = ranked.arms[-1]
    hours = ranked.unit == "hours"
    numbers = []
    if (ratio := first.spread("hours_ratio" if hours else "ratio")) is not None:
        label = "hours" if hours else "steps"
        reference = "of the fault-free arm" if results.without_failures else "without failures"
        numbers.append((f"× {ratio.mean:.3f}", f"{label} of {first.name} over those {reference}"))
    if last is not first:
        numbers.append(
            (f"× {slowest.mean / own.mean:.2f}", f"the slowest arm that reached it, {last.name}, over the fastest")
        )
    return numbers


def _cost_sentence(missed: list[ArmScore], others: list[ArmScore]) -> str:
    clauses = [
        f"{arm.name} missed the target in {arm.missed} of {format_count(len(arm.runs), 'seed')}" for arm in missed
    ]
    undone = {arm.name: sum(run.steps_lost for run in arm.runs) for arm in others}
    rolled = [f"{name} {format_count(steps, 'step')}" for name, steps in undone.items() if steps]
    if rolled:
        clauses.append(f"undone by rollbacks over all seeds: {join_names(rolled)}")
    stopped = [arm.name for arm in others if any(run.stopped for run in arm.runs)]
    if stopped:
        clauses.append(f"{join_names(stopped)} stopped early with some seed")
    return f"Lost: {'; '.join(clauses)}." if clauses else "Nothing was lost: no arm missed the target or rolled back."
