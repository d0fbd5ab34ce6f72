"""Choice of a recovery strategy, with its uncertainty and break-even points.

Predictions need no training: they combine the clock's seconds with extra steps from experience. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import NetworkConfig, RunConfig
from planaria.faults.trace_generation import per_step_probability
from planaria.lab.compare.clock import ArmClock, arm_clock
from planaria.lab.compare.experience import Curve, Experience, Range, SwappedSteps, strategy_of
from planaria.lab.compare.rollback import rollback_mean
from planaria.models.families import parameters
from planaria.pipeline.routing.base import MIN_SWAPPED_STAGES
from planaria.recovery import RECOVERIES, make_chain, strategy_names, with_strategy
from planaria.recovery.checkpoint import best_interval
from planaria.runtime.prediction.copy_costs import step_bytes_and_memory
from planaria.runtime.resolved_run import ResolvedRun

BREAK_EVEN_SEARCH_FACTOR = 100.0
"""break-evens are searched within this factor of the recipe's own number, both ways"""
BISECTION_STEPS = 20


@dataclass(frozen=True)
class StrategyPrediction:
    """One strategy: its predicted hours and its costs."""

    prediction: Prediction
    chain: str
    routing: str
    step_bytes: float
    memory: float
    """memory of copies over all stages' weights and moments"""
    background: bool = False
    """whether checkpoints are written while training continues"""


class UncoveredStrategy(NamedTuple):
    """A strategy that cannot be weighed."""

    why: str
    hours: Range | None
    """hours if failures cost what they cost in races with models of other sizes"""


@dataclass(frozen=True)
class BreakEven:
    """When ``setting`` reaches ``value``, ``other`` becomes better than the advised strategy."""

    setting: str
    value: float
    other: str


@dataclass(frozen=True)
class StrategyAdvice:
    """All strategies, the best first."""

    candidates: Sequence[StrategyPrediction]
    rivals: Sequence[str]
    """strategies that may be better than the first, given the spread of the races in experience"""
    break_evens: Sequence[BreakEven]


def require_costs(network: NetworkConfig, path: Path, *needed: str) -> None:
    """Raise UserError if [network] lacks one of the costs that advice needs."""
    if missing := [f"network.{name}" for name in needed if not getattr(network, name)]:
        measure = ""
        if any(name.endswith("_s") for name in missing):
            measure = "; to measure passes, train a few steps, then run `planaria report RUN --waits` (docs/plan.md)"
        raise UserError(f"{path}: advice needs {', '.join(missing)}; set each in [network] or as a flag{measure}")


def weigh_strategies(config: RunConfig, experience: Experience) -> list[StrategyPrediction]:
    """Weigh every strategy that is exact or was raced with models of similar size, under a recipe's [network].

    Sorted by hours.
    """
    predictions = []
    for name, variant in candidates(config).items():
        expected = _predict_or_explain(name, variant, experience)
        if isinstance(expected, Prediction):
            costs, in_background = step_bytes_and_memory(ResolvedRun(variant)), variant.checkpoint.background
            predictions.append(
                StrategyPrediction(expected, variant.recovery.strategy, variant.routing.kind, *costs, in_background)
            )
    return sorted(predictions, key=lambda w: w.prediction.hours.mean)


def unknown_strategies(config: RunConfig, experience: Experience) -> dict[str, UncoveredStrategy]:
    """Return the strategies that cannot be weighed."""
    expectations = {
        name: _predict_or_explain(name, variant, experience) for name, variant in candidates(config).items()
    }
    return {name: expected for name, expected in expectations.items() if isinstance(expected, UncoveredStrategy)}


