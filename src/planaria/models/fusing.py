"""Models that descend from one parent, put together: what each learned is a vector, and vectors add up.

Weights are tensors by name, the same names and shapes for all. Whatever the method, what it adds to the parent is one
contribution of each model, θ = θ₀ + Σ cᵢ, so that a mask can leave out parts of each (:mod:`planaria.models.masking`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from planaria.common.errors import UserError

Named = Mapping[str, Tensor]
TRIMMED = 0.2
"""TIES: the part of a vector that stays, the largest. Source: arXiv 2306.01708, section 6"""
DROPPED = 0.5
"""DARE: p, the part of a vector that goes; arXiv 2311.03099 goes up to 0.9 with models of billions of parameters"""


def digest(weights: Named) -> str:
    """SHA-256 (hex) of every tensor in the order of names: the name, then its fp32 bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + b"\0")
        found.update(tensor.detach().to("cpu", torch.float32).flatten().numpy().data)
    return found.hexdigest()


def require_alike(parent: Named, other: Named, what: str) -> None:
    """:raises UserError: naming the first tensor that the model ``what`` does not have as the parent has it."""
    for name in sorted({*parent, *other}):
        ours, theirs = (list(one[name].shape) if name in one else None for one in (parent, other))
        if ours != theirs:
            raise UserError(f"{what}: {name} has shape {theirs}, its parent's has {ours}; give a model and its parent")


def task_vector(tuned: Named, parent: Named) -> dict[str, Tensor]:
    """δ = θ − θ₀ (arXiv 2212.04089, section 2)."""
    return {name: tuned[name] - parent[name] for name in parent}


def strangeness(vector: Named, parent: Named) -> float:
    """Mean |δ| over mean |θ₀|: small where a model descends from its parent, about 1 or more where it does not."""
    moved = sum(float(tensor.abs().sum()) for tensor in vector.values())
    size = sum(float(tensor.abs().sum()) for tensor in parent.values())
    return moved / size if size else float("inf")


def summed(vectors: Sequence[Named], scale: float) -> list[dict[str, Tensor]]:
    """cᵢ = λ δᵢ (task arithmetic, arXiv 2212.04089, section 2)."""
    return [{name: scale * tensor for name, tensor in vector.items()} for vector in vectors]


def ties(vectors: Sequence[Named], scale: float, stays: float = TRIMMED) -> list[dict[str, Tensor]]:
    """TIES (arXiv 2306.01708, algorithm 1): trim each vector, elect a sign, take the mean of those who have it.

    Of each δᵢ the largest ``stays`` of all numbers stay: δ̂ᵢ. With the signs γ = sgn(Σ δ̂ᵢ),
    cᵢ = λ δ̂ᵢ [sgn δ̂ᵢ = γ] / |{j: sgn δ̂ⱼ = γ}|.
    """
    trimmed = [_trimmed(vector, stays) for vector in vectors]
    found: list[dict[str, Tensor]] = [{} for _ in vectors]
    for name in vectors[0]:
        stacked = torch.stack([vector[name] for vector in trimmed])
        elected = stacked.sum(0).sign()
        agree = (stacked.sign() == elected) & (stacked != 0)
        parts = scale * stacked * agree / agree.sum(0).clamp_min(1)
        for one, part in zip(found, parts, strict=True):
            one[name] = part.clone()
    return found


def dare(vectors: Sequence[Named], scale: float, drop: float = DROPPED, seed: int = 0) -> list[dict[str, Tensor]]:
    """DARE (arXiv 2311.03099, eq. 3): drop numbers at random, and make the others larger: cᵢ = λ m ⊙ δᵢ / (1 − p)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for vector in vectors:
        stays = {name: torch.rand(tensor.shape, generator=generator) >= drop for name, tensor in vector.items()}
        found.append({n: scale * tensor * stays[n].to(tensor.device) / (1 - drop) for n, tensor in vector.items()})
    return found


def fused(parent: Named, contributions: Sequence[Named]) -> dict[str, Tensor]:
    """θ = θ₀ + Σ cᵢ."""
    found = {name: tensor.clone() for name, tensor in parent.items()}
    for contribution in contributions:
        for name, tensor in contribution.items():
            found[name] += tensor
    return found


def mixed(parent: Named, tuned: Named, alphas: float | Mapping[str, float]) -> dict[str, Tensor]:
    """θ = (1 − α) θ₀ + α θ, α one number or one for each tensor; 0 and 1 give the models' own numbers."""
    own = alphas if isinstance(alphas, Mapping) else dict.fromkeys(parent, alphas)
    return {name: torch.lerp(tensor, tuned[name], own[name]) for name, tensor in parent.items()}


def agreement(vector: Named, other: Named) -> dict[str, float]:
    """The cosine of each tensor of one vector with that of another: do they pull the same way?"""
    return {name: float(F.cosine_similarity(t.flatten(), other[name].flatten(), dim=0)) for name, t in vector.items()}


def _trimmed(vector: Named, stays: float) -> dict[str, Tensor]:
    sizes = torch.cat([tensor.abs().flatten() for tensor in vector.values()])
    least = sizes.kthvalue(max(1, round((1 - stays) * sizes.numel()))).values
    return {name: torch.where(tensor.abs() > least, tensor, 0.0) for name, tensor in vector.items()}
