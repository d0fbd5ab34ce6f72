"""Which recovery strategy to choose, how sure that is, and where another one would win.

Predictions need no training: they combine the clock's seconds with steps from experience. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import RunConfig
from planaria.faults.generating import per_step_probability
from planaria.lab.compare.clock import Clock, clock_of
from planaria.lab.compare.experience import Curve, Experience, Range, Swapped, way_of
from planaria.models.families import parameters
from planaria.recovery import names, recovery, with_strategy
from planaria.recovery.checkpoint import best_interval, rollback_mean
from planaria.runtime.engine.copy_costs import step_bytes_and_memory
from planaria.runtime.engine.resolved import ResolvedRun

SPAN = 100.0
"""break-evens are looked for within this factor of the recipe's own number, either way"""
_HALVINGS = 20


@dataclass(frozen=True)
class Weighed:
    """One way of coping: what it is likely to take, and what it keeps."""

    prediction: Prediction
    chain: str
    routing: str
    step_bytes: float
    memory: float
    """of copies, over all stages' weights and moments"""
    background: bool = False
    """are checkpoints written while training goes on?"""


class Unknown(NamedTuple):
    """Of a way that cannot be weighed."""

    why: str
    hours: Range | None
    """what it would take if failures cost what they cost in the races with models of other sizes"""


@dataclass(frozen=True)
class BreakEven:
    """At ``value`` of the setting ``what``, ``other`` becomes better than the way that is advised."""

    what: str
    value: float
    other: str


@dataclass(frozen=True)
class Advice:
    """All ways, the best first."""

    ways: Sequence[Weighed]
    rivals: Sequence[str]
    """ways that could be better than the first, given how far apart the races were that experience comes from"""
    break_evens: Sequence[BreakEven]


def weigh(config: RunConfig, experience: Experience) -> list[Weighed]:
    """Every way of coping with the failures of a recipe's [network] that is exact, or was raced with models about as
    large; fewest hours first."""
    found = []
    for name, way in ways(config).items():
        expected = _expected(name, way, experience)
        if isinstance(expected, Prediction):
            costs, beside = step_bytes_and_memory(ResolvedRun(way)), way.checkpoint.background
            found.append(Weighed(expected, way.recovery.strategy, way.routing.kind, *costs, beside))
    return sorted(found, key=lambda w: w.prediction.hours.mean)


def unknown(config: RunConfig, experience: Experience) -> dict[str, Unknown]:
    """The ways that cannot be weighed."""
    found = {name: _expected(name, way, experience) for name, way in ways(config).items()}
    return {name: one for name, one in found.items() if isinstance(one, Unknown)}


def _expected(name: str, way: RunConfig, experience: Experience) -> Prediction | Unknown:
    clock = clock_of(way)
    rate = per_step_probability(way.network.hourly, clock.step_s)
    failures = Failures(rate, frozenset(range(way.pipeline.stages + 1)))
    if why := doubt(way, failures, experience):
        return Unknown(why, None)
    found = predict(name, way, clock, failures, experience)
    ends = math.isfinite(found.hours.mean)
    if why := far(way, failures, experience, parameters(way.model, way.pipeline.stages)):
        return Unknown(why, found.hours if ends else None)
    return found if ends else Unknown("between failures it gets nothing done that lasts", None)


def advise(config: RunConfig, experience: Experience) -> Advice:
    """Weigh all ways, and look for the nearest numbers at which the best would no longer be the best.

    :raises UserError: when none would ever be done.
    """
    found = weigh(config, experience)
    if not found:
        raise UserError(
            f"network: with {config.network.hourly:.3g} failures an hour and worker, no strategy that is known gets "
            "anything done that lasts: steps, saves or repairs take too long; look at [network]"
        )
    best = found[0].prediction
    rivals = [w.prediction.name for w in found[1:] if may_be_as_good(w.prediction.hours, best.hours)]
    network = config.network
    dials: list[tuple[str, float | None]] = [
        ("network.hourly", network.hourly),
        ("network.bandwidth", network.bandwidth),
        ("network.store_bandwidth", network.store_bandwidth),
        ("network.memory_bandwidth", network.memory_bandwidth),
        ("network.replacement_s", network.replacement_s or None),
    ]
    breaks = []
    for what, value in dials:
        if value is not None:
            breaks += _break_evens(config, experience, best.name, what, value)
    return Advice(found, rivals, breaks)


def may_be_as_good(other: Range, best: Range) -> bool:
    """Whether hours in the range ``other`` may be fewer than hours in ``best``."""
    return other.low < best.high


