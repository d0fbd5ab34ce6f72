"""CheckFree's three published models: recipes and parameter counts."""

from __future__ import annotations

import json
import tomllib

import pytest

from planaria.config.schema import RunConfig
from planaria.config.shipped import find
from planaria.models.families import build_stage
from planaria.models.llama_stages import parameter_count


@pytest.mark.parametrize(
    ("name", "stages", "layers", "dim", "context", "parameters", "tokens_per_step"),
    [
        ("llama_124m", 4, 12, 512, 512, 83_112_448, 2**18),
        ("llama_500m", 6, 24, 1024, 1024, 468_239_360, 2**18),
        ("llama_1_5b", 6, 24, 2048, 4096, 1_741_785_088, 2**19),
    ],
)
def test_a_recipe_has_the_published_shape_and_size(
    name: str, stages: int, layers: int, dim: int, context: int, parameters: int, tokens_per_step: int
) -> None:
    recipe = tomllib.loads(find(name).read_text(encoding="utf-8"))
    config = RunConfig.model_validate_json(json.dumps(recipe))
    model = config.model
    assert (config.name, config.pipeline.stages, model.layers, model.dim, model.context) == (
        name,
        stages,
        layers,
        dim,
        context,
    )
    # Attention 4 d², SwiGLU with hidden width 4 d: 12 d², two norms; two tables of 32,000 rows; the last norm.
    by_hand = layers * (16 * dim**2 + 2 * dim) + 2 * 32000 * dim + dim
    built = [build_stage(model, stages, stage, 0, "meta") for stage in range(stages + 1)]
    assert sum(p.numel() for stage in built for p in stage.parameters()) == by_hand
    assert parameter_count(model) == by_hand == parameters
    assert config.pipeline.samples * context == tokens_per_step
