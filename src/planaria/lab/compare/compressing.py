"""Whether fewer bytes pay for all-reduced gradients: seconds by the clock, quality as a race had it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.exchange.aggregate import Averaging
from planaria.exchange.compress.estimates import EControl
from planaria.exchange.compress.sparse import TopK
from planaria.exchange.kinds import exchange
from planaria.lab.compare.advice import first_change
from planaria.lab.compare.clock import clock_of, exchanged_bytes
from planaria.lab.compare.experience import Range
from planaria.lab.compare.race_results import Compared, Run, Scored
from planaria.models.families import stage_parameters

CLOSE = 1.01
"""times the dense seconds: what saves less is not worth the trouble"""
SPAN = 100.0
"""break-evens are looked for within this factor of the recipe's own bandwidth, either way"""


class Arm(Record):
    """What a race found of one way to send fewer bytes, over dense gradients' with the same seed."""

    name: str
    changes: dict[str, str]
    """of the recipe; empty: dense gradients"""
    loss: Range
    """at the end"""
    steps: Range | None
    """to the loss that dense gradients have at the target; None where a seed did not get there"""
    missed: int
    """seeds that did not"""


class Coding(Record):
    """How long a compressor takes, as a benchmark measured it: top-k, to encode and to decode once."""

    source: str
    numbers: int
    seconds: Range


class Lessons(Record):
    """What races and benchmarks know of compressed gradients that cannot be calculated."""

    source: str
    setting: str
    """what the race trained"""
    seeds: list[int]
    steps: int
    """of the race"""
    target: float
    """steps after which dense gradients have the loss that others must reach"""
    arms: list[Arm]
    """dense gradients first"""
    coding: Coding


def ranged(values: Iterable[float]) -> Range:
    """Of one number for each seed."""
    numbers = list(values)
    return Range(mean=sum(numbers) / len(numbers), low=min(numbers), high=max(numbers))


def learn(found: Compared) -> list[Arm]:
    """What a comparison of exchanges teaches of each arm; the first, which others are held against, is dense.

    :raises UserError: when an arm ended before there was a loss, or dense gradients missed the target.
    """
    dense = found.arms[0]
    return [
        Arm(
            name=arm.name if arm is not dense else "dense",
            changes=arm.changes,
            loss=ranged(_final(own, arm) / _final(free, dense) for own, free in zip(arm.runs, dense.runs, strict=True)),
            steps=None if arm.missed else ranged(run.ratio or 0.0 for run in arm.runs),
            missed=arm.missed,
        )
        for arm in found.arms
    ]


def _final(run: Run, arm: Scored) -> float:
    if run.final is None:
        raise UserError(f"{arm.name}: stopped before it had a loss; race it again")
    return run.final


@dataclass(frozen=True)
class Weighed:
    """One way to send fewer bytes, in a recipe's circumstances."""

    arm: Arm
    how: str
    """in a few words"""
    step_bytes: float
    """that one replica sends a step, as the mean over many"""
    step_s: float
    """with coding, as far as that is known"""
    coding_s: float | None
    """of these, that coding takes at least; None: not measured"""
    eta: float | None
    """what EControl takes unless told"""

    def seconds(self, side: str) -> float | None:
        """That take it as far as a step of dense gradients does; ``side`` is mean, low or high. None: not known."""
        return None if self.arm.steps is None else float(self.step_s * getattr(self.arm.steps, side))


@dataclass(frozen=True)
class Advice:
    """All ways, the fewest seconds a step first."""

    ways: Sequence[Weighed]
    dense: Weighed
    best: Weighed | None
    """of those that are known to reach dense gradients' loss; None: not one of them is worth it"""
    break_even: float | None
    """the bandwidth below which one is; None if there is no such within :data:`SPAN`"""


def advise(config: RunConfig, lessons: Lessons) -> Advice:
    """Weigh all ways, and look for the bandwidth at which compressing begins to pay."""
    ways = [weigh(config, arm, lessons.coding) for arm in lessons.arms]
    known = [arm for arm in lessons.arms if arm.steps is not None]
    own = config.network.bandwidth
    assert own is not None, "the recipe has been asked for it"

    def pays(bandwidth: float) -> str:
        network = config.network.model_copy(update={"bandwidth": bandwidth})
        there = config.model_copy(update={"network": network})
        return str(_best([weigh(there, arm, lessons.coding) for arm in known]) is not None)

    best = _best(ways)
    far = own * SPAN if best is not None else own / SPAN
    at = first_change(pays, str(best is not None), own, far)
    return Advice(sorted(ways, key=lambda way: way.step_s), ways[0], best, at)


def _best(ways: Sequence[Weighed]) -> Weighed | None:
    """The one that takes fewest seconds to dense gradients' loss, if that is worth it; ``ways[0]`` is dense."""
    dense = ways[0].step_s
    known = {way.arm.name: seconds for way in ways[1:] if (seconds := way.seconds("mean")) is not None}
    found = min(known, key=known.__getitem__, default=None)
    if found is None or known[found] * CLOSE >= dense:
        return None
    return next(way for way in ways if way.arm.name == found)


def weigh(config: RunConfig, arm: Arm, coding: Coding) -> Weighed:
    """One way on the machines that a recipe describes; what it says of compression itself is left out."""
    plain = ExchangeConfig(replicas=config.exchange.replicas)
    changed = recipe.overlay(config.model_copy(update={"exchange": plain}), arm.changes, "the race")
    made, stages = exchange(changed.exchange), range(config.pipeline.stages + 1)
    largest = max(stage_parameters(config.model, config.pipeline.stages, stage) for stage in stages)
    how, coding_s, eta = arm.name, None, None
    if isinstance(made, Averaging) and not made.compression.exact:
        how = arm.changes.get("exchange.compress", arm.name)
        if isinstance(made.compression.compressor, TopK):
            coding_s = coding.seconds.mean / coding.numbers * largest / max(1, made.interval or 0)
        if isinstance(made.compression.feedback, EControl) and made.compression.compressor.guaranteed:
            eta = made.compression.compressor.delta(largest) / 2
    elif made.interval:
        how = f"{changed.exchange.kind}, every {made.interval}"
    sent = exchanged_bytes(changed) / config.exchange.replicas
    return Weighed(arm, how, sent, clock_of(changed).step_s + (coding_s or 0.0), coding_s, eta)
