"""A stage that sleeps its cost instead of computing: for measuring schedules on machines with few cores."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from planaria.config import RunConfig
from planaria.engine.batches import Batch
from planaria.engine.runner import StageRunner
from planaria.network.costs import Costs


def new_runner(config: RunConfig, stage: int, initialise: bool) -> StageRunner:
    """A stage that computes, or one that sleeps what computing is said to cost."""
    return (SleepingRunner if config.network.emulate else StageRunner)(config, stage, initialise)


class SleepingRunner(StageRunner):
    """A stage runner whose passes take exactly what ``network`` says and move tensors of the real size.

    Weights, updates and recovery stay real: gradients are zero, so every update is too.
    """

    def __init__(self, config: RunConfig, stage: int, initialise: bool = True) -> None:
        super().__init__(config, stage, initialise)
        self._costs = Costs(config.network)
        self._activation = torch.zeros(config.pipeline.microbatch_size, config.model.context, config.model.dim)

    def begin(self, batch: Batch | None, train: bool, microbatches: int) -> None:
        super().begin(None, train, microbatches)
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, microbatch: int, hop: int, x: Tensor | None) -> Tensor | None:
        time.sleep(self._costs.compute("forward", self.stage, hop))
        if self.stage == 0 and hop:
            self._losses[microbatch] = torch.zeros(())
            return None
        return self._activation

    def backward(self, microbatch: int, hop: int, grad: Tensor | None) -> Tensor | None:
        time.sleep(self._costs.compute("backward", self.stage, hop))
        return None if self.stage == 0 and hop == 0 else self._activation
