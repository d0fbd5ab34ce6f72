"""The model families, and the construction of their stages."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from planaria.common.errors import UserError
from planaria.config.model_config import GROUP
from planaria.config.registry import Registry
from planaria.config.schema import ModelConfig, PipelineConfig
from planaria.models import llama_stages
from planaria.models.family import Family
from planaria.models.group_family import GroupFamily
from planaria.models.seeding import seed_of
from planaria.models.transformers.family import TransformersFamily

SHIPPED: dict[str, type[Family]] = {
    "llama": llama_stages.LlamaFamily,
    "transformers": TransformersFamily,
    GROUP: GroupFamily,
}
FAMILIES: Registry[Family] = Registry("family", "model.family", Family, SHIPPED)  # type: ignore[type-abstract]


def make_family(config: ModelConfig) -> Family:
    """Return the family that a recipe names.

    :raises UserError: for an unknown family or option, or an invalid option value.
    """
    return FAMILIES.make(config.family, config.options)


def build_stage(
    config: ModelConfig,
    stages: int,
    stage: int,
    seed: int,
    device: str | torch.device = "cpu",
    initialise: bool = True,
) -> nn.Module:
    """Build stage ``stage`` of 0..``stages`` of the recipe's family, with its initial weights.

    Weights depend on ``seed``, family and stage only, not on the device. On device "meta" the stage takes no memory.
    Without ``initialise`` the weights are undefined, because they are about to be loaded.

    :raises ValueError: if there is no such stage.
    :raises UserError: if the family is unavailable, or its stage lacks a required method.
    """
    chosen, shapes_only = make_family(config), torch.device(device).type == "meta"
    with torch.random.fork_rng(devices=[]), torch.device("meta" if shapes_only else "cpu"):
        torch.default_generator.manual_seed(seed_of(f"{seed} stage {stage}"))  # weights are initialised on the CPU
        built = chosen.build_stage(config, stages, stage)
    _check_interface(config, built, stage)
    if initialise and not shapes_only:
        chosen.initialise(built, config, stages, stage, seed)
    return built.to(device)


def activation_shape(config: ModelConfig, pipeline: PipelineConfig) -> tuple[int, int, int]:
    """Return the shape of a microbatch between stages: samples, tokens, width."""
    return pipeline.microbatch_size, config.context, make_family(config).boundary_width(config)


def stage_parameters(config: ModelConfig, stages: int, stage: int) -> int:
    """Return the number of parameters of one stage of 0..``stages``, frozen ones included."""
    return sum(_parameter_counts(config, stages, stage)[:2])


def trained_parameters(config: ModelConfig, stages: int, stage: int) -> int:
    """Return the number of a stage's parameters with gradient and moments."""
    return _parameter_counts(config, stages, stage)[0]


def frozen_parameters(config: ModelConfig, stages: int, stage: int) -> tuple[int, int]:
    """Return the number of a stage's parameters that are not trained, and so have neither gradient nor moments, and
    their bytes."""
    return _parameter_counts(config, stages, stage)[1:]


@lru_cache(maxsize=256)
def _parameter_counts(config: ModelConfig, stages: int, stage: int) -> tuple[int, int, int]:
    """Return the numbers of a stage's trained and frozen parameters, and the bytes of the latter."""
    chosen = make_family(config)
    if (counts := chosen.parameter_counts(config, stages, stage)) is not None:
        return counts
    built = build_stage(config, stages, stage, 0, "meta")
    frozen = [*built.buffers()] if config.lora.rank else []
    trained = sum(parameter.numel() for parameter in built.parameters())
    return trained, sum(tensor.numel() for tensor in frozen), sum(tensor.nbytes for tensor in frozen)


def parameters(config: ModelConfig, stages: int) -> int:
    """Return the number of parameters of a whole model."""
    return sum(stage_parameters(config, stages, stage) for stage in range(stages + 1))


def check_shapes(config: ModelConfig, stages: int) -> None:
    """Send one sample's shapes through all stages, without computing.

    :raises UserError: naming the first stage whose output has a wrong shape.
    """
    location = f"model.family = {config.family!r}"
    tokens = torch.zeros(1, config.context, dtype=torch.long, device="meta")
    shape, x = (1, config.context, make_family(config).boundary_width(config)), torch.empty(0)
    try:
        for stage in range(stages + 1):
            built = build_stage(config, stages, stage, 0, "meta")
            x = built(x) if stage else built.embed(tokens)  # type: ignore[operator]
            if x.shape != shape:
                raise UserError(f"{location}: stage {stage} returns {list(x.shape)} for one sample, not {list(shape)}")
        ends = build_stage(config, stages, 0, 0, "meta")
        loss = ends.loss(x, tokens)  # type: ignore[operator]
    except NotImplementedError:  # an operation without meta support: checked by the first step
        return
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"{location}: a stage fails on hidden states {list(shape)}: {str(error).splitlines()[0]}"
        ) from None
    if loss.ndim:
        raise UserError(f"{location}: the loss of stage 0 has shape {list(loss.shape)}; it must be one number")


def _check_interface(config: ModelConfig, built: object, stage: int) -> None:
    location = f"model.family = {config.family!r}: stage {stage}"
    if not isinstance(built, nn.Module):
        raise UserError(f"{location} is {type(built).__name__}; build_stage must return a torch.nn.Module")
    for method in ("embed", "loss") if stage == 0 else ():
        if not callable(getattr(built, method, None)):
            raise UserError(f"{location} has no method {method!r}; the ends need embed(tokens) and loss(x, targets)")
