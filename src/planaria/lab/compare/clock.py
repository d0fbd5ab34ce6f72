"""Conversion of ticks to hours: steps, checkpoints and recoveries of an arm on the machines of a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.exchange.registry import make_exchange
from planaria.lab.compare.race import ArmCourse, LossEvent
from planaria.models.families import stage_parameters
from planaria.models.llama_stages import parameter_count
from planaria.pipeline.network.costs import FP32_BYTES, Costs, message_bytes
from planaria.recovery import make_chain
from planaria.recovery.base import Copy, CopyCost
from planaria.runtime.prediction.copy_costs import costs_of_copies, state_bytes
from planaria.runtime.prediction.simulate import SimulatedStep, simulate
from planaria.runtime.prediction.traffic import exchange_costs, link_bytes, one_replica
from planaria.runtime.resolved_run import ResolvedRun


@dataclass(frozen=True)
class ArmClock:
    """Seconds of everything that takes time in one arm."""

    step_s: float
    """one step, including its copies"""
    save_s: float
    """one checkpoint: training pauses while every worker uploads, or copies, its stage"""
    load_s: float
    """all workers read their stages back"""
    donated_s: float
    """the state of one block stage over one link: approximately what a donor sends"""
    replacement_s: float
    bandwidth: float
    """bytes per second of a link; infinite if the recipe sets none"""
    write_s: float = 0.0
    """the upload of a copy while training continues"""
    workers: int = 1
    """machines that train; standby machines are not counted"""
    mean_repeated_steps: float = 0.5
    """mean steps repeated after a loss; 0 for controls, which lose no work"""

    @property
    def behind(self) -> int:
        """Steps from a save until it is durable and the next can begin."""
        return math.ceil(self.write_s / self.step_s) if self.write_s else 0

    def recovery_s(self, loss: LossEvent, scale: float) -> float:
        """Return the seconds of one recovery: :attr:`mean_repeated_steps` steps, a replacement, then the state, from
        donors or the store.

        ``scale`` converts bytes of the raced model to those of the clock's model.
        """
        state = self.load_s if loss.rolled_back else scale * loss.moved_bytes / self.bandwidth
        return self.mean_repeated_steps * self.step_s + self.replacement_s + state

    def seconds(self, course: ArmCourse, ticks: float, scale: float) -> float:
        """Return the time of the first ``ticks`` ticks of a course."""
        saves = sum(1 for tick in course.saved if tick <= ticks)
        lost = sum(self.recovery_s(loss, scale) for loss in course.loss_events if loss.tick < ticks)
        return ticks * self.step_s + saves * self.save_s + lost


def arm_clock(config: RunConfig) -> ArmClock:
    """Return the clock of a recipe, from its [network] and its recovery strategies' stated costs.

    :raises UserError: when background uploads take time and steps take none.
    """
    pipeline, network = config.pipeline, config.network
    plan = ResolvedRun(one_replica(config)).training(0)
    size, costs = message_bytes(config.model, pipeline), Costs(network)
    plain = simulate(plan, costs, size)
    copies = costs_of_copies(ResolvedRun(config))
    shadowed = {copy.host: stage for copy, cost in copies if cost.forward for stage in copy.sources}
    busy = simulate(plan, Costs(network, shadowed), size).step_s if shadowed else plain.step_s
    between = [(pair, cost.step_bytes) for copy, cost in copies if not cost.in_background for pair in copy.pairs]
    sent = [sum(count for pair, count in between if pair == link) for link in {pair for pair, _ in between}]
    bandwidth = network.bandwidth or math.inf
    largest = max(stage_parameters(config.model, pipeline.stages, stage) for stage in range(pipeline.stages + 1))
    moved = state_bytes(config) * largest / network.store_bandwidth if network.store_bandwidth else 0.0
    copied = state_bytes(config) * largest / network.memory_bandwidth if network.memory_bandwidth else 0.0
    pause, upload = (copied, moved) if config.checkpoint.background else (moved, 0.0)
    donated = FP32_BYTES * stage_parameters(config.model, pipeline.stages, 1) / bandwidth
    step = busy + max(sent, default=0.0) / bandwidth + waiting_s(config)
    step = max(step, _busiest_link_bytes(copies, plain) / bandwidth) + _snapshot_pause_s(config, copied)
    if upload and not step:
        raise UserError(
            "checkpoint.background: the delay of an upload in steps needs the steps' seconds; set "
            "network.forward_s and network.backward_s"
        )
    workers = config.exchange.replicas * (pipeline.stages + 1)
    repeated_steps = 0.0 if make_chain(config.recovery, pipeline.stages).control_strategy else 0.5
    return ArmClock(step, pause, moved, donated, network.replacement_s, bandwidth, upload, workers, repeated_steps)


def activation_bytes(config: RunConfig) -> int:
    """Return the bytes of activations and gradients that all replicas send between stages in one step."""
    return config.exchange.replicas * sum(link_bytes(config).values())


def traffic_per_weight_byte(config: RunConfig) -> float:
    """Return the bytes a replica sends to others in one step over the bytes of its weights in fp32."""
    replicas = config.exchange.replicas
    return exchanged_bytes(config) / (replicas * FP32_BYTES * parameter_count(config.model))


def _busiest_link_bytes(copies: Sequence[tuple[Copy, CopyCost]], step: SimulatedStep) -> float:
    """Return the bytes per step of the busiest link direction that carries copies while workers compute."""
    links = {(source, copy.host) for copy, cost in copies if cost.in_background for source in copy.sources}
    return max((_copy_bytes(link, copies) + step.sent_bytes.get(link, 0) for link in links), default=0.0)


def _copy_bytes(link: tuple[int, int], copies: Sequence[tuple[Copy, CopyCost]]) -> float:
    links = ((copy, cost) for copy, cost in copies if cost.in_background and copy.host == link[1] != link[0])
    return sum(cost.step_bytes for copy, cost in links if link[0] in copy.sources)


def _snapshot_pause_s(config: RunConfig, copied: float) -> float:
    """Return the seconds per step that training waits for a snapshot; copying all state takes ``copied``."""
    retaining = make_chain(config.recovery, config.pipeline.stages).retaining
    return 0.0 if retaining is None or retaining[1].in_step else copied / retaining[1].every


def waiting_s(config: RunConfig) -> float:
    """Return the seconds per step that replicas wait for messages, as their exchange states; 0 for one replica.

    All stages exchange at the same time. Stragglers are not included.
    """
    every, costs = make_exchange(config.exchange).interval, exchange_costs(config)
    if every is None or not costs:
        return 0.0
    network, longest = config.network, max(cost.critical for cost in costs)
    wait = longest / (network.bandwidth or math.inf) + network.latency_s
    return wait / max(1, every) if longest else 0.0


def exchanged_bytes(config: RunConfig) -> float:
    """Return the mean bytes that all replicas send in one step."""
    every = make_exchange(config.exchange).interval
    sent = config.exchange.replicas * sum(cost.total for cost in exchange_costs(config))
    return 0.0 if every is None else sent / max(1, every)
