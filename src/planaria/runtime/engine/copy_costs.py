"""What the copies of a recipe's strategies cost, as the strategies state it for its model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from planaria.config.schema import ModelConfig, RunConfig
from planaria.models.families import build_stage
from planaria.recovery import recovery
from planaria.recovery.base import Copy, CopyCost


def costs_of_copies(config: RunConfig) -> list[tuple[Copy, CopyCost]]:
    """What every copy costs that the recipe's strategies keep."""
    chain = recovery(config.recovery, config.pipeline.stages)
    named = [(chain.strategies[slot.by], slot.copy) for slot in chain.slots]
    return [(copy, by.cost(copy, {stage: shapes_of(config, stage) for stage in copy.sources})) for by, copy in named]


def shapes_of(config: RunConfig, stage: int) -> Mapping[str, torch.Size]:
    """The parameters of a stage by local name."""
    return _stage_shapes(config.model, config.pipeline.stages, stage)


@cache
def _stage_shapes(model: ModelConfig, stages: int, stage: int) -> Mapping[str, torch.Size]:
    built = build_stage(model, stages, stage, 0, "meta")
    return {name: parameter.shape for name, parameter in built.named_parameters()}
