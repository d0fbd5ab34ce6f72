"""Quantisation to 8, 4 or 2 bits: groups that share a scale, packed into bytes.

Trained weights have outliers: gains of norms, channels ten times as large as the rest. In 8 and 4 bits the lowest level
is the largest number of a group, so that none is clipped, and zero is a level. Two bits have the four levels that suit
a normal variable best, none at zero; the largest number would take all the range.
"""

from __future__ import annotations

import math

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
    return torch.cat([scales.view(torch.uint8), pack(levels.view(-1, 8 // bits).T, bits)])


def decode(coded: Tensor, count: int, bits: int) -> Tensor:
    """Return the ``count`` numbers in ``coded``, fp32 [count].

    :raises ValueError: if the number of bytes does not match ``count``.
    """
    if coded.dtype != torch.uint8 or coded.shape != (coded_bytes(count, bits),):
        expected = coded_bytes(count, bits)
        raise ValueError(f"{count} numbers of {bits} bits are {expected} bytes, not {coded.dtype} {list(coded.shape)}")
    groups = -(-count // GROUP)
    scales = coded[: SCALE_BYTES * groups].clone().view(torch.float16).float()
    half = 1 << (bits - 1)
    levels = torch.stack(unpack(coded[SCALE_BYTES * groups :], bits).unbind(), 1)
    centred = levels.view(groups, GROUP).float() - (half - 0.5 if bits == 2 else half)
    return (centred * scales.unsqueeze(1)).view(-1)[:count]


def has_finite_scales(coded: Tensor, bits: int) -> bool:
    """Whether all scales in ``coded`` are finite."""
    groups = coded_count(len(coded), bits) // GROUP
    return all_finite(coded[: SCALE_BYTES * groups].clone().view(torch.float16))


def planes(bits: int) -> tuple[int, int]:
    """Return (P, B): P numbers of ``bits`` bits fill B bytes."""
    together = math.lcm(bits, 8)
    return together // bits, together // 8


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Return ``numbers`` (uint8, below 2ᵇ, as planes [P, n/P] or their concatenation [n]) without gaps: uint8 [n·b/8].

    The first B planes are the low b bits of B bytes per position. The others, b bits each, fill the remaining 8 - b
    bits of those bytes. Planes are contiguous, so that packing is a few passes over whole tensors.
    """
    count, size = planes(bits)
    stored = numbers.reshape(count, -1)
    if bits == 8:
        return stored[0]
    rest = stored[size].to(torch.int16)
    for index, plane in enumerate(stored[size + 1 :], 1):
        rest |= plane.to(torch.int16) << (bits * index)
    out = torch.empty(size, stored.shape[1], dtype=torch.uint8, device=numbers.device)
    for index in range(size):
        high = (rest >> ((8 - bits) * index)) & ((1 << (8 - bits)) - 1)
        torch.bitwise_or(stored[index], high.to(torch.uint8) << bits, out=out[index])
    return out.view(-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers in ``packed`` as planes, uint8 [P, n/P]."""
    count, size = planes(bits)
    stored = packed.view(size, -1)
    if bits == 8:
        return stored
    numbers = torch.empty(count, stored.shape[1], dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(stored, (1 << bits) - 1, out=numbers[:size])
    rest = (stored[0] >> bits).to(torch.int16)
    for index in range(1, size):
        rest |= (stored[index] >> bits).to(torch.int16) << ((8 - bits) * index)
    for index, plane in enumerate(numbers[size:]):
        plane.copy_((rest >> (bits * index)) & ((1 << bits) - 1))
    return numbers
