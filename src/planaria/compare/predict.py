"""What a way of coping is likely to cost, without training: the clock's seconds, and steps as experience has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from planaria.compare.clock import Clock
from planaria.compare.experience import Experience, Range, way_of
from planaria.config import RunConfig
from planaria.options import Options
from planaria.recovery import names, recovery, with_strategy
from planaria.recovery.checkpoint import best_interval, rollback_mean

OLD = 1000
"""steps after which every copy is whole"""


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


def doubt(config: RunConfig, failures: Failures, experience: Experience) -> str:
    """Why experience does not say what a recipe's way of coping costs; empty if it does, or if that is arithmetic."""
    chain = recovery(config.recovery, config.pipeline.stages).strategies
    for name, one in chain.items():
        if not one.exact and way_of(name, one) not in experience.curves:
            return "not measured yet"
    rebuilt = _rebuilt(config, _fates(config, failures.struck).values())
    doubts = (experience.curves[way].doubt(n * failures.rate) for way, n in rebuilt.items() if way in experience.curves)
    return next(filter(None, doubts), "")


def predict(
    name: str, config: RunConfig, clock: Clock, failures: Failures, experience: Experience, interval: int | None = None
) -> Prediction:
    """What training ``config.train.steps`` useful steps takes if stages fail one at a time.

    With the stages that roll back apart from those that are rebuilt, for N useful steps:

    - ticks = N · swap · (1 + Σ extra), for each way of rebuilding the extra steps that experience has at its rate,
      and no fewer than N · swap / 2;
    - times the ticks that a step takes under rollbacks to every f-th one (``recovery.checkpoint.rollback_mean``);
    - seconds = ticks · step + saves · save + failures · (half a step again + replacement + state).

    A stage also rolls back when it is lost before its copy, begun anew after another failure, is whole.
    ``interval`` is f; the best one for these numbers unless given, and no less than checkpoints are late.
    """
    fates = _fates(config, failures.struck)
    rolled = [stage for stage, fate in fates.items() if fate.by is None]
    rebuilt = [fate for fate in fates.values() if fate.by is not None]
    unready = sum(1.0 - (1.0 - failures.rate) ** fate.unready for fate in rebuilt)
    chance = 1.0 - (1.0 - failures.rate) ** (len(rolled) + unready)
    if chance and interval is None:
        interval = max(1, round(best_interval(clock.save_s, clock.step_s / chance) / clock.step_s))
    interval = interval and max(interval, clock.behind)
    by = _rebuilt(config, rebuilt)
    hours = {}
    for side in ("mean", "low", "high"):
        swap = getattr(experience.swapped, side) if config.routing.kind == "swapped" else 1.0
        known = [(experience.curves[way], count) for way, count in by.items() if way in experience.curves]
        extra = sum(curve.extra(count * failures.rate, side) for curve, count in known)
        ticks = config.train.steps * swap * max(0.5, 1.0 + extra)
        saves = 0.0
        if chance and interval:
            ticks *= rollback_mean(interval, chance, behind=clock.behind)
            saves = ticks / interval
        struck = ticks * failures.rate
        moved = clock.load_s * len(rolled) + clock.donated_s * len(rebuilt)
        down = struck * (len(fates) * (clock.again * clock.step_s + clock.replacement_s) + moved)
        hours[side] = (ticks * clock.step_s + saves * clock.save_s + down) / 3600
    used = bool(by.keys() & experience.curves.keys()) or config.routing.kind == "swapped"
    return Prediction(name, Range(**hours), interval if chance else None, not used)


class _Fate(NamedTuple):
    """What becomes of a stage that is lost alone."""

    by: str | None
    """the strategy that rebuilds it; None if all roll back"""
    unready: int
    """steps after another failure during which it would roll back all the same"""


def _rebuilt(config: RunConfig, fates: Iterable[_Fate]) -> Counter[str]:
    """Way → how many stages it rebuilds."""
    chain = recovery(config.recovery, config.pipeline.stages).strategies
    return Counter(way_of(fate.by, chain[fate.by]) for fate in fates if fate.by is not None)


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
    """The ways of coping that advice weighs, each a change of ``config``; the recipe's own is one of them."""
    chains: dict[str, tuple[str, dict[str, Any]]] = {
        "checkpoint": ("checkpoint", {}),
        "checkfree": ("checkfree, checkpoint", {}),
        "checkfree_plus": ("checkfree_plus, checkpoint", {}),
        "echo (8 bits)": ("echo, checkpoint", {"bits": 8}),
        "echo (2 bits)": ("echo, checkpoint", {"bits": 2}),
        "redundant": ("redundant, checkpoint", {}),
        "redundant, gradients only": ("redundant, checkpoint", {"forward": False}),
    }
    found = {name: _changed(config, chain, changes) for name, (chain, changes) in chains.items()}
    plain = found["checkpoint"]
    for name, beside in (("checkpoint", False), ("checkpoint, in the background", True)):
        checkpoint = plain.checkpoint.model_copy(update={"background": beside})
        found[name] = plain.model_copy(update={"checkpoint": checkpoint})
    firsts = {names(way.recovery)[0] for way in found.values()}
    own = recovery(config.recovery, config.pipeline.stages)
    if names(config.recovery)[0] not in firsts and not own.control:  # nobody can choose a control
        found[config.recovery.strategy] = config
    return {name: way for name, way in found.items() if way.routing.kind != "swapped" or config.pipeline.stages >= 4}


def _changed(config: RunConfig, chain: str, changes: dict[str, Any]) -> RunConfig:
    """With this chain, in the routing that it needs."""
    section = with_strategy(config.recovery, chain)
    section = section.model_copy(update={"options": Options({**section.options, **changes})})
    needed = [one.needs.routing for one in recovery(section, config.pipeline.stages).strategies.values()]
    routing = config.routing.model_copy(update={"kind": max(needed) or "full"})
    return config.model_copy(update={"routing": routing, "recovery": section})