def _break_evens(config: RunConfig, experience: Experience, best: str, what: str, value: float) -> list[BreakEven]:
    """Going up and down from ``value``: the first numbers at which another way is better, where the best is known."""

    def winner(number: float) -> str:
        network = config.network.model_copy(update={what.partition(".")[2]: number})
        names = [one.prediction.name for one in weigh(config.model_copy(update={"network": network}), experience)]
        return names[0] if best in names else best

    found = []
    for factor in (1.0 / SPAN, SPAN):
        far = value * factor
        if what == "network.hourly":
            far = min(far, max(0.99, value))
        if (at := first_change(winner, best, value, far)) is not None:
            found.append(BreakEven(what, at, winner(at)))
    return found


def first_change(winner: Callable[[float], str], best: str, near: float, far: float) -> float | None:
    """Between ``near``, where ``best`` wins, and ``far``: about the nearest number where it loses, if there is one."""
    steps: list[float] = [near * math.exp(math.log(far / near) * i / 8) for i in range(9)]
    beyond = next((i for i, number in enumerate(steps) if winner(number) != best), None)
    if not beyond:
        return None
    inside, outside = steps[beyond - 1], steps[beyond]
    for _ in range(_HALVINGS):
        middle = math.sqrt(inside * outside)
        inside, outside = (inside, middle) if winner(middle) != best else (middle, outside)
    return outside


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
    if config.routing.kind not in ("full", "swapped"):
        return "nobody has raced how many steps its routes cost"
    chain = recovery(config.recovery, config.pipeline.stages).strategies
    for name, one in chain.items():
        if not one.exact and way_of(name, one) not in experience.curves:
            return "not measured yet"
    used = _used(config, _fates(config, failures.struck), failures.rate, experience)
    return next((why for curve, met in used if (why := curve.doubt(met))), "")


def far(config: RunConfig, failures: Failures, experience: Experience, size: int) -> str:
    """Why experience is not of models with ``size`` parameters, for a way without other doubts; empty if it is."""
    fates = _fates(config, failures.struck)
    used: list[Curve | Swapped] = [curve for curve, _ in _used(config, fates, failures.rate, experience)]
    if config.routing.kind == "swapped":
        used.append(experience.swapped)
    return next((why for one in used if (why := one.far(size))), "")


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
    used = _used(config, fates, failures.rate, experience)
    hours = {}
    for side in ("mean", "low", "high"):
        swap = getattr(experience.swapped, side) if config.routing.kind == "swapped" else 1.0
        extra = sum(curve.extra(met, side) for curve, met in used)
        ticks = config.train.steps * swap * max(0.5, 1.0 + extra)
        saves = 0.0
        if chance and interval:
            ticks *= rollback_mean(interval, chance, behind=clock.behind)
            saves = ticks / interval
        struck = ticks * failures.rate
        moved = clock.load_s * len(rolled) + clock.donated_s * len(rebuilt)
        down = struck * (len(fates) * (clock.again * clock.step_s + clock.replacement_s) + moved)
        hours[side] = (ticks * clock.step_s + saves * clock.save_s + down) / 3600
    certain = not used and config.routing.kind != "swapped"
    return Prediction(name, Range(**hours), interval if chance else None, certain)


class _Fate(NamedTuple):
    """What becomes of a stage that is lost alone."""

    by: str | None
    """the strategy that rebuilds it; None if all roll back"""
    unready: int
    """steps after another failure during which it would roll back all the same"""


def _used(
    config: RunConfig, fates: Mapping[int, _Fate], rate: float, experience: Experience
) -> list[tuple[Curve, float]]:
    """The curves that a recipe's way of coping is predicted by, each with the failures a step that it mends."""
    chain = recovery(config.recovery, config.pipeline.stages).strategies
    by = [fate.by for fate in fates.values() if fate.by is not None]
    rebuilt = Counter(way_of(name, chain[name]) for name in by)
    curves = experience.curves
    return [(curves[way], count * rate) for way, count in rebuilt.items() if way in curves]


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
    """The ways of coping that advice weighs, each a change of ``config``; the recipe's own first strategy is in one."""
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
    own = recovery(config.recovery, config.pipeline.stages)
    if (first := _first(config)) not in map(_first, found.values()) and not own.control:  # nobody can choose a control
        known = names(config.recovery)[0] in {names(way.recovery)[0] for way in found.values()}
        found[first if known else config.recovery.strategy] = config
    return {name: way for name, way in found.items() if way.routing.kind != "swapped" or config.pipeline.stages >= 4}


def _first(config: RunConfig) -> str:
    """The first strategy of a recipe's chain, as experience calls it."""
    return next(way_of(*one) for one in recovery(config.recovery, config.pipeline.stages).strategies.items())


def _changed(config: RunConfig, chain: str, changes: dict[str, Any]) -> RunConfig:
    """With this chain, in the routing that it needs."""
    section = with_strategy(config.recovery, chain)
    section = section.model_copy(update={"options": Options({**section.options, **changes})})
    needed = [one.needs.routing for one in recovery(section, config.pipeline.stages).strategies.values()]
    routing = config.routing.model_copy(update={"kind": max(needed) or "full"})
    return config.model_copy(update={"routing": routing, "recovery": section})
