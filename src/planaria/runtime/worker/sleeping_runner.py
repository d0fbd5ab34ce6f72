"""Runners of a worker: the first one, and one that sleeps instead of computing.

The latter emulates the cost of each action, to measure schedules on machines with few cores.
"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.models.llama_layers import document_mask
from planaria.models.llama_stages import stage_layers
from planaria.pipeline.codecs.base import LEGS, Leg, Shape, Visit, WireCodec
from planaria.pipeline.network.costs import MessageCosts
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import StepInputs


def new_runner(config: RunConfig, stage: int, initialise: bool) -> StageRunner:
    """Return a runner that computes, or one that sleeps if ``network.emulate`` is true."""
    return (SleepingRunner if config.network.emulate is True else StageRunner)(config, stage, initialise)


def slowdown_factor(config: RunConfig, replica: int, round: int) -> float:
    """Return the factor by which a replica's passes are slowed down before a round, drawn for every round."""
    drawn = random.Random(f"straggle {config.seed} {replica} {round}").random()
    return config.network.straggle_factor if drawn < config.network.straggle_probability else 1.0


class Slowness:
    """Slowness of a node that changes with time instead of rounds.

    Each interval of ``network.straggle_s`` since the node's first step draws its own factor, so that delays do not
    depend on what the run does.
    """

    def __init__(self, config: RunConfig, replica: int, every_s: float) -> None:
        self._config = config
        self._replica = replica
        self._every_s = every_s
        self._began = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds`` of work, stretched by the factor of each interval."""
        while seconds > 0:
            interval, elapsed_s = divmod(time.monotonic() - self._began, self._every_s)
            factor = slowdown_factor(self._config, self._replica, int(interval))
            slept_s = min(seconds * factor, self._every_s - elapsed_s)
            time.sleep(slept_s)
            seconds -= slept_s / factor if slept_s < seconds * factor else seconds


class SleepingRunner(StageRunner):
    """A stage runner whose passes take the time of its node's prices and return tensors of the real size.

    Weights, updates and recovery are real, with zero gradients.
    """

    def __init__(self, config: RunConfig, stage: int, initialise: bool = True) -> None:
        super().__init__(config, stage, initialise)
        self._prices: tuple[int, MessageCosts] | None = None
        self._slowdown = 1.0
        self._slowness: Slowness | None = None
        """replaces the factor if slowness changes with time"""
        self._messages = {leg: _zeros(self.codec, self.shape, leg) for leg in LEGS}

    def use_prices(self, node: int, prices: MessageCosts) -> None:
        """Let passes take as long as they cost at ``node``; before this call they take no time."""
        self._prices = node, prices

    def _sleep(self, kind: str, hop: int) -> None:
        if self._prices is not None:
            node, prices = self._prices
            seconds = MessageCosts.seconds(prices.compute(kind, node, hop))
            if self._slowness is None:
                time.sleep(self._slowdown * seconds)
            else:
                self._slowness.sleep(seconds)

    def draw_slowdown(self, replica: int, round: int) -> None:
        """Slow passes down as drawn for a replica: for this round, or by the time since the first call."""
        interval_s = self.config.network.straggle_s
        if interval_s is None:
            self._slowdown = slowdown_factor(self.config, replica, round)
        else:
            self._slowness = self._slowness or Slowness(self.config, replica, interval_s)

    def begin(self, step: StepInputs) -> None:
        super().begin(step)
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, microbatch: int, hop: int, x: Tensor | None) -> Tensor | None:
        if hop == 0 and self._step.batch is not None:
            self._step.batch(microbatch)  # reading may be delayed by a fault
        self._sleep("forward", hop)
        if self.stage == 0 and hop:
            self._pending.losses[microbatch] = torch.zeros(())
            return None
        return self._messages["forward"]

    def backward(self, microbatch: int, hop: int, grad: Tensor | None) -> Tensor | None:
        self._sleep("backward", hop)
        return None if self.stage == 0 and hop == 0 else self._messages["backward"]


_TIMED_S, _MIN_PASSES = 0.5, 3
"""minimum seconds and number of timed passes"""


def warm_runner(config: RunConfig) -> StageRunner:
    """Return a block stage that has run one pass and one update, since first calls are slow."""
    runner = new_runner(config, 1, initialise=True)
    _pass(config, runner)
    runner.finish()
    runner.commit(0)
    return runner


def layer_seconds(config: RunConfig, runner: StageRunner) -> float:
    """Return the minimum seconds of a microbatch's forward and backward pass through one layer.

    On CPUs this is processor time divided by the threads, so that other processes do not count.
    """
    threads, clock = (1, time.monotonic) if config.train.device == "cuda" else (config.fleet.threads, time.process_time)
    layers, until = len(stage_layers(config.model, config.pipeline.stages, 1)), time.monotonic() + _TIMED_S
    durations: list[float] = []
    while len(durations) < _MIN_PASSES or time.monotonic() < until:
        began = clock()
        _pass(config, runner)
        if config.train.device == "cuda":
            torch.cuda.synchronize()
        durations.append(clock() - began)
        runner.drop()
    return min(durations) / threads / layers


def device_memory(config: RunConfig) -> int:
    """Return the bytes of this worker's CUDA device that the recipe allows; 0 on CPUs."""
    if config.train.device != "cuda":
        return 0
    _, total = torch.cuda.mem_get_info()
    return int(total * config.fleet.gpu_share)


def _pass(config: RunConfig, runner: StageRunner) -> None:
    mask = document_mask(torch.zeros(runner.shape[:2]), separator=-1)
    runner.begin(StepInputs(masks=(lambda _: mask) if config.data.document_mask else None))
    runner.forward(0, 1, _zeros(runner.codec, runner.shape, "forward"))
    runner.backward(0, 1, _zeros(runner.codec, runner.shape, "backward"))


def _zeros(codec: WireCodec, shape: Shape, leg: Leg) -> Tensor:
    ids = torch.zeros(*shape[:2], dtype=torch.int64) if leg == "forward" else None
    return codec.encode(torch.zeros(tuple(shape)), leg, Visit(0, 0, 0), ids)
