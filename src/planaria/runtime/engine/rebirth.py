"""What a stage is rebuilt with beside its donors' gifts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.models.families import build_stage
from planaria.recovery.base import Workshop


def workshop(config: RunConfig, stage: int, step: int) -> Workshop:
    """For a rebirth of ``stage`` in ``step``; the same in both engines, so that they go on alike."""
    return Workshop(partial(_draw, config, stage, step), (config.optim.beta1, config.optim.beta2))


def _draw(config: RunConfig, stage: int, step: int) -> Mapping[str, Tensor]:
    """Initial weights of a seed that no run starts from: negative, and of this step."""
    built = build_stage(config.model, config.pipeline.stages, stage, -1 - config.seed * (1 << 32) - step)
    return {name: parameter.detach() for name, parameter in built.named_parameters()}
