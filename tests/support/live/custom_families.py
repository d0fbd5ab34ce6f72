"""Model families for tests of workers: one whose layers can be slowed down, one that records its threads."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import BlockStage, LlamaEnds, LlamaFamily

SLOWER = "MILLISECONDS_SLOWER"
"""environment variable: additional milliseconds of each layer's forward pass"""


class Slow(LlamaFamily):
    """Layers take :data:`SLOWER` milliseconds longer."""

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


class Counting(LlamaFamily):
    """Each process that builds a stage writes its number of threads to ``folder``."""

    folder: str

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> LlamaEnds | BlockStage:
        (Path(self.folder) / str(os.getpid())).write_text(str(torch.get_num_threads()))
        return super().build_stage(config, stages, stage)
