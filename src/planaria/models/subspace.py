"""A residual stream in a fixed subspace: x = F[id] + U y (subspace networks, arXiv 2506.01260).

U [D, k] has orthonormal columns and is the same at all stages; F [V, D] ~ N(0, 1) is a table of offsets by token id.
Both follow from the run's seed and are never sent, saved or trained. Every matrix that writes to the stream is U Z with
Z [k, inputs] learned, and the embedding is F + E Uᵀ with E [V, k] learned, so k numbers and a token id determine x.

U is a random choice of cosine vectors (DCT-II) with random signs: U[i, j] = sᵢ √(2/D) cos(π (i + ½) cⱼ / D), c = 0
scaled by 1/√2. It takes no decomposition, whose last bits would depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planaria.config.model_config import ModelConfig
from planaria.models.seeding import generator, normal

OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""matrices of a decoder layer that write to the residual stream"""
EMBEDDING = "model.embed_tokens.weight"


class Subspace(NamedTuple):
    """The subspace of a run's residual stream."""

    vocab: int
    dim: int
    rank: int
    seed: int

    @classmethod
    def of(cls, config: ModelConfig) -> Subspace:
        """Return the subspace of a model that has one."""
        assert config.subspace is not None
        return cls(config.vocab, config.dim, config.subspace.rank, config.subspace.seed)

    def coordinates(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return y = (x − F[id]) U of x [..., D]: [..., k], fp32. Without ``ids`` F is left out, as for a gradient,
        which enters y through Uᵀ alone."""
        with torch.autocast(x.device.type, enabled=False):
            offset = x.float() if ids is None else x.float() - offsets(self, x.device)[ids]
            return offset @ basis(self, x.device)

    def restore(self, y: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return x = F[id] + U y of y [..., k]: [..., D], fp32. Without ``ids`` F is left out."""
        x = to_hidden(y, basis(self, y.device))
        return x if ids is None else offsets(self, y.device)[ids] + x

    @property
    def nbytes(self) -> int:
        """Bytes of U and F."""
        return 4 * self.dim * (self.rank + self.vocab)


def to_hidden(y: Tensor, matrix: Tensor) -> Tensor:
    """Return U y of y [..., k]: [..., D], fp32; in bf16 it would leave the subspace."""
    with torch.autocast(y.device.type, enabled=False):
        return F.linear(y.float(), matrix)


@lru_cache(maxsize=8)
def basis(space: Subspace, device: torch.device) -> Tensor:
    """Return U, fp32 [D, k]."""
    if device.type == "meta":
        return torch.empty(space.dim, space.rank, device=device)
    with torch.inference_mode(False), torch.device("cpu"):
        draws = generator(space.seed, "subspace")
        column = torch.randperm(space.dim, generator=draws)[: space.rank].double()
        sign = 1.0 - 2.0 * torch.randint(2, (space.dim, 1), generator=draws)
        cosine = torch.cos(math.pi / space.dim * (torch.arange(space.dim).double()[:, None] + 0.5) * column)
        scale = torch.where(column == 0, 1.0, math.sqrt(2.0)) / math.sqrt(space.dim)
        return (sign * scale * cosine).float().to(device)


@lru_cache(maxsize=4)
def offsets(space: Subspace, device: torch.device) -> Tensor:
    """Return F, fp32 [V, D]; rows do not depend on V."""
    if device.type == "meta":
        return torch.empty(space.vocab, space.dim, device=device)
    with torch.inference_mode(False), torch.device("cpu"):
        whole = -space.dim % 16  # PyTorch draws in blocks of 16, and a shorter last one differently
        return normal((space.vocab, space.dim + whole), 1.0, space.seed, "offsets")[:, : space.dim].to(device)


class OutputProjection(nn.Module):
    """The matrix U Z [D, inputs]; ``weight`` is Z [k, inputs], uninitialised."""

    basis: Tensor

    def __init__(self, inputs: int, space: Subspace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(space.rank, inputs))
        self.register_buffer("basis", basis(space, torch.get_default_device()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., D]."""
        return to_hidden(F.linear(x, self.weight), self.basis)


class SubspaceEmbedding(nn.Module):
    """The embedding F + E Uᵀ [V, D]; ``weight`` is E [V, k], uninitialised."""

    def __init__(self, space: Subspace) -> None:
        super().__init__()
        self.weight, self.space = nn.Parameter(torch.empty(space.vocab, space.rank)), space

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] → [..., D]."""
        return self.space.restore(F.embedding(tokens, self.weight), tokens)


def dense_parts(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]]:
    """Yield the name of each factored parameter, with the whole matrix's shape and its map from the stored one."""
    space = Subspace.of(config)
    ids = torch.arange(space.vocab)
    for name, shape in shapes.items():
        if name.endswith(OUTPUTS):
            yield name, ((space.dim, shape[1]), lambda stored: space.restore(stored.T).T)
    yield EMBEDDING, ((space.vocab, space.dim), lambda stored: space.restore(stored, ids))
