"""Recomputed activations: equal gradients with the memory of one layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planaria.config.schema import ModelConfig
from planaria.models.families import build_stage

CONFIG = ModelConfig(layers=8, dim=64, heads=4, hidden=160, context=64, vocab=64, ends_layers=0)


def kept(stages: int, stage: int, recompute: bool) -> tuple[int, list[Tensor]]:
    """Return the bytes kept for a stage's backward pass, without its weights, and the gradients."""
    module = build_stage(CONFIG.model_copy(update={"ends_layers": 7 if stage == 0 else 0}), stages, stage, 1)
    module.recompute = recompute  # type: ignore[assignment]
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(torch.randn(2, 64, 64)) if stage else module.embed(torch.arange(64).view(1, 64))  # type: ignore[operator]
    y.square().mean().backward()
    return sum(held.values()), [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("stage", [1, 0])
def test_recomputation_keeps_the_gradients_and_little_memory(stage: int) -> None:
    much, wanted = kept(1, stage, False)
    little, found = kept(1, stage, True)
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert little <= 0.2 * much
