"""What the copies of a recipe's strategies cost, as the strategies state it for its model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from planaria.config.schema import ModelConfig, RunConfig
from planaria.models.families import build_stage
from planaria.models.stages import parameter_count
from planaria.pipeline.network.costs import FP32_BYTES
from planaria.recovery.base import Copy, CopyCost
from planaria.runtime.engine.resolved import ResolvedRun

STATE = 3 * FP32_BYTES
"""bytes of a parameter's durable state: its weight and two moments"""


def costs_of_copies(run: ResolvedRun) -> list[tuple[Copy, CopyCost]]:
    """What every copy costs that the recipe's strategies keep."""
    named = [(run.recovery.strategies[slot.by], slot.copy) for slot in run.recovery.slots]
    return [
        (copy, by.cost(copy, {stage: shapes_of(run.config, stage) for stage in copy.sources})) for by, copy in named
    ]


def shapes_of(config: RunConfig, stage: int) -> Mapping[str, torch.Size]:
    """The parameters of a stage by local name."""
    return _stage_shapes(config.model, config.pipeline.stages, stage)


@cache
def _stage_shapes(model: ModelConfig, stages: int, stage: int) -> Mapping[str, torch.Size]:
    built = build_stage(model, stages, stage, 0, "meta")
    return {name: parameter.shape for name, parameter in built.named_parameters()}


def step_bytes_and_memory(run: ResolvedRun) -> tuple[float, float]:
    """Bytes that copies add to a step, and the memory they take over all stages' weights and moments.

    A checkpoint in the background is written from a copy of everything.
    """
    costs = costs_of_copies(run)
    memory = sum(cost.host_memory + cost.own_memory for _, cost in costs)
    share = memory / (STATE * parameter_count(run.config.model)) + run.config.checkpoint.background
    return sum(len(copy.pairs) * cost.step_bytes for copy, cost in costs), share


def copies_stated(run: ResolvedRun) -> list[str]:
    """What the copies of a recipe cost while nothing fails, and what a failure costs then, in a line or two."""
    if not run.recovery.slots:
        return []
    sent, held = step_bytes_and_memory(run)
    lines = [f"copies: {sent / 1e6:,.2f} MB sent in a step, all stages together; {held:.3f} of the model's state held"]
    if run.recovery.retaining is not None:
        name, rule = run.recovery.retaining
        lines.append(f"{name}: {rule.steps_lost():g} steps lost in a failure, on average")
    return lines
