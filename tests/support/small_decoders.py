"""Small random decoders of ``transformers`` for tests."""

from __future__ import annotations

from typing import Any

import torch

from planaria.config.schema import ModelConfig
from planaria.models.transformers.check import shrink_config
from planaria.models.transformers.decoder import PLACE, Decoder
from planaria.models.transformers.recipe_section import model_section
from planaria.models.transformers.skeleton import read_config


def library_config(kind: str) -> dict[str, Any]:
    """The library's default configuration of an architecture, as in its config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values: dict[str, Any] = CONFIG_MAPPING[kind]().get_text_config().to_dict()
    return values | {"model_type": kind}


def logits(stages: list[Any], tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    given = () if mask is None else (mask,)
    x = stages[0].embed(tokens, *given)
    for block in stages[1:]:
        x = block(x, *given)
    found: torch.Tensor = stages[0].logits(x)
    return found


def small(kind: str, **changed: Any) -> Decoder:
    config = read_config(library_config(kind), PLACE)
    return Decoder.of(shrink_config(config) | changed)


def section(decoder: Decoder, **changed: Any) -> ModelConfig:
    return ModelConfig.model_validate(model_section(decoder.values, "config.json") | changed)


def stages_of(decoder: Decoder, config: ModelConfig, count: int) -> tuple[list[Any], dict[str, torch.nn.Parameter]]:
    """Return the stages of a cut into ``count`` block stages, initialised, and their parameters by global name."""
    stages: list[Any] = [decoder.build(config, count, stage) for stage in range(count + 1)]
    named = {}
    for stage, built in enumerate(stages):
        decoder.initialise(built, config, count, stage, 7)
        named |= {decoder.global_name(config, count, stage, name): p for name, p in built.named_parameters()}
    return stages, named
