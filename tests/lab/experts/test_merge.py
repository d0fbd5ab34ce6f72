"""Merged models: averaged weights, kept blocks, and routing of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planaria.lab.experts import merge, ridge
from planaria.models.llama_stages import Llama
from support.untrained_ensemble import SHAPE, child

PARENT = Llama(SHAPE, seed=1).eval()
DRAW = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(low, low + 40, (6, 32), generator=DRAW) for low in (0, 60, 120)]
"""Texts of domains that share no token."""


def made(experts: list[Llama], top_k: int = 1, bias: bool = True, temperature: float = 1.0) -> Llama:
    model = merge.merge_experts(experts, top_k, bias)
    sums = [merge.domain_sums(model, n, TEXTS[n]) for n in range(len(experts))]
    merge.route(model, sums, ridge.RIDGE, temperature)
    return model


def apart(one: Llama, other: Llama) -> float:
    with torch.inference_mode():
        return float((one(TEXTS[0]) - other(TEXTS[0])).abs().max())


@pytest.mark.parametrize("bias", [True, False])
def test_one_expert_merged_is_that_expert(bias: bool) -> None:
    expert = child(PARENT, 1)
    assert apart(made([expert], bias=bias), expert) <= 1e-5
    assert apart(expert, PARENT) > 0.1, "the models differ"


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_equal_experts_merged_are_that_expert(top_k: int) -> None:
    expert = child(PARENT, 1)
    model = made([expert] * 3, top_k)
    assert apart(model, expert) <= 1e-5
    (first, *_) = model.layers
    assert first.mlp.router.weight.std() > 1e-3, "the routers distinguish tokens"


def test_shared_parts_are_means_and_blocks_are_kept() -> None:
    experts = [child(PARENT, n) for n in range(3)]
    state, states = made(experts).global_state(), [expert.global_state() for expert in experts]
    for name in states[0]:
        if ".mlp." not in name:
            torch.testing.assert_close(state[name], sum(own[name] for own in states) / 3)
            continue
        for number, own in enumerate(states):
            assert torch.equal(state[name.replace(".mlp.", f".mlp.experts.{number}.")], own[name])


def test_a_token_passes_its_top_blocks_weighted_by_their_softmax() -> None:
    model = made([child(PARENT, n) for n in range(3)], top_k=2)
    layer, x = model.layers[1].mlp, torch.randn(2, 5, SHAPE.dim)
    with torch.inference_mode():
        found, logits = layer(x), layer.router(x)
        for row in range(2):
            for at in range(5):
                best = sorted(range(3), key=lambda n: -float(logits[row, at, n]))[:2]
                weights = torch.stack([logits[row, at, n] for n in best]).softmax(0)
                expected = sum(w * layer.experts[n](x[row, at]) for w, n in zip(weights, best, strict=True))
                torch.testing.assert_close(found[row, at], expected)


def test_text_is_routed_to_the_block_of_its_domain() -> None:
    model = made([child(PARENT, n) for n in range(3)])
    for number, tokens in enumerate(TEXTS):
        with torch.inference_mode(), merge.count_shares(model) as passed:
            model(tokens)
        assert float(passed.sum()) == tokens.numel() * SHAPE.layers
        assert int(passed.argmax()) == number and float(passed[number] / passed.sum()) > 0.5


def test_the_temperature_divides_the_logits() -> None:
    experts = [child(PARENT, n) for n in range(2)]
    warm, cold = (made(experts, temperature=t).layers[0].mlp.router for t in (1.0, 0.1))
    torch.testing.assert_close(cold.weight, warm.weight * 10)
    torch.testing.assert_close(cold.bias, warm.bias * 10)


def test_forced_routing_ends_with_its_context() -> None:
    model = made([child(PARENT, n) for n in range(2)])
    before = model(TEXTS[1])
    with merge.force_block(model, 0):
        assert not torch.allclose(model(TEXTS[1]), before)
    assert torch.equal(model(TEXTS[1]), before)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_adding_and_removing_an_expert_restores_the_model() -> None:
    experts = [child(PARENT, n) for n in range(3)]
    two = merge.merge_experts(experts[:2], 1, True)
    sums = [merge.domain_sums(two, n, TEXTS[n]) for n in range(2)]
    merge.route(two, sums, ridge.RIDGE, 1.0)
    three = merge.with_block(two, experts[2], 1)
    with torch.inference_mode(), merge.force_block(two, 1), merge.force_block(three, 1):
        assert torch.equal(two(TEXTS[0]), three(TEXTS[0])), "existing blocks are unchanged"
    more = [*sums, merge.domain_sums(three, 2, TEXTS[2])]
    merge.route(three, more, ridge.RIDGE, 1.0)
    with merge.count_shares(three) as passed, torch.inference_mode():
        three(TEXTS[2])
    assert float(passed[2] / passed.sum()) > 0.5
    again = merge.without_block(three, 2, 1)
    merge.route(again, more[:2], ridge.RIDGE, 1.0)
    assert equal(again.global_state(), two.global_state())
    first_gone = merge.without_block(three, 0, 1)
    with torch.inference_mode(), merge.force_block(first_gone, 1), merge.force_block(three, 2):
        assert torch.equal(first_gone(TEXTS[0]), three(TEXTS[0]))
