"""From ticks to hours: what an arm's steps, checkpoints and recoveries take on the machines that a recipe describes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.exchange.base import ExchangeCost
from planaria.exchange.kinds import exchange
from planaria.lab.compare.race import Course, Met
from planaria.models.families import stage_parameters
from planaria.models.stages import parameter_count
from planaria.pipeline.network.costs import FP32_BYTES, UNIT, Costs, message_bytes
from planaria.recovery import recovery
from planaria.recovery.base import Copy, CopyCost
from planaria.runtime.engine.copy_costs import costs_of_copies, shapes_of, state_bytes
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.simulate import Simulated, simulate


@dataclass(frozen=True)
class Clock:
    """Seconds of everything that takes time in one arm."""

    step_s: float
    """one step, with what copies add to it"""
    save_s: float
    """one checkpoint: while training stands still, every worker uploads its own stage, or copies it"""
    load_s: float
    """all workers read their stages back"""
    donated_s: float
    """the state of one block stage over one link: about what a donor gives"""
    replacement_s: float
    bandwidth: float
    """bytes per second of a link; infinite where the recipe gives none"""
    write_s: float = 0.0
    """the upload of a copy, while training goes on"""
    workers: int = 1
    """machines that train; those that stand by are not counted"""
    again: float = 0.5
    """steps that are made again after a loss, on average; none by controls, which lose no work"""

    @property
    def behind(self) -> int:
        """Steps from a save until it can be rolled back to; the next one is not sooner."""
        return math.ceil(self.write_s / self.step_s) if self.write_s else 0

    def recovery_s(self, met: Met, scale: float) -> float:
        """One loss: :attr:`again` steps; a replacement; then state from donors or the store.

        ``scale`` turns the bytes that were moved in the raced model into those of the model that the clock is for.
        """
        state = self.load_s if met.rolled_back else scale * met.moved_bytes / self.bandwidth
        return self.again * self.step_s + self.replacement_s + state

    def seconds(self, course: Course, ticks: float, scale: float) -> float:
        """The time of the first ``ticks`` ticks of a course."""
        saves = sum(1 for tick in course.saved if tick <= ticks)
        lost = sum(self.recovery_s(met, scale) for met in course.met if met.tick < ticks)
        return ticks * self.step_s + saves * self.save_s + lost


def clock_of(config: RunConfig) -> Clock:
    """The clock of a recipe, from its [network] and the statements of its recovery strategies.

    :raises UserError: when uploads in the background take time and steps take none.
    """
    pipeline, network = config.pipeline, config.network
    plan = ResolvedRun(_one_replica(config)).training(0)
    size, costs = message_bytes(config.model, pipeline), Costs(network)
    plain = simulate(plan, costs, size)
    copies = costs_of_copies(ResolvedRun(config))
    shadowed = {copy.host: stage for copy, cost in copies if cost.forward for stage in copy.sources}
    busy = simulate(plan, Costs(network, shadowed), size).step_s if shadowed else plain.step_s
    between = [(pair, cost.step_bytes) for copy, cost in copies if not cost.beside for pair in copy.pairs]
    sent = [sum(count for pair, count in between if pair == link) for link in {pair for pair, _ in between}]
    bandwidth = network.bandwidth or math.inf
    largest = max(stage_parameters(config.model, pipeline.stages, stage) for stage in range(pipeline.stages + 1))
    moved = state_bytes(config) * largest / network.store_bandwidth if network.store_bandwidth else 0.0
    copied = state_bytes(config) * largest / network.memory_bandwidth if network.memory_bandwidth else 0.0
    stands, goes_on = (copied, moved) if config.checkpoint.background else (moved, 0.0)
    donated = FP32_BYTES * stage_parameters(config.model, pipeline.stages, 1) / bandwidth
    step = busy + max(sent, default=0.0) / bandwidth + waiting_s(config)
    step = max(step, _fullest(copies, plain) / bandwidth) + _copying(config, copied)
    if goes_on and not step:
        raise UserError(
            "checkpoint.background: by how many steps an upload is late needs the steps' seconds; give "
            "network.forward_s and network.backward_s"
        )
    workers = config.exchange.replicas * (pipeline.stages + 1)
    again = 0.0 if recovery(config.recovery, pipeline.stages).control else 0.5
    return Clock(step, stands, moved, donated, network.replacement_s, bandwidth, goes_on, workers, again)


def _one_replica(config: RunConfig) -> RunConfig:
    alone = config.exchange.model_copy(update={"replicas": 1, "robust": ""})
    return config.model_copy(update={"exchange": alone})


def activation_bytes(config: RunConfig) -> int:
    """Bytes of activations and gradients that all replicas send from stage to stage in one step.

    Counted for one and multiplied: the plan of some exchanges is of all replicas, that of others of one.
    """
    plan = ResolvedRun(_one_replica(config)).training(0)
    sent = simulate(plan, UNIT, message_bytes(config.model, config.pipeline)).sent_bytes
    return config.exchange.replicas * sum(sent.values())


def of_weights(config: RunConfig) -> float:
    """What a replica sends to others in one step, over the bytes of its weights in fp32."""
    replicas = config.exchange.replicas
    return exchanged_bytes(config) / (replicas * FP32_BYTES * parameter_count(config.model))


def _fullest(copies: Sequence[tuple[Copy, CopyCost]], step: Simulated) -> float:
    """Bytes a step of the link that carries most, each way for itself, where copies are sent while others compute."""
    carried = {(source, copy.host) for copy, cost in copies if cost.beside for source in copy.sources}
    return max((_carried(link, copies) + step.sent_bytes.get(link, 0) for link in carried), default=0.0)


def _carried(link: tuple[int, int], copies: Sequence[tuple[Copy, CopyCost]]) -> float:
    given = ((copy, cost) for copy, cost in copies if cost.beside and copy.host == link[1] != link[0])
    return sum(cost.step_bytes for copy, cost in given if link[0] in copy.sources)


def _copying(config: RunConfig, copied: float) -> float:
    """Seconds a step for which it waits while stages copy their state, which takes ``copied``, for a snapshot."""
    retaining = recovery(config.recovery, config.pipeline.stages).retaining
    return 0.0 if retaining is None or retaining[1].in_step else copied / retaining[1].every


def waiting_s(config: RunConfig) -> float:
    """Seconds a step that replicas wait for one another's messages, as their exchange states them; 0 for one replica.

    All stages exchange at the same time. That a replica may be late, and keep others waiting, is not in it.
    """
    every, costs = exchange(config.exchange).interval, exchange_costs(config)
    if every is None or not costs:
        return 0.0
    network, longest = config.network, max(cost.critical for cost in costs)
    wait = longest / (network.bandwidth or math.inf) + network.latency_s
    return wait / max(1, every) if longest else 0.0


def exchange_costs(config: RunConfig) -> list[ExchangeCost]:
    """What one round costs one replica, stage by stage; nothing for one replica."""
    replicas, stages = config.exchange.replicas, range(config.pipeline.stages + 1)
    agreed = exchange(config.exchange)
    return [agreed.cost(shapes_of(config, stage), replicas) for stage in stages] if replicas > 1 else []


def exchanged_bytes(config: RunConfig) -> float:
    """Bytes that all replicas send in one step, as the mean over many."""
    every = exchange(config.exchange).interval
    sent = config.exchange.replicas * sum(cost.total for cost in exchange_costs(config))
    return 0.0 if every is None else sent / max(1, every)


def _links(copies: Sequence[tuple[Copy, CopyCost]]) -> list[set[int]]:
    return [set(pair) for pair in {pair for copy, _ in copies for pair in copy.pairs}]
