"""Numbers in 8, 4 or 2 bits each: groups that share a scale, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
"""numbers that share one scale"""
SCALE_BYTES = 2
STEPS = {8: 0.0308, 4: 0.3352, 2: 0.9957}
"""spacing of the 2^bits levels, in standard deviations, that serves a normal variable best (Max 1960,
doi 10.1109/TIT.1960.1057548, table 2; 8 bits by the same criterion)"""


def coded_bytes(count: int, bits: int) -> int:
    """Bytes that :func:`encode` makes of ``count`` numbers."""
    groups = -(-count // GROUP)
    return groups * (SCALE_BYTES + GROUP * bits // 8)


def coded_count(size: int, bits: int) -> int:
    """Numbers that so many bytes hold, those that fill up the last group included."""
    return size // (SCALE_BYTES + GROUP * bits // 8) * GROUP


def encode(x: Tensor, bits: int) -> Tensor:
    """x [n] as uint8: one fp16 scale for each group of 128, then the levels, 8 / ``bits`` of them a byte.

    Levels lie at ±½, ±1½, … steps; the step is its group's root mean square times ``STEPS[bits]``.
    """
    grouped = torch.nn.functional.pad(x.float(), (0, -len(x) % GROUP)).view(-1, GROUP)
    finite = torch.finfo(torch.float16)
    filled = torch.full((len(grouped),), GROUP)
    filled[-1:] -= -len(x) % GROUP  # zeros that only fill the last group up would shrink its scale
    scales = (grouped.square().sum(1).div(filled).sqrt() * STEPS[bits]).clamp(finite.tiny, finite.max).half()
    half = 1 << (bits - 1)
    levels = (grouped / scales.float().unsqueeze(1)).floor_().clamp_(-half, half - 1).add_(half).to(torch.uint8)
    packed = levels.view(-1, 8 // bits)
    byte = packed[:, 0].clone()
    for place in range(1, 8 // bits):
        byte |= packed[:, place] << (bits * place)
    return torch.cat([scales.view(torch.uint8), byte])


def decode(coded: Tensor, count: int, bits: int) -> Tensor:
    """The ``count`` numbers that ``coded`` stands for, fp32 [count].

    :raises ValueError: when the bytes are not as many as ``count`` numbers take.
    """
    if coded.dtype != torch.uint8 or coded.shape != (coded_bytes(count, bits),):
        expected = coded_bytes(count, bits)
        raise ValueError(f"{count} numbers of {bits} bits are {expected} bytes, not {coded.dtype} {list(coded.shape)}")
    groups = -(-count // GROUP)
    scales = coded[: SCALE_BYTES * groups].clone().view(torch.float16).float()
    byte, mask, half = coded[SCALE_BYTES * groups :], (1 << bits) - 1, 1 << (bits - 1)
    levels = torch.stack([(byte >> (bits * place)) & mask for place in range(8 // bits)], 1)
    centred = levels.view(groups, GROUP).float() - (half - 0.5)
    return (centred * scales.unsqueeze(1)).view(-1)[:count]


def has_finite_scales(coded: Tensor, bits: int) -> bool:
    """Does everything that ``coded`` may stand for have a size?"""
    groups = coded_count(len(coded), bits) // GROUP
    return bool(torch.isfinite(coded[: SCALE_BYTES * groups].clone().view(torch.float16)).all())
