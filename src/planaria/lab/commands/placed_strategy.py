"""A strategy to train a recipe on some machines of a topology, and whether it fits their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.pipeline.network.topology import Node
from planaria.runtime.fleet.devices import UNKNOWN
from planaria.runtime.prediction.memory import USABLE, StageMemory, combined_peak, how_to_reduce, stage_memory
from planaria.runtime.preparation.config_checks import require_sound
from planaria.runtime.preparation.unused_settings import require_used
from planaria.runtime.resolved_run import ResolvedRun


@dataclass(frozen=True)
class Strategy:
    """One way to train on some of the machines."""

    name: str
    machines: tuple[Node, ...]
    step_s: float
    peak: float | None
    """bytes on the machine with the least room, or None if the family cannot predict them"""
    obstacle: str
    """why it does not fit, or an empty string"""
    config: RunConfig
    """the recipe with this strategy's stages, codec, microbatches and replicas"""
    sends: bool
    """whether machines exchange messages in a step, whose times are less certain"""

    @property
    def is_pipeline(self) -> bool:
        return self.sends and self.config.exchange.replicas == 1

    @property
    def workers(self) -> int:
        """The worker processes of each machine; 0: the run has one process."""
        if not self.sends:
            return 0
        return 1 if self.is_pipeline else self.config.pipeline.stages + 1

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speeds of stages 0..S; of replicas, those on the slowest machine."""
        if self.is_pipeline:
            return tuple(machine.speed for machine in self.machines)
        return (min(machine.speed for machine in self.machines),) * (self.config.pipeline.stages + 1)

    def hours(self, steps: int) -> float:
        return steps * self.step_s / 3600

    def money(self, steps: int) -> float:
        """Return the price of all its machines for those hours."""
        return self.hours(steps) * sum(machine.price_per_hour for machine in self.machines)


def accepted(config: RunConfig, flags: Mapping[str, object]) -> RunConfig | None:
    """Return the recipe with ``flags`` if training accepts it, else with checkpoints if that helps, else None."""
    for changed in (flags, {**flags, "recovery.strategy": "checkpoint"}):
        if not why_rejected(config, changed):
            return recipe.with_flags(config, changed)
    return None


def why_rejected(config: RunConfig, flags: Mapping[str, object]) -> str:
    """Return why training rejects the recipe with ``flags``, or an empty string."""
    try:
        require_sound(ResolvedRun(changed := recipe.with_flags(config, flags, "the recipe")))
        require_used(changed)
    except UserError as error:
        return str(error)
    return ""


def local_wire(config: RunConfig) -> dict[str, object]:
    """Return the settings of a lossless codec for stages on one machine, unless the codec is a part of the model."""
    return {} if config.pipeline.subspace(config.seed) else {"pipeline.wire": "fp32"}


def in_one_process(config: RunConfig) -> dict[str, object]:
    """Return the settings that train all stages in one process."""
    return {"engine": "inline", **local_wire(config)}


def best(options: Iterable[Strategy]) -> Strategy | None:
    """Return the fastest strategy that fits, or else the one that needs least memory."""
    return min(options, key=_rank, default=None)


def first_fit(options: Iterable[Strategy]) -> Strategy | None:
    """Return the first strategy that fits, or else the one that needs least memory."""
    tried: list[Strategy] = []
    for option in options:
        if not option.obstacle:
            return option
        tried.append(option)
    return best(tried)


def _rank(strategy: Strategy) -> tuple[bool, float]:
    return bool(strategy.obstacle), strategy.step_s if not strategy.obstacle else strategy.peak or 0.0


def peak_of_stages(config: RunConfig, machines: Sequence[Node]) -> tuple[float | None, str]:
    """Return the peak on the machine with the least room of those that hold one stage each, and why it does not fit.

    A run rejects a machine that cannot hold the largest stage, except on CUDA devices with stages of unequal size.
    """
    memory = stage_memory(config, smallest_device(config, machines))
    if not memory:
        return None, ""
    own = config.train.device == "cuda" and config.pipeline.has_uneven_stages
    peaks = [float(stage.peak if own else combined_peak(config, memory, 1)) for stage in memory]
    return _tightest(config, memory, list(zip(machines, peaks, strict=True)))


def peak_of_all(config: RunConfig, machines: Sequence[Node], workers: int) -> tuple[float | None, str]:
    """Return the peak of all stages on each of the machines, in ``workers`` processes, and why it does not fit."""
    memory = stage_memory(config, smallest_device(config, machines))
    if not memory:
        return None, ""
    peak = float(combined_peak(config, memory, workers))
    return _tightest(config, memory, [(machine, peak) for machine in machines])


def smallest_device(config: RunConfig, machines: Sequence[Node]) -> int:
    """Return the least memory of these machines' devices, :data:`UNKNOWN` if none is known; 0: they compute on CPUs."""
    if config.train.device == "cpu":
        return 0
    return int(min((machine.memory_bytes for machine in machines if machine.memory_bytes), default=UNKNOWN))


def _tightest(
    config: RunConfig, memory: Sequence[StageMemory], peaks: Sequence[tuple[Node, float]]
) -> tuple[float, str]:
    machine, peak = max(peaks, key=lambda pair: pair[1] / (pair[0].memory_bytes or float("inf")))
    room = machine.memory_bytes
    if room is None:
        return max(peak for _, peak in peaks), ""
    if peak <= USABLE * room:
        return peak, ""
    return peak, (
        f"needs {peak / 1e9:.3g} GB; {machine.name} has {room / 1e9:.3g} GB, {USABLE * room / 1e9:.3g} GB usable: "
        f"{how_to_reduce(config, memory)}"
    )
