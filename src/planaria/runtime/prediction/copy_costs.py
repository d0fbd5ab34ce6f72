"""Costs of the copies that recovery strategies keep, and settings ``"best"`` that follow from such costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache

import torch

from planaria.config.options import Options
from planaria.config.schema import ModelConfig, RunConfig
from planaria.models.families import build_stage, frozen_parameters
from planaria.models.llama_stages import parameter_count
from planaria.models.optimizers import make_optimizer
from planaria.models.state import StageShapes
from planaria.pipeline.network.costs import FP32_BYTES, Costs, message_bytes
from planaria.recovery import RECOVERIES, strategy_names
from planaria.recovery.base import Copy, CopyCost, MachineProperties, numel
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.resolved_run import ResolvedRun


def state_bytes(config: RunConfig) -> int:
    """Return the durable bytes per parameter: its weight and moments."""
    return FP32_BYTES * (1 + len(make_optimizer(config.optim).keys))


def costs_of_copies(run: ResolvedRun) -> list[tuple[Copy, CopyCost]]:
    """Return the cost of every copy that the recipe's strategies keep."""
    named = [(run.recovery.strategies[slot.strategy], slot.copy) for slot in run.recovery.slots]
    return [
        (copy, by.cost(copy, {stage: shapes_of(run.config, stage) for stage in copy.sources})) for by, copy in named
    ]


def copies_held(run: ResolvedRun) -> dict[int, int]:
    """Return the bytes that the worker of each stage holds for copies, its own and others'; without replicas."""
    sizes: Counter[int] = Counter()
    model, stages = run.config.model, run.config.pipeline.stages
    for copy, cost in costs_of_copies(run) if run.config.exchange.replicas == 1 else ():
        sizes[copy.host] += cost.host_memory
        for stage in copy.sources:
            sizes[stage] += cost.own_memory
            if cost.module:
                sizes[copy.host] += frozen_parameters(model, stages, stage)[1]
    return sizes


def shadowed_stages(run: ResolvedRun) -> dict[int, tuple[int, ...]]:
    """Return stage → the stages whose forward passes its worker also computes; without replicas."""
    costs = costs_of_copies(run) if run.config.exchange.replicas == 1 else ()
    return {copy.host: copy.sources for copy, cost in costs if cost.forward}


def shapes_of(config: RunConfig, stage: int) -> StageShapes:
    """Return the shapes of a stage's parameters, by local name."""
    return StageShapes(_stage_shapes(config.model, config.pipeline.stages, stage), make_optimizer(config.optim).keys)


@cache
def _stage_shapes(model: ModelConfig, stages: int, stage: int) -> Mapping[str, torch.Size]:
    built = build_stage(model, stages, stage, 0, "meta")
    return {name: parameter.shape for name, parameter in built.named_parameters()}


def step_bytes_and_memory(run: ResolvedRun) -> tuple[float, float]:
    """Return the bytes per step that copies send, and their memory relative to the model's weights and moments.

    A background checkpoint needs a copy of everything.
    """
    costs = costs_of_copies(run)
    memory = sum(cost.host_memory + cost.own_memory for _, cost in costs)
    share = memory / (state_bytes(run.config) * parameter_count(run.config.model)) + run.config.checkpoint.background
    return sum(len(copy.pairs) * cost.step_bytes for copy, cost in costs), share


def copies_stated(run: ResolvedRun) -> list[str]:
    """Describe the cost of copies without failures, and the steps lost in a failure."""
    if not run.recovery.slots:
        return []
    sent, kept = step_bytes_and_memory(run)
    lines = [f"copies: {sent / 1e6:,.2f} MB sent in a step, all stages together; {kept:.3f} of the model's state held"]
    if run.recovery.retaining is not None:
        name, rule = run.recovery.retaining
        lines.append(f"{name}: {rule.steps_lost():g} steps lost in a failure, on average")
    return lines


def resolve_best_options(config: RunConfig) -> RunConfig:
    """Return the recipe with numbers instead of 'best' in its recovery options.

    :raises UserError: if an option is invalid, or has no best value for this recipe.
    """
    chosen = RECOVERIES.make_all(strategy_names(config.recovery), config.recovery.options)
    if not any(strategy.has_best_options for strategy in chosen.values()):
        return config
    alone = config.model_copy(update={"exchange": config.exchange.model_copy(update={"replicas": 1})})
    size = message_bytes(config.model, config.pipeline)
    step_s = simulate(ResolvedRun(alone).training(0), Costs(config.network), size).step_s
    stages = range(config.pipeline.stages + 1)
    largest = max(state_bytes(config) * numel(shapes_of(config, stage)) for stage in stages)
    network = config.network
    bandwidth = network.bandwidth or math.inf
    at = MachineProperties(
        len(stages), step_s, largest, bandwidth, network.memory_bandwidth, network.hourly_failure_probability
    )
    best = {name: value for strategy in chosen.values() for name, value in strategy.resolve_best(at).items()}
    recovery = config.recovery.model_copy(update={"options": Options({**config.recovery.options, **best})})
    return config.model_copy(update={"recovery": recovery})
