"""What a way of coping is likely to cost, without training: the clock's seconds, and steps as experience has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planaria.compare.clock import Clock
from planaria.compare.experience import EXACT, Experience, Range, way_of
from planaria.config import RoutingConfig, RunConfig, Section
from planaria.recovery import names, recovery
from planaria.recovery.checkpoint import best_interval, rollback_mean

OLD = 1000
"""steps after which every copy is whole"""


def is_known(config: RunConfig, experience: Experience) -> bool:
    """Has every strategy of the recipe's chain been raced, or is it exact?"""
    bits = config.recovery.echo.bits
    return all(name in EXACT or way_of(name, bits) in experience.curves for name in names(config.recovery))


@dataclass(frozen=True)
class Failures:
    """``rate`` is each struck stage's probability of failing in one step."""

    rate: float
    struck: frozenset[int]


@dataclass(frozen=True)
class Prediction:
    """Hours to do the recipe's steps' worth of training, and what they are made of."""

    name: str
    hours: Range
    interval: int | None
    """steps between checkpoints, where the strategy needs them"""
    certain: bool
    """nothing in it but arithmetic: no experience was needed"""


def predict(
    name: str, config: RunConfig, clock: Clock, failures: Failures, experience: Experience, interval: int | None = None
) -> Prediction:
    """What training ``config.train.steps`` useful steps takes if stages fail one at a time.

    With the stages that roll back apart from those that are rebuilt, for N useful steps:

    - ticks = N · swap · (1 + Σ extra), for each way of rebuilding the extra steps that experience has at its rate;
    - times the ticks that a step takes under rollbacks to every f-th one (``recovery.checkpoint.rollback_mean``);
    - seconds = ticks · step + saves · save + failures · (half a step + replacement + state).

    A stage also rolls back when it is lost before its copy, begun anew after another failure, is whole.
    ``interval`` is f; the best one for these numbers unless given.
    """
    fates = _fates(config, failures.struck)
    rolled = [stage for stage, fate in fates.items() if fate.by is None]
    rebuilt = [fate for fate in fates.values() if fate.by is not None]
    unready = sum(1.0 - (1.0 - failures.rate) ** fate.unready for fate in rebuilt)
    chance = 1.0 - (1.0 - failures.rate) ** (len(rolled) + unready)
    if chance and interval is None:
        interval = max(1, round(best_interval(clock.save_s, clock.step_s / chance) / clock.step_s))
    by = Counter(way_of(fate.by, config.recovery.echo.bits) for fate in rebuilt if fate.by is not None)
    hours = {}
    for side in ("mean", "low", "high"):
        swap = getattr(experience.swapped, side) if config.routing.kind == "swapped" else 1.0
        known = [(experience.curves[way], count) for way, count in by.items() if way in experience.curves]
        extra = sum(curve.extra(count * failures.rate, side) for curve, count in known)
        ticks = config.train.steps * swap * (1.0 + extra)
        saves = 0.0
        if chance and interval:
            ticks *= rollback_mean(interval, chance)
            saves = ticks / interval
        struck = ticks * failures.rate
        moved = clock.load_s * len(rolled) + clock.donated_s * len(rebuilt)
        down = struck * (len(fates) * (clock.step_s / 2 + clock.replacement_s) + moved)
        hours[side] = (ticks * clock.step_s + saves * clock.save_s + down) / 3600
    used = bool(by.keys() & experience.curves.keys()) or config.routing.kind == "swapped"
    return Prediction(name, Range(**hours), interval if chance else None, not used)


class _Fate(NamedTuple):
    """What becomes of a stage that is lost alone."""

    by: str | None
    """the strategy that rebuilds it; None if all roll back"""
    unready: int
    """steps after another failure during which it would roll back all the same"""


def _fates(config: RunConfig, struck: Collection[int]) -> dict[int, _Fate]:
    chain = recovery(config.recovery, config.pipeline.stages)

    def rebuilt(stage: int, age: int) -> str | None:
        plan = chain.plan(frozenset({stage}), dict.fromkeys(range(config.pipeline.stages + 1), age))
        return None if plan.rollback or plan.reason else plan.rebuilt[stage][0]

    found = {}
    for stage in struck:
        by = rebuilt(stage, OLD)
        found[stage] = _Fate(by, next(age for age in range(OLD + 1) if rebuilt(stage, age) == by))
    return found


def ways(config: RunConfig) -> Mapping[str, RunConfig]:
    """The ways of coping that advice weighs, each a change of ``config``."""
    swapped = config.routing.model_copy(update={"kind": "swapped"})
    full = config.routing.model_copy(update={"kind": "full"})
    chains: dict[str, tuple[str, RoutingConfig, dict[str, Section]]] = {
        "checkpoint": ("checkpoint", full, {}),
        "checkfree": ("checkfree, checkpoint", full, {}),
        "checkfree_plus": ("checkfree_plus, checkpoint", swapped, {}),
        "echo (8 bits)": ("echo, checkpoint", full, {"echo": config.recovery.echo.model_copy(update={"bits": 8})}),
        "echo (2 bits)": ("echo, checkpoint", full, {"echo": config.recovery.echo.model_copy(update={"bits": 2})}),
        "redundant": ("redundant, checkpoint", full, {}),
        "redundant, gradients only": (
            "redundant, checkpoint",
            full,
            {"redundant": config.recovery.redundant.model_copy(update={"forward": False})},
        ),
    }
    return {
        name: config.model_copy(
            update={
                "routing": routing,
                "recovery": config.recovery.model_copy(update={"strategy": chain, **changes}),
            }
        )
        for name, (chain, routing, changes) in chains.items()
        if routing.kind == "full" or config.pipeline.stages >= 4
    }
