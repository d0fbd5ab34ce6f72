"""Merge models that descend from one parent, by adding task vectors.

Weights are tensors by name, with the same names and shapes for all models. Every method adds one contribution per model
to the parent, θ = θ₀ + Σ cᵢ, so that a mask can omit parts of each (:mod:`planaria.models.masking`).
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
"""TIES: share of a vector that is kept, the largest numbers. Source: arXiv 2306.01708, section 6"""
DROPPED = 0.5
"""DARE: p, the share of a vector that is dropped; arXiv 2311.03099 uses up to 0.9 with billions of parameters"""


def digest(weights: Named) -> str:
    """Return the SHA-256 (hex) of every tensor's name and fp32 bytes, in order of names."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        hasher.update(name.encode() + b"\0")
        hasher.update(tensor.detach().to("cpu", torch.float32).flatten().numpy().data)
    return hasher.hexdigest()


def require_alike(parent: Named, child: Named, label: str) -> None:
    """Check that a model has its parent's tensors.

    :raises UserError: naming the first tensor in which the model ``label`` differs.
    """
    for name in sorted({*parent, *child}):
        ours, theirs = (list(weights[name].shape) if name in weights else None for weights in (parent, child))
        if ours != theirs:
            raise UserError(f"{label}: {name} has shape {theirs}, its parent's has {ours}; use a model and its parent")


def task_vector(tuned: Named, parent: Named) -> dict[str, Tensor]:
    """Return δ = θ − θ₀ (arXiv 2212.04089, section 2)."""
    return {name: tuned[name] - parent[name] for name in parent}


def relative_distance(vector: Named, parent: Named) -> float:
    """Return mean |δ| over mean |θ₀|: small for descendants of the parent, about 1 or more for other models."""
    moved = sum(float(tensor.abs().sum()) for tensor in vector.values())
    size = sum(float(tensor.abs().sum()) for tensor in parent.values())
    return moved / size if size else float("inf")


def task_arithmetic(vectors: Sequence[Named], scale: float) -> list[dict[str, Tensor]]:
    """Return cᵢ = λ δᵢ (task arithmetic, arXiv 2212.04089, section 2)."""
    return [{name: scale * tensor for name, tensor in vector.items()} for vector in vectors]


def ties(vectors: Sequence[Named], scale: float, stays: float = TRIMMED) -> list[dict[str, Tensor]]:
    """Return TIES contributions (arXiv 2306.01708, algorithm 1): trim each vector, elect a sign, average those that
    have it.

    Of each δᵢ keep the largest share ``stays`` of all numbers: δ̂ᵢ. With the signs γ = sgn(Σ δ̂ᵢ), cᵢ = λ δ̂ᵢ [sgn δ̂ᵢ
    = γ] / |{j: sgn δ̂ⱼ = γ}|.
    """
    trimmed = [_trim(vector, stays) for vector in vectors]
    contributions: list[dict[str, Tensor]] = [{} for _ in vectors]
    for name in vectors[0]:
        stacked = torch.stack([vector[name] for vector in trimmed])
        elected = stacked.sum(0).sign()
        agree = (stacked.sign() == elected) & (stacked != 0)
        averaged = scale * stacked * agree / agree.sum(0).clamp_min(1)
        for contribution, tensor in zip(contributions, averaged, strict=True):
            contribution[name] = tensor.clone()
    return contributions


def dare(vectors: Sequence[Named], scale: float, drop: float = DROPPED, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return DARE contributions (arXiv 2311.03099, eq. 3): drop numbers at random and rescale, cᵢ = λ m ⊙ δᵢ /
    (1 − p)."""
    generator = torch.Generator().manual_seed(seed)
    contributions = []
    for vector in vectors:
        stays = {name: torch.rand(delta.shape, generator=generator) >= drop for name, delta in vector.items()}
        contributions.append({n: scale * d * stays[n].to(d.device) / (1 - drop) for n, d in vector.items()})
    return contributions


def add_contributions(parent: Named, contributions: Sequence[Named]) -> dict[str, Tensor]:
    """Return θ = θ₀ + Σ cᵢ."""
    merged = {name: tensor.clone() for name, tensor in parent.items()}
    for contribution in contributions:
        for name, tensor in contribution.items():
            merged[name] += tensor
    return merged


def interpolate(parent: Named, tuned: Named, alphas: float | Mapping[str, float]) -> dict[str, Tensor]:
    """Return θ = (1 − α) θ₀ + α θ, with α one number or one per tensor; 0 and 1 return exactly the models' numbers."""
    factors = alphas if isinstance(alphas, Mapping) else dict.fromkeys(parent, alphas)
    return {name: torch.lerp(tensor, tuned[name], factors[name]) for name, tensor in parent.items()}


def agreement(vector: Named, other: Named) -> dict[str, float]:
    """Return the cosine similarity of each tensor of two vectors."""
    return {name: float(F.cosine_similarity(t.flatten(), other[name].flatten(), dim=0)) for name, t in vector.items()}


def _trim(vector: Named, stays: float) -> dict[str, Tensor]:
    sizes = torch.cat([tensor.abs().flatten() for tensor in vector.values()])
    threshold = sizes.kthvalue(max(1, round((1 - stays) * sizes.numel()))).values
    return {name: torch.where(tensor.abs() > threshold, tensor, 0.0) for name, tensor in vector.items()}
