"""Quantisation to 8, 4 or 2 bits: groups that share a scale, packed into bytes.

Trained weights have outliers: gains of norms, channels ten times as large as the rest. In 8 and 4 bits the lowest level
is the largest number of a group, so that none is clipped, and zero is a level. Two bits have the four levels that suit
a normal variable best, none at zero; the largest number would take all the range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.common.tensors import all_finite

GROUP = 128
"""numbers that share one scale"""
SCALE_BYTES = 2
SMALLEST, LARGEST = 2.0**-24, 65504.0
"""range of fp16 scales; gradients of a large model need subnormal ones"""
NORMAL_STEP = 0.9957
"""spacing of four levels, in standard deviations, that suits a normal variable best (Max 1960, doi
10.1109/TIT.1960.1057548, table 2)"""


def coded_bytes(count: int, bits: int) -> int:
    """Return the bytes that :func:`encode` makes of ``count`` numbers."""
    groups = -(-count // GROUP)
    return groups * (SCALE_BYTES + GROUP * bits // 8)


def coded_count(size: int, bits: int) -> int:
    """Return how many numbers ``size`` bytes hold, padding of the last group included."""
    return size // (SCALE_BYTES + GROUP * bits // 8) * GROUP


def level_spacing(grouped: Tensor, count: int, bits: int) -> Tensor:
    """Return the level spacing for each row of ``grouped`` [groups, 128], fp32 [groups]; zeros follow ``count``
    numbers.

    2 bits: the root mean square times ``NORMAL_STEP``. 8 and 4 bits: the number of largest magnitude over the lowest
    level, −2^(bits − 1). The lowest level has no opposite, so a number of nearly that magnitude and the other sign may
    be off by a whole step, all others by half a step.
    """
    if bits > 2:
        low, high = grouped.amin(1), grouped.amax(1)  # many times as fast as aminmax
        return torch.where(high > -low, -high, -low) / (1 << (bits - 1))
    filled = torch.full((len(grouped),), GROUP, device=grouped.device)
    filled[-1:] -= -count % GROUP  # padding would shrink the step of the last group
    return grouped.square().sum(1).div(filled).sqrt() * NORMAL_STEP


def encode(x: Tensor, bits: int) -> Tensor:
    """Return x [n] as uint8: one fp16 scale per group of 128, then the levels, 8 / ``bits`` of them per byte.

    The scale is the group's :func:`level_spacing` in fp16. Levels are 0, ±1, ±2, … steps; with 2 bits ±½ and ±1½.
    """
    grouped = torch.nn.functional.pad(x.float(), (0, -len(x) % GROUP)).view(-1, GROUP)
    exact, half = level_spacing(grouped, len(x), bits), 1 << (bits - 1)
    scales = exact.abs().clamp_(SMALLEST, LARGEST).copysign_(exact).half()
    relative = grouped / scales.float().unsqueeze(1)
    if bits > 2:
        relative += 0.5  # levels are whole steps, so floor takes the nearest
    levels = relative.floor_().clamp_(-half, half - 1).add_(half).to(torch.uint8)
    packed = levels.view(-1, 8 // bits)
    byte = packed[:, 0].clone()
    for index in range(1, 8 // bits):
        byte |= packed[:, index] << (bits * index)
    return torch.cat([scales.view(torch.uint8), byte])


def decode(coded: Tensor, count: int, bits: int) -> Tensor:
    """Return the ``count`` numbers in ``coded``, fp32 [count].

    :raises ValueError: if the number of bytes does not match ``count``.
    """
    if coded.dtype != torch.uint8 or coded.shape != (coded_bytes(count, bits),):
        expected = coded_bytes(count, bits)
        raise ValueError(f"{count} numbers of {bits} bits are {expected} bytes, not {coded.dtype} {list(coded.shape)}")
    groups = -(-count // GROUP)
    scales = coded[: SCALE_BYTES * groups].clone().view(torch.float16).float()
    byte = coded[SCALE_BYTES * groups :]
    mask = (1 << bits) - 1
    half = 1 << (bits - 1)
    levels = torch.stack([(byte >> (bits * index)) & mask for index in range(8 // bits)], 1)
    centred = levels.view(groups, GROUP).float() - (half - 0.5 if bits == 2 else half)
    return (centred * scales.unsqueeze(1)).view(-1)[:count]


def has_finite_scales(coded: Tensor, bits: int) -> bool:
    """Whether all scales in ``coded`` are finite."""
    groups = coded_count(len(coded), bits) // GROUP
    return all_finite(coded[: SCALE_BYTES * groups].clone().view(torch.float16))