def _predict_or_explain(name: str, variant: RunConfig, experience: Experience) -> Prediction | UncoveredStrategy:
    clock = arm_clock(variant)
    rate = per_step_probability(variant.network.hourly_failure_probability, clock.step_s)
    failures = FailureRate(rate, frozenset(range(variant.pipeline.stages + 1)))
    if why := why_not_covered(variant, failures, experience):
        return UncoveredStrategy(why, None)
    prediction = predict(name, variant, clock, failures, experience)
    ends = math.isfinite(prediction.hours.mean)
    if why := why_size_not_covered(variant, failures, experience, parameters(variant.model, variant.pipeline.stages)):
        return UncoveredStrategy(why, prediction.hours if ends else None)
    return prediction if ends else UncoveredStrategy("between failures it makes no durable progress", None)


def advise(config: RunConfig, experience: Experience) -> StrategyAdvice:
    """Weigh all strategies, and find the nearest numbers at which the best stops being the best.

    :raises UserError: when no strategy would ever finish.
    """
    ranked = weigh_strategies(config, experience)
    if not ranked:
        raise UserError(
            f"network: at a failure rate of {config.network.hourly_failure_probability:.3g} per worker and hour, no "
            "known strategy makes durable progress: steps, saves or repairs take too long; check [network]"
        )
    best = ranked[0].prediction
    rivals = [w.prediction.name for w in ranked[1:] if may_be_as_good(w.prediction.hours, best.hours)]
    network = config.network
    varied_settings: list[tuple[str, float | None]] = [
        ("network.hourly_failure_probability", network.hourly_failure_probability),
        ("network.bandwidth", network.bandwidth),
        ("network.store_bandwidth", network.store_bandwidth),
        ("network.memory_bandwidth", network.memory_bandwidth),
        ("network.replacement_s", network.replacement_s or None),
    ]
    break_evens = []
    for label, setting in varied_settings:
        if setting is not None:
            break_evens += _break_evens(config, experience, best.name, label, setting)
    return StrategyAdvice(ranked, rivals, break_evens)


def may_be_as_good(rival: Range, best: Range) -> bool:
    """Return whether hours in the range ``rival`` may be fewer than hours in ``best``."""
    return rival.low < best.high


def _break_evens(config: RunConfig, experience: Experience, best: str, label: str, current: float) -> list[BreakEven]:
    """Return the first numbers above and below ``current`` at which another strategy beats ``best``, where known."""

    def winner(number: float) -> str:
        network = config.network.model_copy(update={label.partition(".")[2]: number})
        ranked = [
            strategy.prediction.name
            for strategy in weigh_strategies(config.model_copy(update={"network": network}), experience)
        ]
        return ranked[0] if best in ranked else best

    break_evens = []
    for factor in (1.0 / BREAK_EVEN_SEARCH_FACTOR, BREAK_EVEN_SEARCH_FACTOR):
        far = current * factor
        if label == "network.hourly_failure_probability":
            far = min(far, max(0.99, current))
        if (at := first_change(winner, best, current, far)) is not None:
            break_evens.append(BreakEven(label, at, winner(at)))
    return break_evens


def first_change(winner: Callable[[float], str], best: str, near: float, far: float) -> float | None:
    """Return about the number closest to ``near`` at which ``best`` loses, or None if it wins up to ``far``."""
    steps: list[float] = [near * math.exp(math.log(far / near) * i / 8) for i in range(9)]
    beyond = next((i for i, number in enumerate(steps) if winner(number) != best), None)
    if not beyond:
        return None
    inside, outside = steps[beyond - 1], steps[beyond]
    for _ in range(BISECTION_STEPS):
        middle = math.sqrt(inside * outside)
        inside, outside = (inside, middle) if winner(middle) != best else (middle, outside)
    return outside


COMPLETE_COPY_AGE = 1000
"""steps after which every copy is complete"""


@dataclass(frozen=True)
class FailureRate:
    """``rate`` is each affected stage's failure probability per step."""

    rate: float
    affected_stages: frozenset[int]


