"""Mixtral's layer: several feed-forward blocks, and a router that chooses those that a token passes.

A router may also have a bias. Files use Mixtral's tensor names, memory a LLaMA's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.llama_layers import OwnParameters, SwiGLU

MAX_BLOCKS = 1024
"""maximum number of blocks per layer in a file"""
_NAMES = (
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
"""parts of a routed layer's names, in memory and in files"""


class ExpertRouting(NamedTuple):
    """Routing of tokens among the experts of a model's layers."""

    experts: int
    """blocks per layer"""
    top_k: int = 1
    """blocks that a token passes"""
    bias: bool = False
    """whether the router has a bias; Mixtral's has none"""


class Router(nn.Linear):
    """Map hidden states [..., D] to a logit per block [..., N]; zero until values are loaded."""

    def reset_parameters(self) -> None:
        """Set zeros; PyTorch would draw from its global generator."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class MoELayer(nn.Module):
    """y = Σ_i softmax(l_S)_i · block_i(x) over the set S of the k largest logits l (arXiv 2401.04088, section 2.1)."""

    forced: int | None = None
    """the block that all tokens pass, instead of the router's choice"""

    def __init__(self, config: ModelConfig, routing: ExpertRouting) -> None:
        """:raises ValueError: if ``top_k`` exceeds the number of blocks."""
        if not 1 <= routing.top_k <= routing.experts:
            raise ValueError(f"top_k = {routing.top_k} of {routing.experts} blocks")
        super().__init__()
        self.top_k = routing.top_k
        self.router = Router(config.dim, routing.experts, bias=routing.bias)
        self.experts = nn.ModuleList(SwiGLU(config, OwnParameters()) for _ in range(routing.experts))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        if self.forced is not None:
            out: Tensor = self.experts[self.forced](x)
            return out
        tokens = x.flatten(0, -2)
        logits, chosen = self.router(tokens).topk(self.top_k, -1)
        weights, total = logits.softmax(-1), torch.zeros_like(tokens)
        for number, block in enumerate(self.experts):
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                total = total.index_add(0, rows, block(tokens[rows]) * weights[rows, ranks, None])
        return total.view_as(x)


def to_file(name: str) -> str:
    """Return a parameter's name in a file of a routed model.

    >>> to_file("model.layers.3.mlp.experts.1.up_proj.weight")
    'model.layers.3.block_sparse_moe.experts.1.w3.weight'
    """
    for ours, theirs in _NAMES:
        name = name.replace(ours, theirs)
    return name


def from_file(name: str) -> str:
    """Return the parameter of a name in a file.

    >>> from_file("model.layers.3.block_sparse_moe.gate.weight")
    'model.layers.3.mlp.router.weight'
    """
    for ours, theirs in reversed(_NAMES):
        name = name.replace(theirs, ours)
    return name


def to_keys(routing: ExpertRouting) -> dict[str, Any]:
    """Return the keys of config.json: Mixtral's, or planaria's own architecture if the router has a bias."""
    kind, name = ("planaria_routed", "PlanariaRouted") if routing.bias else ("mixtral", "Mixtral")
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "num_local_experts": routing.experts,
        "num_experts_per_tok": routing.top_k,
        "sliding_window": None,
    } | ({"router_bias": True} if routing.bias else {})


def from_keys(location: object, table: Mapping[str, Any]) -> ExpertRouting | None:
    """Return the routing in the config.json ``location``, or None if layers have one block.

    :raises UserError: if the numbers are invalid.
    """
    if table.get("model_type") not in ("mixtral", "planaria_routed"):
        return None
    experts, top_k = table.get("num_local_experts"), table.get("num_experts_per_tok")
    if type(experts) is not int or not 1 <= experts <= MAX_BLOCKS:
        raise UserError(f"{location}: num_local_experts = {experts!r:.80} must be a number from 1 to {MAX_BLOCKS}")
    if type(top_k) is not int or not 1 <= top_k <= experts:
        raise UserError(f"{location}: num_experts_per_tok = {top_k!r:.80} must be a number from 1 to {experts}")
    return ExpertRouting(experts, top_k, bias=table["model_type"] == "planaria_routed")
