"""Clipping of gradients, by layer and by stage."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import OptimConfig
from planaria.runtime.worker.clipping import clip_gradients, total_norms


def test_each_layer_and_each_other_parameter_is_clipped_by_itself() -> None:
    sizes = {"embed_tokens.weight": 0.5, "layers.0.a": 3.0, "layers.0.b": 4.0, "layers.1.a": 0.6, "norm.weight": 2.0}
    named = {name: torch.nn.Parameter(torch.zeros(1)) for name in sizes}
    for by, expected in {
        "layer": ([0.5, 0.6, 0.8, 0.6, 1.0], math.sqrt(0.25 + 1 + 0.36 + 1)),
        "stage": ([size / math.sqrt(29.61) for size in sizes.values()], 1.0),
    }.items():
        for name, size in sizes.items():
            named[name].grad = torch.tensor([size])
        config = OptimConfig.model_validate({"clip": 1.0, "clip_by": by})
        before, after = total_norms(clip_gradients(named, config), config)
        assert before == pytest.approx(math.sqrt(29.61)) and after == pytest.approx(expected[1])
        assert [float(p.grad) for p in named.values() if p.grad is not None] == pytest.approx(expected[0], rel=1e-5)
    assert total_norms(clip_gradients({}, OptimConfig()), OptimConfig()) == (0.0, 0.0)


@given(st.integers(0, 99), st.floats(0.25, 4.0) | st.sampled_from([1.0, 1.0 - 1e-6, 1.0 + 1e-6, 1e-30, math.inf]))
def test_gradients_are_clipped_as_by_torch_to_the_last_bit(seed: int, part: float) -> None:
    """Also where the bound is close to the norm."""
    draw = torch.Generator().manual_seed(seed)
    grads = [torch.randn(5, 3, generator=draw), torch.randn(7, generator=draw)]
    bound = part * torch.nn.utils.get_total_norm(grads).item()
    ours, torchs = ([torch.nn.Parameter(torch.zeros_like(g)) for g in grads] for _ in range(2))
    for parameters in (ours, torchs):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
    kept = [parameter.grad._version for parameter in ours]
    norm = torch.nn.utils.clip_grad_norm_(torchs, bound).item()
    named = dict(zip("ab", ours, strict=True))
    config = OptimConfig(clip=0.0 if math.isinf(bound) else bound)
    assert total_norms(clip_gradients(named, config), config)[0] == norm
    for one, other in zip(ours, torchs, strict=True):
        assert torch.equal(one.grad, other.grad)
    if part > 1.5:
        assert [parameter.grad._version for parameter in ours] == kept, "gradients within the bound are not touched"