@dataclass(frozen=True)
class Prediction:
    """Predicted hours for the recipe's useful steps."""

    name: str
    hours: Range
    interval: int | None
    """steps between checkpoints, if the strategy needs them"""
    certain: bool
    """whether it is pure arithmetic, without experience"""


def why_not_covered(config: RunConfig, failures: FailureRate, experience: Experience) -> str:
    """Return why experience does not cover a recipe's strategy, or an empty string if it does, or if none is needed."""
    if config.routing.kind not in ("full", "swapped"):
        return "the extra steps of its routes were not measured"
    chain = make_chain(config.recovery, config.pipeline.stages).strategies
    for name, strategy in chain.items():
        if not strategy.exact and strategy_of(name, strategy) not in experience.curves:
            return "not measured"
    used = _curves_used(config, _stage_recoveries(config, failures.affected_stages), failures.rate, experience)
    return next((why for curve, strategy_rate in used if (why := curve.why_rate_not_covered(strategy_rate))), "")


def why_size_not_covered(config: RunConfig, failures: FailureRate, experience: Experience, size: int) -> str:
    """Return why experience does not cover ``size`` parameters, or an empty string if it does.

    Call it only if :func:`why_not_covered` is empty.
    """
    recoveries = _stage_recoveries(config, failures.affected_stages)
    used: list[Curve | SwappedSteps] = [
        curve for curve, _ in _curves_used(config, recoveries, failures.rate, experience)
    ]
    if config.routing.kind == "swapped":
        used.append(experience.swapped)
    return next((why for source in used if (why := source.why_size_not_covered(size))), "")


def predict(
    name: str,
    config: RunConfig,
    clock: ArmClock,
    failures: FailureRate,
    experience: Experience,
) -> Prediction:
    """Predict the hours of ``config.train.steps`` useful steps if stages fail one at a time.

    Stages that roll back are separate from those that are rebuilt. For N useful steps:

    - ticks = N · swap · (1 + Σ extra), with the extra steps of each rebuilding strategy at its rate, and at least
      N · swap / 2;
    - times the ticks per step under rollbacks to every f-th step (``rollback_mean``);
    - seconds = ticks · step + saves · save + failures · (half a step again + replacement + state).

    A stage also rolls back if it is lost while its copy, restarted after another failure, is incomplete.
    f is the best interval for these numbers, and at least the checkpoints' delay.
    """
    recoveries = _stage_recoveries(config, failures.affected_stages)
    rolling_back = [stage for stage, stage_recovery in recoveries.items() if stage_recovery.strategy is None]
    rebuilding = [stage_recovery for stage_recovery in recoveries.values() if stage_recovery.strategy is not None]
    unready = sum(1.0 - (1.0 - failures.rate) ** stage_recovery.unready for stage_recovery in rebuilding)
    chance = 1.0 - (1.0 - failures.rate) ** (len(rolling_back) + unready)
    interval = None
    if chance:
        best = round(best_interval(clock.save_s, clock.step_s / chance) / clock.step_s)
        interval = max(1, best, clock.behind)
    used = _curves_used(config, recoveries, failures.rate, experience)
    hours = {}
    for side in ("mean", "low", "high"):
        swap = getattr(experience.swapped, side) if config.routing.kind == "swapped" else 1.0
        extra = sum(curve.extra(strategy_rate, side) for curve, strategy_rate in used)
        ticks = config.train.steps * swap * max(0.5, 1.0 + extra)
        saves = 0.0
        if chance and interval:
            ticks *= rollback_mean(interval, chance, behind=clock.behind)
            saves = ticks / interval
        failures_per_stage = ticks * failures.rate
        moved = clock.load_s * len(rolling_back) + clock.donated_s * len(rebuilding)
        restart_s = clock.mean_repeated_steps * clock.step_s + clock.replacement_s
        downtime_s = failures_per_stage * (len(recoveries) * restart_s + moved)
        hours[side] = (ticks * clock.step_s + saves * clock.save_s + downtime_s) / 3600
    certain = not used and config.routing.kind != "swapped"
    return Prediction(name, Range(**hours), interval, certain)


