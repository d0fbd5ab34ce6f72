"""A donor's state as one flat tensor, the way it travels to the worker that rebuilds a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from planaria.recovery.base import Donor

_NORMS = 2


def pack_donor(donor: Donor) -> Tensor:
    """``[2 + parameters]`` fp32 on the CPU: both gradient norms (NaN: none yet), then the weights in order of name."""
    norms = [math.nan if norm is None else norm for norm in (donor.grad_norm, donor.clipped_norm)]
    weights = [donor.weights[name].flatten() for name in sorted(donor.weights)]
    return torch.cat([torch.tensor(norms, device=weights[0].device), *weights]).cpu()


def unpack_donor(flat: Tensor, like: Mapping[str, Tensor]) -> Donor:
    """The donor that :func:`pack_donor` packed, for a stage with parameters shaped ``like``.

    :raises ValueError: when the length does not fit.
    """
    expected = _NORMS + sum(tensor.numel() for tensor in like.values())
    if flat.shape != (expected,) or flat.dtype != torch.float32:
        raise ValueError(f"a donor's state is {expected} fp32 numbers here, not {flat.dtype} {list(flat.shape)}")
    names = sorted(like)
    pieces = torch.split(flat[_NORMS:], [like[name].numel() for name in names])
    weights = {name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)}
    norms = [None if math.isnan(norm) else norm for norm in flat[:_NORMS].tolist()]
    return Donor(weights, norms[0], norms[1])
