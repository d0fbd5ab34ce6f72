"""Whether compressed gradients pay off under all-reduce: time by the clock, quality from a race. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planaria.common.documents import Record
from planaria.config import recipe
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.compress.estimates import EControl
from planaria.exchange.compress.sparse import TopK
from planaria.exchange.registry import make_exchange
from planaria.lab.compare.advice import BREAK_EVEN_SEARCH_FACTOR, first_change
from planaria.lab.compare.clock import arm_clock, exchanged_bytes
from planaria.lab.compare.experience import Range
from planaria.models.families import stage_parameters

MIN_SPEEDUP = 1.01
"""minimum ratio of dense seconds to compressed seconds that counts as a gain"""


class CompressionArm(Record):
    """A race's result for one compression scheme, relative to dense gradients with the same seed."""

    name: str
    changes: dict[str, str]
    """changes of the recipe; empty for dense gradients"""
    loss: Range
    """final loss"""
    steps: Range | None
    """steps to the dense gradients' loss at the target, or None if any seed missed it"""
    missed: int
    """seeds that missed it"""


class CodingTimes(Record):
    """Measured seconds of top-k, to encode and decode once."""

    source: str
    numbers: int
    seconds: Range


class CompressionExperience(Record):
    """Measurements of compressed gradients from races and benchmarks."""

    source: str
    setting: str
    """what the race trained"""
    seeds: list[int]
    steps: int
    """steps of the race"""
    target: float
    """steps after which dense gradients have the loss that others must reach"""
    arms: list[CompressionArm]
    """dense gradients first"""
    coding: CodingTimes


@dataclass(frozen=True)
class WeighedCompression:
    """One compression scheme under a recipe's conditions."""

    arm: CompressionArm
    label: str
    """short description"""
    step_bytes: float
    """mean bytes that one replica sends per step"""
    step_s: float
    """seconds of a step, including known coding time"""
    coding_s: float | None
    """minimum coding time within ``step_s``, or None if not measured"""
    eta: float | None
    """default of EControl"""

    def seconds(self, side: str) -> float | None:
        """Return the seconds that match a dense step's progress, or None if unknown; ``side`` is mean, low or high."""
        return None if self.arm.steps is None else float(self.step_s * getattr(self.arm.steps, side))


@dataclass(frozen=True)
class CompressionAdvice:
    """All schemes, the fewest seconds per step first."""

    schemes: Sequence[WeighedCompression]
    dense: WeighedCompression
    best: WeighedCompression | None
    """the fastest scheme known to reach dense gradients' loss, or None if none is worthwhile"""
    break_even: float | None
    """the bandwidth below which one is worthwhile, or None if there is none within :data:`BREAK_EVEN_SEARCH_FACTOR`"""


def advise(config: RunConfig, experience: CompressionExperience) -> CompressionAdvice:
    """Weigh all schemes, and search the bandwidth at which compression starts to pay off."""
    schemes = [weigh_scheme(config, arm, experience.coding) for arm in experience.arms]
    known = [arm for arm in experience.arms if arm.steps is not None]
    own = config.network.bandwidth
    assert own is not None, "checked before: the recipe has a bandwidth"

    def pays(bandwidth: float) -> str:
        network = config.network.model_copy(update={"bandwidth": bandwidth})
        variant = config.model_copy(update={"network": network})
        return str(_best([weigh_scheme(variant, arm, experience.coding) for arm in known]) is not None)

    best = _best(schemes)
    far = own * BREAK_EVEN_SEARCH_FACTOR if best is not None else own / BREAK_EVEN_SEARCH_FACTOR
    break_even = first_change(pays, str(best is not None), own, far)
    return CompressionAdvice(sorted(schemes, key=lambda scheme: scheme.step_s), schemes[0], best, break_even)


def _best(schemes: Sequence[WeighedCompression]) -> WeighedCompression | None:
    """Return the scheme that reaches dense gradients' loss (``schemes[0]``) fastest, or None if none saves time."""
    dense = schemes[0].step_s
    known = {scheme.arm.name: seconds for scheme in schemes[1:] if (seconds := scheme.seconds("mean")) is not None}
    fastest = min(known, key=known.__getitem__, default=None)
    if fastest is None or known[fastest] * MIN_SPEEDUP >= dense:
        return None
    return next(scheme for scheme in schemes if scheme.arm.name == fastest)


def weigh_scheme(config: RunConfig, arm: CompressionArm, coding: CodingTimes) -> WeighedCompression:
    """Weigh one scheme on the machines of a recipe; the recipe's own compression settings are ignored."""
    plain = ExchangeConfig(replicas=config.exchange.replicas)
    changed = recipe.with_flags(config.model_copy(update={"exchange": plain}), arm.changes, "the race")
    exchange, stages = make_exchange(changed.exchange), range(config.pipeline.stages + 1)
    largest = max(stage_parameters(config.model, config.pipeline.stages, stage) for stage in stages)
    label, coding_s, eta = arm.name, None, None
    if isinstance(exchange, AggregatingExchange) and not exchange.compression.exact:
        label = arm.changes.get("exchange.compress", arm.name)
        if isinstance(exchange.compression.compressor, TopK):
            coding_s = coding.seconds.mean / coding.numbers * largest / max(1, exchange.interval or 0)
        if isinstance(exchange.compression.feedback, EControl) and exchange.compression.compressor.guaranteed:
            eta = exchange.compression.compressor.delta(largest) / 2
    elif exchange.has_rounds:
        label = f"{changed.exchange.kind}, every {exchange.interval}"
    sent = exchanged_bytes(changed) / config.exchange.replicas
    return WeighedCompression(arm, label, sent, arm_clock(changed).step_s + (coding_s or 0.0), coding_s, eta)