class _StageRecovery(NamedTuple):
    """Recovery of a stage that is lost alone."""

    strategy: str | None
    """the strategy that rebuilds it, or None if all roll back"""
    unready: int
    """steps after another failure during which it would roll back anyway"""


def _curves_used(
    config: RunConfig, recoveries: Mapping[int, _StageRecovery], rate: float, experience: Experience
) -> list[tuple[Curve, float]]:
    """Return the curves that predict a recipe's strategy, each with the failures per step that it repairs."""
    chain = make_chain(config.recovery, config.pipeline.stages).strategies
    named = [stage_recovery.strategy for stage_recovery in recoveries.values() if stage_recovery.strategy is not None]
    rebuilding = Counter(strategy_of(name, chain[name]) for name in named)
    curves = experience.curves
    return [(curves[strategy], count * rate) for strategy, count in rebuilding.items() if strategy in curves]


def _stage_recoveries(config: RunConfig, stages: Collection[int]) -> dict[int, _StageRecovery]:
    chain = make_chain(config.recovery, config.pipeline.stages)

    def rebuilding(stage: int, age: int) -> str | None:
        plan = chain.plan(frozenset({stage}), dict.fromkeys(range(config.pipeline.stages + 1), age))
        return None if plan.rollback or plan.reason else plan.rebuilt[stage][0]

    recoveries = {}
    for stage in stages:
        by = rebuilding(stage, COMPLETE_COPY_AGE)
        youngest = next(age for age in range(COMPLETE_COPY_AGE + 1) if rebuilding(stage, age) == by)
        recoveries[stage] = _StageRecovery(by, youngest)
    return recoveries


def candidates(config: RunConfig) -> Mapping[str, RunConfig]:
    """Return the strategies to weigh, each a change of ``config``; the recipe's own first strategy is among them."""
    variants = {"checkpoint": _with_strategy(config, "checkpoint", {})}
    for strategy in RECOVERIES.names:
        for suffix, options in RECOVERIES.find(strategy).advised_variants.items():
            variants[strategy + suffix] = _with_strategy(config, f"{strategy}, checkpoint", options)
    plain = variants["checkpoint"]
    for name, in_background in (("checkpoint", False), ("checkpoint, in the background", True)):
        checkpoint = plain.checkpoint.model_copy(update={"background": in_background})
        variants[name] = plain.model_copy(update={"checkpoint": checkpoint})
    own = make_chain(config.recovery, config.pipeline.stages)
    # A control is not a strategy to choose.
    if (first := _first_strategy(config)) not in map(_first_strategy, variants.values()) and not own.control_strategy:
        listed = strategy_names(config.recovery)[0] in {
            strategy_names(variant.recovery)[0] for variant in variants.values()
        }
        variants[first if listed else config.recovery.strategy] = config
    return {
        name: variant
        for name, variant in variants.items()
        if variant.routing.kind != "swapped" or config.pipeline.stages >= MIN_SWAPPED_STAGES
    }


def _first_strategy(config: RunConfig) -> str:
    """Return the name in experience of the first strategy of a recipe's chain."""
    return next(
        strategy_of(*strategy) for strategy in make_chain(config.recovery, config.pipeline.stages).strategies.items()
    )


def _with_strategy(config: RunConfig, chain: str, changes: Mapping[str, Any]) -> RunConfig:
    """Return the recipe with this chain, in the routing that it requires."""
    section = with_strategy(config.recovery, chain)
    section = section.model_copy(update={"options": Options({**section.options, **changes})})
    needed = [
        strategy.requirements.routing for strategy in make_chain(section, config.pipeline.stages).strategies.values()
    ]
    routing = config.routing.model_copy(update={"kind": max(needed) or "full"})
    return config.model_copy(update={"routing": routing, "recovery": section})
