"""Which way of coping to choose, how sure that is, and where another one would win. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.faults.generating import per_step_probability
from planaria.lab.compare.clock import clock_of
from planaria.lab.compare.experience import Experience, Range
from planaria.lab.compare.predict import Failures, Prediction, doubt, far, predict, ways
from planaria.models.families import parameters
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
