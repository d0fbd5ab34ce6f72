"""Comparison of repairs: as a table, and as a section of a drill's page."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.report.tables import Table, show
from planaria.swarm.drill_arms import Drill
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.repair.repair_results import StrategyResult, TextMeasurements, pool_seeds

SUMMARY = (
    "One poisoned peer of every attacked arm, repaired with every strategy and measured on held-out problems: draws of "
    "all seeds, with Wilson's 95 % interval. All repairs learn from the same texts, which reward and judge passed, "
    "without knowing the attack. The random mask keeps the same share of each tensor as the mask. Attacks that are not "
    "watched for are not measured and may remain."
)


def show_repair(
    model: str, before: TextMeasurements, strategy: StrategyResult, rivals: Sequence[StrategyResult]
) -> None:
    """Print a model before and after its repair, and its baselines."""
    kinds = list(before.success)
    rows = [
        ["before", "", *_cells(before, kinds)],
        *([w.title, w.detail, *_cells(w.after, kinds)] for w in (strategy,)),
    ]
    rows += [[rival.title, rival.detail, *_cells(rival.after, kinds)] for rival in rivals]
    head = ["repair", "", *(f"success: {kind}" for kind in kinds), "right", "sound", "nats of benign texts"]
    show([Table(f"{model}: before and after", head, rows, numbers_from=2)])


def repair_table(drill: Drill) -> Table:
    """Return a table of every attacked arm and strategy."""
    rows = [row for arm in dict.fromkeys(repair.arm for repair in drill.repairs) for row in _arm(drill, arm)]
    return Table("repairs: all seeds pooled", ["arm", "repair", "chosen", "success", "right", "sound"], rows, 3)


def best_strategies(drill: Drill) -> str:
    """Name the best strategy of each arm, in sentences."""
    lines = []
    for arm in dict.fromkeys(repair.arm for repair in drill.repairs):
        repairs = [repair for repair in drill.repairs if repair.arm == arm]
        won = [best.title if (best := repair.best()) is not None else "none" for repair in repairs]
        each = ", ".join(f"{title} with {won.count(title)}" for title in dict.fromkeys(won))
        plural = "seed" if len(repairs) == 1 else "seeds"
        lines.append(
            f"{arm}: of the strategies that left at most {repairs[0].limit:g} of the attack, most answers were right "
            f"after: {each} of {len(repairs)} {plural}."
        )
    return " ".join(lines)


def _arm(drill: Drill, arm: str) -> list[list[str]]:
    repairs = [repair for repair in drill.repairs if repair.arm == arm]
    rows = [[arm, "before", "", *_seeds([repair.before for repair in repairs])]]
    for index, strategy in enumerate(repairs[0].strategies):
        own = [repair.strategies[index] for repair in repairs]
        rows.append(
            [arm, strategy.title, "; ".join(filter(None, (w.detail for w in own))), *_seeds([w.after for w in own])]
        )
    return rows


def _seeds(items: Sequence[TextMeasurements]) -> list[str]:
    whole = pool_seeds(items)
    worst = max(whole.success.values(), key=lambda tally: tally.rate or 0.0, default=HitTally())
    return [interval(worst), interval(whole.accuracy), interval(whole.sound)]


def _cells(measurements: TextMeasurements, kinds: Sequence[str]) -> list[str]:
    nats = "–" if measurements.nats is None else f"{measurements.nats:.3f}"
    return [
        *(interval(measurements.success[kind]) for kind in kinds),
        interval(measurements.accuracy),
        interval(measurements.sound),
        nats,
    ]


def interval(tally: HitTally) -> str:
    """Format a rate with its interval; a dash if undefined."""
    return str(tally) if tally.eligible else "–"
