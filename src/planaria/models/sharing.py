"""Matrices cut from one array: n weights are rotated copies of m stored numbers (arXiv 2310.11611).

The map is the paper's RANDOMFOLD, with a sign per copy: the weight at place j of all concatenated matrices is g(p) ·
ψ[(u(p) + r) mod m], where p = j div m is its copy and r = j mod m its place there. So a matrix is a few slices of ψ,
and every number of ψ stands for ⌊n/m⌋ or ⌈n/m⌉ weights. The map is the same for all layers, stages, replicas and runs,
and linear: a mean of arrays is the mean of their matrices, bit for bit.

Unlike the paper, weights are not scaled by layer: all matrices, and ψ, start with one standard deviation, so that
AdamW's learning rate is unchanged. The paper's scaling of gradients has no effect under AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PRIME = 2038074743
_A, _B, _C = 1103515245, 747796405, 362437
"""odd; part of the storage format, as is :data:`PRIME`"""


class Slice(NamedTuple):
    """Consecutive weights that are consecutive numbers."""

    begin: int
    """index of the first number in ψ"""
    length: int
    sign: int


def stored_count(count: int, share: int) -> int:
    """Return m, the number of stored numbers for ``count`` weights."""
    return -(-count // share)


@lru_cache(maxsize=4096)
def slices(stored: int, begin: int, count: int) -> tuple[Slice, ...]:
    """Return the slices of an array of ``stored`` numbers that hold ``count`` weights from offset ``begin`` on."""
    cut, end = [], begin + count
    while begin < end:
        copy, index = divmod(begin, stored)
        turned = (_A * copy * copy + _B * copy + _C) % PRIME
        at = (turned + index) % stored
        length = min(end - begin, stored - index, stored - at)
        cut.append(Slice(at, length, 1 if turned & 1 else -1))
        begin += length
    return tuple(cut)


def unfold(array: Tensor, begin: int, shape: tuple[int, ...]) -> Tensor:
    """Return the weights of ``shape`` from offset ``begin`` on, of ψ [m]."""
    cut = slices(array.numel(), begin, prod(shape))
    flat = torch.cat([array[at : at + length] if sign > 0 else -array[at : at + length] for at, length, sign in cut])
    return flat.view(shape)


def fold(gradient: Tensor, begin: int, total: Tensor) -> None:
    """Add the gradient of the weights from offset ``begin`` on to that of their numbers, ``total`` [m]."""
    flat, index = gradient.reshape(-1), 0
    for at, length, sign in slices(total.numel(), begin, flat.numel()):
        total[at : at + length].add_(flat[index : index + length], alpha=sign)
        index += length


class _Product(torch.autograd.Function):
    """x Wᵀ, with W unfolded again in each direction, so that no dense matrix outlives a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, array: Tensor, begin: int, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, array)
        ctx.begin, ctx.shape = begin, shape
        return F.linear(x, unfold(array, begin, shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, array = ctx.saved_tensors
        weight = unfold(array, ctx.begin, ctx.shape).to(grad.dtype)
        back = (grad @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        dense = grad.flatten(0, -2).T @ x.flatten(0, -2).to(grad.dtype)
        total = torch.zeros_like(array)
        fold(dense.to(array.dtype), ctx.begin, total)
        return back, total, None, None


class SharedLinear(nn.Module):
    """A matrix [outputs, inputs] without bias, from its holder's array ``shared``."""

    def __init__(self, holder: nn.Module, begin: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self._of = (holder,)  # in a tuple, or the holder would become a part of this module
        self.begin, self.shape = begin, (outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        out: Tensor = _Product.apply(x, self._of[0].shared, self.begin, self.shape)  # type: ignore[no-untyped-call]
        return out


class SharedNorm(nn.Module):
    """An RMSNorm whose gains are row ``row`` of its holder's ``gains``."""

    def __init__(self, holder: nn.Module, row: int, eps: float) -> None:
        super().__init__()
        self._of = (holder,)
        self.row = row
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        gains: Tensor = self._of[0].gains  # type: ignore[assignment]
        gain = gains[self.row]
        return F.rms_norm(x, gain.shape, gain, self.eps)


class MatrixCut:
    """Cuts consecutive matrices from the array of ``holder``; ``norm`` makes the norms."""

    def __init__(self, holder: nn.Module, norm: Callable[[int, float], nn.Module], begin: int = 0) -> None:
        self._holder = holder
        self.norm = norm
        self._begin = begin

    def linear(self, inputs: int, outputs: int) -> SharedLinear:
        linear = SharedLinear(self._holder, self._begin, inputs, outputs)
        self._begin += inputs * outputs
        return linear

    output = linear
