"""Merge experts of one parent into a mixture-of-experts model without training (DUME, arXiv 2603.29765).

All weights but those of the feed-forward blocks are the experts' mean. Each layer keeps all blocks, behind a router
computed from the hidden states of each domain's text at that layer while its block is forced everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from planaria.lab.experts import ridge
from planaria.lab.experts.log_probabilities import BATCH
from planaria.models.llama_stages import Llama
from planaria.models.moe_layer import ExpertRouting, MoELayer

_OWN, _ALL = ".mlp.", ".mlp.experts.{}."


def mean(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return θ̄ = Σ_i θ_i / N, by name."""
    return {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}


def merge_experts(experts: Sequence[Llama], top_k: int, bias: bool) -> Llama:
    """Return one model of N experts of equal shape; its routers are zero until :func:`route` sets them."""
    states = [expert.global_state() for expert in experts]
    model = Llama(experts[0].config, routing=ExpertRouting(len(experts), top_k, bias), initialise=False)
    blocks = {
        name.replace(_OWN, _ALL.format(number)): tensor
        for number, state in enumerate(states)
        for name, tensor in state.items()
        if _OWN in name
    }
    shared = mean([{name: tensor for name, tensor in state.items() if _OWN not in name} for state in states])
    return _load_state(model, shared | blocks)


def with_block(model: Llama, expert: Llama, top_k: int) -> Llama:
    """Return a merged model with the expert's block added to each layer, otherwise unchanged."""
    assert model.routing is not None
    number, state = model.routing.experts, model.global_state()
    added = {n.replace(_OWN, _ALL.format(number)): t for n, t in expert.global_state().items() if _OWN in n}
    routing = model.routing._replace(experts=number + 1, top_k=top_k)
    wider = Llama(model.config, routing=routing, initialise=False)
    return _load_state(wider, {name: tensor for name, tensor in state.items() if ".router." not in name} | added)


def without_block(model: Llama, number: int, top_k: int) -> Llama:
    """Return a merged model without block ``number`` of each layer."""
    assert model.routing is not None
    left = [old for old in range(model.routing.experts) if old != number]
    fewer = model.routing._replace(experts=len(left), top_k=top_k)
    state = {name: tensor for name, tensor in model.global_state().items() if ".mlp." not in name}
    for new, old in enumerate(left):
        old_name, now = _ALL.format(old), _ALL.format(new)
        state |= {name.replace(old_name, now): t for name, t in model.global_state().items() if old_name in name}
    return _load_state(Llama(model.config, routing=fewer, initialise=False), state)


@torch.inference_mode()
def domain_sums(model: Llama, block: int, samples: Tensor) -> Tensor:
    """Return :func:`ridge.sums` [layers, D + 1, D + 1] of the routers' inputs while samples [n, T] pass ``block``."""
    layers = _routed_layers(model)
    total = torch.zeros(len(layers), *[model.config.dim + 1] * 2, dtype=torch.float64)

    def make_hook(at: int) -> Callable[[nn.Module, Any], None]:
        def add(_: nn.Module, given: tuple[Tensor]) -> None:
            total[at] += ridge.sums(given[0].flatten(0, -2))

        return add

    hooks = [layer.register_forward_pre_hook(make_hook(at)) for at, layer in enumerate(layers)]
    try:
        with force_block(model, block):
            for batch in torch.split(samples, BATCH):
                model.hidden(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return total


@torch.no_grad()
def route(model: Llama, domains: Sequence[Tensor], lam: float, temperature: float) -> None:
    """Set every layer's router from the :func:`domain_sums` of each block's domain, divided by ``temperature``.

    :raises UserError: as :func:`ridge.router`.
    """
    assert model.routing is not None
    for at, layer in enumerate(_routed_layers(model)):
        weights = ridge.router([own[at] for own in domains], lam, model.routing.bias).float() / temperature
        layer.router.weight.copy_(weights[: model.config.dim].T)
        if model.routing.bias:
            layer.router.bias.copy_(weights[-1])


@contextmanager
def force_block(model: Llama, block: int) -> Iterator[None]:
    """Route all tokens through this block in every layer."""
    layers = _routed_layers(model)
    try:
        for layer in layers:
            layer.forced = block
        yield
    finally:
        for layer in layers:
            layer.forced = None


@contextmanager
def count_shares(model: Llama) -> Iterator[Tensor]:
    """Yield the weight of each block [N], summed over all tokens read meanwhile and over layers."""
    assert model.routing is not None
    totals = torch.zeros(model.routing.experts, dtype=torch.float64)

    def count(layer: nn.Module, given: Any, logits: Tensor) -> None:
        weights, chosen = logits.double().topk(model.routing.top_k, -1)  # type: ignore[union-attr]
        totals.index_add_(0, chosen.flatten(), weights.softmax(-1).flatten())

    hooks = [layer.router.register_forward_hook(count) for layer in _routed_layers(model)]
    try:
        yield totals
    finally:
        for hook in hooks:
            hook.remove()


def _routed_layers(model: Llama) -> list[MoELayer]:
    blocks = [layer.mlp for layer in model.layers]
    return [layer for layer in blocks if isinstance(layer, MoELayer)]


def _load_state(model: Llama, state: Mapping[str, Tensor]) -> Llama:
    """Load weights into the model; routers missing in ``state`` become zero."""
    routers = {n: torch.zeros_like(t) for n, t in model.global_state().items() if ".router." in n}
    model.load_global_state({**routers, **state})
    return model.eval()
