"""LLaMA's layers, named as in Hugging Face: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

B sequences of T tokens, D = ``config.dim``, H query heads and K key/value heads of d = D / H channels each. Matrices
are created uninitialised: :func:`planaria.models.families.build_stage` draws them, or rebuilt weights overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from planaria.config.schema import ModelConfig
from planaria.models.sharing import MatrixCut, stored_count
from planaria.models.subspace import OutputProjection, Subspace


class Linear(nn.Linear):
    """A matrix without bias and without initial values."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Skip PyTorch's initialisation, which would use the global generator."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · gain over the last dimension (arXiv 1910.07467, eq. 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin of every position's angles, each [context, 1, d] (arXiv 2104.09864, eq. 34).

    Channels j and j + d/2 form the pair that rotates by position · theta^(-2j/d). The first half of sin is negative, so
    that :func:`rotate` is two products and a sum.
    """
    if torch.get_default_device().type == "meta":  # arange would import torch's compiler: 70 MB
        return torch.empty(config.context, 1, config.head_dim), torch.empty(config.context, 1, config.head_dim)
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = config.rope_theta ** -(channels / config.head_dim)
    angles = torch.arange(config.context, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, heads, d] by its positions' angles; tables [T, 1, d], or per row [B, T, 1, d]."""
    if x.is_cuda:
        return rotate_halves(x, cos, sin)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate` for GPUs: compiled, the gradient of a roll takes six times as long as this."""
    half = x.shape[-1] // 2
    left = x[..., :half]
    right = x[..., half:]
    cos = cos[..., half:]
    sin = sin[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def to_rotate_half(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of a q or k projection [heads · d, D] from interleaved pairs (2j, 2j+1) to pairs (j, j + d/2).

    Meta's original code, llama2.c and GGUF files interleave the pairs; Hugging Face and planaria use halves.
    """
    rows, dim = weight.shape
    return weight.view(heads, rows // heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim)


def document_mask(tokens: Tensor, separator: int) -> Tensor:
    """Return the attention mask of tokens [B, T] in several documents: bool [B, 1, T, T], causal within a document.

    This is intra-document causal masking (arXiv 2402.13991). A separator is the first token of the next document, so
    every token is predicted from its own document alone: the first one from the separator, and the next separator from
    all of them. Positions need not restart, because rotary attention depends on their differences only.
    """
    return mask_of((tokens == separator).cumsum(-1))


def mask_of(document: Tensor) -> Tensor:
    """Return the attention mask of tokens with these numbers of documents [B, T]: bool [B, 1, T, T], causal within
    each."""
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def project_together(x: Tensor, *projections: nn.Module, channels: int = 1) -> Sequence[Tensor]:
    """Apply each projection to x [..., D] → [..., N / ``channels``, ``channels``]; in training on a GPU as one product.

    With one channel the last axis is dropped.
    """
    matrices = [projection.weight for projection in projections if type(projection) is Linear]
    if x.is_cuda and torch.is_grad_enabled() and len(matrices) == len(projections):
        return fused_projection(x, matrices, channels)
    return [split_heads(projection(x), channels) for projection in projections]


def split_heads(x: Tensor, channels: int) -> Tensor:
    """Return x [..., N] as [..., N / ``channels``, ``channels``]; unchanged with one channel."""
    return x if channels == 1 else x.view(*x.shape[:-1], -1, channels)


def fused_projection(x: Tensor, matrices: Sequence[Tensor], channels: int = 1) -> Sequence[Tensor]:
    """Return x [..., D] times each of the matrices [N, D], as one product, because small ones leave a GPU partly idle.

    Results are as in :func:`project_together`. The product is split between whole heads, not between numbers: the
    compiler then writes the gradients of all heads straight into the gradient of the product. The matrices stay
    separate parameters; concatenating them takes one pass, which their cast to bf16 takes anyway.
    """
    product = split_heads(F.linear(x, torch.cat(list(matrices))), channels)
    return torch.split(product, [len(matrix) // channels for matrix in matrices], -1 if channels == 1 else -2)


class KeyValueCache(NamedTuple):
    """A layer's key-value cache, made by :mod:`planaria.models.decode`."""

    keys: Tensor
    """[B, K, N, d]: the last T slots are for the tokens that are read now"""
    values: Tensor
    """[B, K, N, d], like ``keys``"""
    mask: Tensor | None
    """[B, 1, T, N], added to the scores: -inf hides a slot; None for a causal mask"""


class LayerFactory(Protocol):
    """Factory of a layer's matrices and norms, called in a fixed order."""

    def linear(self, inputs: int, outputs: int) -> nn.Module: ...

    def output(self, inputs: int, outputs: int) -> nn.Module:
        """Return a matrix that writes to the residual stream."""
        ...

    def norm(self, dim: int, eps: float) -> nn.Module: ...


class OwnParameters:
    """Parts with their own parameters."""

    linear = output = Linear
    norm = RMSNorm


class InSubspace:
    """Makes the modules of layers whose outputs to the residual stream stay in a subspace."""

    linear, norm = Linear, RMSNorm

    def __init__(self, space: Subspace) -> None:
        self.space = space

    def output(self, inputs: int, outputs: int) -> nn.Module:
        return OutputProjection(inputs, self.space)


class Attention(nn.Module):
    """Causal self-attention; H / K query heads share one key/value head (arXiv 2305.13245)."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv = config.kv
        self.head_dim = config.head_dim
        self.q_proj = factory.linear(config.dim, config.heads * config.head_dim)
        self.k_proj = factory.linear(config.dim, config.kv * config.head_dim)
        self.v_proj = factory.linear(config.dim, config.kv * config.head_dim)
        self.o_proj = factory.output(config.heads * config.head_dim, config.dim)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: KeyValueCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] → [B, T, D]; tables [T, 1, d] or [B, T, 1, d]. ``past`` is updated in place.

        ``mask`` [B, 1, T, T] is true where a token attends to another; by default attention is causal.
        """
        batch, length, _ = x.shape
        q, k, v = project_together(x, self.q_proj, self.k_proj, self.v_proj, channels=self.head_dim)
        q = rotate(q, cos, sin).transpose(1, 2)
        k = rotate(k, cos, sin).transpose(1, 2)
        v = v.transpose(1, 2)
        if past is not None:
            past.keys[:, :, -length:] = k
            past.values[:, :, -length:] = v
            k, v, mask = past
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.kv < self.heads
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (arXiv 2002.05202, eq. 6)."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.gate_proj = factory.linear(config.dim, config.hidden)
        self.up_proj = factory.linear(config.dim, config.hidden)
        self.down_proj = factory.output(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project_together(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


def matrix_numbers(config: ModelConfig) -> int:
    """Return the number of stored elements in all matrices of one decoder layer."""
    read = config.head_dim * (config.heads + 2 * config.kv) + 2 * config.hidden
    return config.dim * read + config.written * (config.head_dim * config.heads + config.hidden)


class DecoderLayer(nn.Module):
    """One residual block: attention, then feed-forward, each behind its norm."""

    def __init__(self, config: ModelConfig, factory: LayerFactory | None = None) -> None:
        """:param factory: makes its parts; by default each has its own parameters, or all share the layer's array."""
        super().__init__()
        if factory is None and config.share > 1:
            self.shared = nn.Parameter(torch.empty(stored_count(matrix_numbers(config), config.share)))
            factory = MatrixCut(self, RMSNorm)
        factory = factory or (OwnParameters() if config.subspace is None else InSubspace(Subspace.of(config)))
        self.input_layernorm = factory.norm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, factory)
        self.post_attention_layernorm = factory.norm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config, factory)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: KeyValueCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] → [B, T, D]; tables, ``past`` and ``mask`` as in :class:`Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def run_layers(
    layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor, recompute: bool, mask: Tensor | None = None
) -> Tensor:
    """Pass hidden states [B, T, D] through decoder layers; tables [context, 1, d], ``mask`` as in ``Attention``.

    With ``recompute``, only a layer's input is kept and its forward pass is repeated in the backward pass (arXiv
    1604.06174): the memory of one layer instead of all, for a third more computation.
    """
    cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
    for layer in layers:
        if recompute and torch.is_grad_enabled():
            x = checkpoint(layer, x, cos, sin, None, mask, use_reentrant=False, preserve_rng_state=False)
        else:
            x = layer(x, cos, sin, None, mask)
    return x
