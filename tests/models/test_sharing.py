"""Shared weights: the map, its products, and models."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.config.schema import ModelConfig
from planaria.models.families import build_stage
from planaria.models.llama_stages import Llama, flops_per_token, parameter_count, stage_parameters
from planaria.models.sharing import SharedLinear, fold, slices, stored_count, unfold
from support.dense import dense_state

SMALL = ModelConfig(vocab=64, dim=16, layers=4, heads=2, hidden=40, context=16)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 40))
def test_every_number_represents_equally_many_weights(count: int, share: int) -> None:
    stored = stored_count(count, share)
    users = Counter(n for at, length, _ in slices(stored, 0, count) for n in range(at, at + length))
    assert set(users) == set(range(stored))
    assert set(users.values()) <= {count // stored, -(-count // stored)}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 900), st.integers(1, 500))
def test_fold_is_the_transpose_of_unfold(stored: int, begin: int, count: int) -> None:
    """⟨unfold(a), g⟩ = ⟨a, fold(g)⟩, so that one is the gradient of the other."""
    draw = torch.Generator().manual_seed(stored)
    array = torch.randn(stored, dtype=torch.float64, generator=draw)
    gradient = torch.randn(count, dtype=torch.float64, generator=draw)
    into = torch.zeros_like(array)
    fold(gradient, begin, into)
    assert torch.isclose(unfold(array, begin, (count,)) @ gradient, array @ into, rtol=1e-12, atol=1e-10)


def test_a_product_equals_that_of_the_dense_matrix() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = torch.nn.Parameter(torch.randn(37, dtype=torch.float64))

    holder, x = Holder(), torch.randn(3, 5, 12, dtype=torch.float64, requires_grad=True)
    matrix, weight = SharedLinear(holder, 21, 12, 7), unfold(holder.shared, 21, (7, 12))
    back = torch.randn(3, 5, 7, dtype=torch.float64)
    shared, dense = matrix(x), x @ weight.T
    assert torch.allclose(shared, dense, rtol=0, atol=1e-12)
    inputs = (x, holder.shared)
    for one, other in zip(*(torch.autograd.grad(out, inputs, back) for out in (shared, dense)), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert not list(matrix.parameters())


@pytest.mark.slow
def test_with_as_many_numbers_as_weights_sgd_equals_the_dense_model() -> None:
    """The map is then a signed permutation, which SGD preserves."""
    config = SMALL.model_copy(update={"share": 2})
    shared = Llama(config, seed=1)
    draw = torch.Generator().manual_seed(3)
    weights = config.dim * (4 * config.dim + 3 * config.hidden)
    for layer in (layer for stage in shared.stages for layer in stage.layers):
        layer.shared = torch.nn.Parameter(torch.randn(weights, generator=draw) * 0.02)
    dense = Llama(config.dense, initialise=False)
    dense.load_global_state(dense_state(shared.global_state(), config))
    steps = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (shared, dense)]
    for _ in range(60):
        tokens = torch.randint(0, config.vocab, (4, 9), generator=draw)
        losses = [model.loss(tokens[:, :-1], tokens[:, 1:]) for model in (shared, dense)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
        for loss, model, step in zip(losses, (shared, dense), steps, strict=True):
            model.zero_grad()
            loss.backward()
            model.ends.fold_gradients()
            step.step()


def test_a_mean_of_arrays_is_the_mean_of_their_models() -> None:
    config = SMALL.model_copy(update={"share": 8})
    states = [Llama(config, seed=seed).global_state() for seed in (1, 2)]
    mean = {name: (states[0][name] + states[1][name]) / 2 for name in states[0]}
    apart = [dense_state(state, config) for state in states]
    for name, weight in dense_state(mean, config).items():
        assert torch.equal(weight, (apart[0][name] + apart[1][name]) / 2), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("share", "over"), [(1, "layer"), (3, "layer"), (8, "layer"), (4, "model"), (7, "model")])
def test_parameter_counts_are_exact(share: int, over: str, tied: bool) -> None:
    config = SMALL.model_copy(update={"share": share, "share_over": over, "tied": tied})
    built = [build_stage(config, 2, stage, 0, "meta") for stage in range(3)]
    own = [sum(p.numel() for p in stage.parameters()) for stage in built]
    assert own == [stage_parameters(config, 2, stage) for stage in range(3)]
    assert parameter_count(config) == (own[0] if over == "model" else sum(own))
    assert flops_per_token(config) == flops_per_token(config.dense)


def test_stages_of_one_array_are_equal() -> None:
    config = SMALL.model_copy(update={"share": 4, "share_over": "model", "ends_layers": 2})
    first, *others = ({n: p.detach() for n, p in build_stage(config, 2, s, 5).named_parameters()} for s in range(3))
    for other in others:
        assert list(other) == list(first)
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"share": 0}, "greater than 0"),
        ({"share": 500}, "model.share = 500 leaves a layer of model.dim = 16 fewer numbers"),
        ({"share_over": "model"}, "shares nothing with model.share = 1"),
        ({"share": 2, "family": "tests:Other"}, "only layers of model.family = 'llama'"),
    ],
)
def test_invalid_sharing_is_refused(changed: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelConfig.model_validate(SMALL.model_dump() | changed)
