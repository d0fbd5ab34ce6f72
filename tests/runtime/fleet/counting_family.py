"""A family that writes down with how many threads each process computes that builds one of its stages."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import BlockStage, LlamaEnds, LlamaFamily


class Counting(LlamaFamily):
    folder: str

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> LlamaEnds | BlockStage:
        (Path(self.folder) / str(os.getpid())).write_text(str(torch.get_num_threads()))
        return super().build_stage(config, stages, stage)
