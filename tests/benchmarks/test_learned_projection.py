"""A family whose stages send learned projections, an example of one that sends fewer numbers than its width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.learned_projection import ProjectedLlama

from planaria.config.schema import ModelConfig, PipelineConfig
from planaria.models.families import activation_shape, check_shapes, parameters
from planaria.models.llama_stages import Llama, parameter_count
from planaria.pipeline.codecs import message_bytes

pytestmark = pytest.mark.usefixtures("allow_code")
SIZES: dict[str, Any] = {"vocab": 50, "dim": 32, "heads": 2, "hidden": 64, "layers": 4, "context": 16, "tied": False}
PIPELINE = PipelineConfig(stages=4, microbatch_size=2, wire="8/4")


def projected(rank: int) -> ModelConfig:
    return ModelConfig(**SIZES, family="benchmarks.learned_projection:ProjectedLlama", options={"rank": rank})


def test_messages_have_as_many_numbers_as_the_projection() -> None:
    model, narrow = projected(8), ModelConfig(**SIZES | {"dim": 8})
    assert activation_shape(model, PIPELINE) == (2, 16, 8)
    assert message_bytes(model, PIPELINE) == message_bytes(narrow, PIPELINE)
    check_shapes(model, 4)
    assert parameters(model, 4) == parameter_count(ModelConfig(**SIZES)) + 5 * 2 * 8 * 32


def test_all_channels_are_the_plain_model() -> None:
    model = projected(32)
    family, plain = ProjectedLlama(rank=32), Llama(ModelConfig(**SIZES), stages=4, seed=3)
    stages = [family.build_stage(model, 4, stage) for stage in range(5)]
    for number, stage in enumerate(stages):
        family.initialise(stage, model, 4, number, seed=3)
    ends, *blocks = stages
    tokens = torch.arange(16)[None]
    x = ends.embed(tokens)
    for block in blocks:
        x = block(x)
    torch.testing.assert_close(ends.loss(x, tokens), plain.loss(tokens, tokens))
