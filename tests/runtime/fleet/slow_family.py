"""A family whose layers take a machine longer if its environment says so."""

from __future__ import annotations

import os
import time

from torch import nn

from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import BlockStage, LlamaEnds, LlamaFamily

SLOWER = "MILLISECONDS_SLOWER"
"""variable of the environment: how much longer each layer's forward pass takes"""


class Slow(LlamaFamily):
    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> LlamaEnds | BlockStage:
        built = super().build_stage(config, stages, stage)
        if isinstance(built, BlockStage) and (more := float(os.environ.get(SLOWER, "0"))):
            built.register_forward_pre_hook(lambda module, _: compute(module, more / 1000))
        return built


def compute(module: nn.Module, seconds: float) -> None:
    """Take processor time, in place of a machine that needs more of it."""
    assert isinstance(module, BlockStage)
    until = time.thread_time() + seconds * len(module.layers)
    while time.thread_time() < until:
        pass
