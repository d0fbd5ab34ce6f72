"""A stage that sleeps its cost instead of computing: for measuring schedules on machines with few cores."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.pipeline.network.costs import Prices
from planaria.runtime.engine.batches import Batch, Masks
from planaria.runtime.engine.runner import StageRunner


def new_runner(config: RunConfig, stage: int, initialise: bool) -> StageRunner:
    """A stage that computes, or one that sleeps what computing is said to cost."""
    return (SleepingRunner if config.network.emulate is True else StageRunner)(config, stage, initialise)


def straggling(config: RunConfig, replica: int, round: int) -> float:
    """How many times as long a replica's passes take before a round of its exchange: drawn anew for every round."""
    drawn = random.Random(f"straggle {config.seed} {replica} {round}").random()
    return config.network.straggle_times if drawn < config.network.straggle else 1.0


class Slowness:
    """How slow a node is from moment to moment, where that lasts for a time and not for a round.

    Time is cut into pieces of ``network.straggle_s``, from the first step that the node works at; each is drawn for
    itself. So whatever a run does in a round, it meets the same delays.
    """

    def __init__(self, config: RunConfig, replica: int, every_s: float) -> None:
        self._config, self._replica, self._every_s = config, replica, every_s
        self._begun = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """What takes so many seconds when nothing is slow; the rest of it takes as long as each piece says."""
        while seconds > 0:
            piece, into = divmod(time.monotonic() - self._begun, self._every_s)
            times = straggling(self._config, self._replica, int(piece))
            taken = min(seconds * times, self._every_s - into)
            time.sleep(taken)
            seconds -= taken / times if taken < seconds * times else seconds


class SleepingRunner(StageRunner):
    """A stage runner whose passes take exactly what its node's prices say and move tensors of the real size.

    Weights, updates and recovery stay real: gradients are zero, so every update is too.
    """

    def __init__(self, config: RunConfig, stage: int, initialise: bool = True) -> None:
        super().__init__(config, stage, initialise)
        self._prices: tuple[int, Prices] | None = None
        self._times = 1.0
        self.slowness: Slowness | None = None
        """in place of :meth:`slow_down`, where slowness lasts for a time"""
        shape = config.pipeline.microbatch_size, config.model.context, config.model.dim
        self._activation = torch.zeros(shape, dtype=self._travels)

    def stand_at(self, node: int, prices: Prices) -> None:
        """From now on, passes take what they cost at ``node``; nothing until this is said."""
        self._prices = node, prices

    def _sleep(self, kind: str, hop: int) -> None:
        if self._prices is not None:
            node, prices = self._prices
            seconds = Prices.seconds(prices.compute(kind, node, hop))
            if self.slowness is None:
                time.sleep(self._times * seconds)
            else:
                self.slowness.sleep(seconds)

    def slow_down(self, times: float) -> None:
        """From now on, passes take so many times as long."""
        self._times = times

    def begin(
        self,
        batch: Batch | None,
        train: bool,
        microbatches: int,
        masks: Masks | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        super().begin(batch, train, microbatches, weights=weights)
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, microbatch: int, hop: int, x: Tensor | None) -> Tensor | None:
        if hop == 0 and self._batch is not None:
            self._batch(microbatch)  # which is read as ever, and may come late
        self._sleep("forward", hop)
        if self.stage == 0 and hop:
            self._losses[microbatch] = torch.zeros(())
            return None
        return self._activation

    def backward(self, microbatch: int, hop: int, grad: Tensor | None) -> Tensor | None:
        self._sleep("backward", hop)
        return None if self.stage == 0 and hop == 0 else self._activation
