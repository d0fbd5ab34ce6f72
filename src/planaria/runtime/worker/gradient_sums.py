"""Sums of gradients: over a stage's shares, and over its passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def sum_shares(shares: Iterable[Tensor]) -> Tensor:
    """Add a stage's shares (:meth:`StageRunner.gradient_sums`), in order, into the first, and return it."""
    following = iter(shares)
    total = next(following)
    for share in following:
        total += share
    return total


def detach_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Detach and return existing gradients; after a pass, :func:`add_new_gradients` adds the new ones.

    On a GPU this takes two kernels for all parameters, while autograd would launch one for each.
    """
    sums = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in sums:
        parameter.grad = None
    return sums


def add_new_gradients(sums: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Add a pass's gradients to the detached ones, and restore these."""
    new = [(total, parameter.grad) for parameter, total in sums if parameter.grad is not None]
    if new:
        torch._foreach_add_(*map(list, zip(*new, strict=True)))
    for parameter, total in sums:
        parameter.grad = total
