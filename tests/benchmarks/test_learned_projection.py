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


def projected(rank: int, anchors: bool = False, vocab: int = 50) -> ModelConfig:
    options = {"rank": rank, "anchors": anchors}
    family = "benchmarks.learned_projection:ProjectedLlama"
    return ModelConfig(**SIZES | {"vocab": vocab}, family=family, options=options)


def test_messages_have_as_many_numbers_as_the_projection() -> None:
    model, narrow = projected(8), ModelConfig(**SIZES | {"dim": 8})
    assert activation_shape(model, PIPELINE) == (2, 16, 8)
    assert message_bytes(model, PIPELINE) == message_bytes(narrow, PIPELINE)
    check_shapes(model, 4)
    assert parameters(model, 4) == parameter_count(ModelConfig(**SIZES)) + 5 * 2 * 8 * 32


def stages_of(model: ModelConfig, family: ProjectedLlama) -> list[Any]:
    stages = [family.build_stage(model, 4, stage) for stage in range(5)]
    for number, stage in enumerate(stages):
        family.initialise(stage, model, 4, number, seed=3)
    return stages


@pytest.mark.parametrize("anchors", [False, True])
def test_all_channels_are_the_plain_model(anchors: bool) -> None:
    model = projected(32, anchors)
    plain = Llama(ModelConfig(**SIZES), stages=4, seed=3)
    ends, *blocks = stages_of(model, ProjectedLlama(rank=32, anchors=anchors))
    plain.ends.embed_tokens.weight.data.copy_(ends.embed_tokens.weight)  # anchors start as another table
    tokens = torch.arange(16)[None]
    x = ends.embed(tokens)
    for block in blocks:
        x = block(x)
    torch.testing.assert_close(ends.loss(x, tokens), plain.loss(tokens, tokens))


def test_anchors_restore_the_hidden_states_of_the_embedding_at_any_rank() -> None:
    model = projected(2, anchors=True, vocab=40_000)
    assert activation_shape(model, PIPELINE) == (2, 16, 4)
    check_shapes(model, 4)
    ends, block, *_ = stages_of(model, ProjectedLlama(rank=2, anchors=True))
    tokens = torch.tensor([[0, 255, 256, 39_999]])
    message = ends.embed(tokens)
    hidden, ids = block.receive(message.bfloat16().float())
    assert ids.equal(tokens)
    torch.testing.assert_close(hidden, ends.embed_tokens(tokens))
    message.sum().backward()
    assert ends.embed_tokens.weight.grad[tokens].abs().sum() > 0
