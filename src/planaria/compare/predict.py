"""What a way of coping is likely to cost, without training: the clock's seconds, and steps as experience has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from planaria.compare.clock import Clock
from planaria.config import RoutingConfig, RunConfig, Section
from planaria.recovery import names, recovery
from planaria.recovery.checkpoint import best_interval, rollback_mean


class Range(BaseModel):
    """A number that was measured: its mean over seeds, and the least and the most."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    low: float
    high: float


class Experience(BaseModel):
    """What failures cost in races that were run: the part of a prediction that cannot be calculated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    """the comparison it was taken from"""
    swapped: Range
    """steps to a loss with swapped routing, over those with full routing, without failures"""
    steps_lost: dict[str, Range]
    """strategy → steps to a loss that one failure adds; exact ones, and those nobody has raced yet, are not listed"""


EXACT = frozenset({"redundant", "checkpoint"})
"""strategies that bring back the very state: nobody need have raced them"""


def is_known(config: RunConfig, experience: Experience) -> bool:
    """Has every strategy of the recipe's chain been raced, or is it exact?"""
    return set(names(config.recovery)) <= EXACT | experience.steps_lost.keys()


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

    With the stage-steps that roll back apart from those that are rebuilt, for N useful steps and per failure c steps:

    - ticks = N · swap / (1 − Σ rate · c), the sum over rebuilt stages: a tick gains 1 − Σ rate · c steps;
    - times the ticks that a step takes under rollbacks to every f-th one (``recovery.checkpoint.rollback_mean``);
    - seconds = ticks · step + saves · save + failures · (half a step + replacement + state).

    ``interval`` is f; the best one for these numbers unless given.
    """
    chain = recovery(config.recovery, config.pipeline.stages)
    ages = dict.fromkeys(range(config.pipeline.stages + 1), 1 << 30)
    fates = {stage: chain.plan(frozenset({stage}), ages) for stage in failures.struck}
    rolled = [stage for stage, fate in fates.items() if fate.rollback or fate.reason]
    rebuilt = {stage: fate.rebuilt[stage][0] for stage, fate in fates.items() if not (fate.rollback or fate.reason)}
    chance = 1.0 - (1.0 - failures.rate) ** len(rolled)
    if chance and interval is None:
        interval = max(1, round(best_interval(clock.save_s, clock.step_s / chance) / clock.step_s))
    hours = {}
    for side in ("mean", "low", "high"):
        lost = {by: getattr(found, side) for by, found in experience.steps_lost.items()}
        swap = getattr(experience.swapped, side) if config.routing.kind == "swapped" else 1.0
        gain = 1.0 - failures.rate * sum(lost.get(by, 0.0) for by in rebuilt.values())
        ticks = config.train.steps * swap / gain if gain > 0 else math.inf
        saves = 0.0
        if chance and interval:
            saves = ticks / interval
            ticks *= rollback_mean(interval, chance)
        struck = ticks * failures.rate
        moved = clock.load_s * len(rolled) + clock.donated_s * len(rebuilt)
        down = struck * (len(fates) * (clock.step_s / 2 + clock.replacement_s) + moved)
        hours[side] = (ticks * clock.step_s + saves * clock.save_s + down) / 3600
    used = bool(set(rebuilt.values()) & experience.steps_lost.keys()) or config.routing.kind == "swapped"
    return Prediction(name, Range(**hours), interval if chance else None, not used)


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
