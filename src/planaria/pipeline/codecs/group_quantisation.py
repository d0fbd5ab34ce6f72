"""Integers of few bits in groups that share a scale ("absmax groups").

For a group g of G consecutive numbers, s = max|g| / (2ᵇ⁻¹ − 1) and q = round(g / s), so the code of a number has b bits
and the decoded number is s·q. Scales are bfloat16, whose range is that of fp32: gradients of a mean over many tokens
are smaller than fp16 allows. They are rounded away from zero, so that no code overflows.

Activations are rounded to the nearest level. Gradients are rounded at random with the right mean, since the nearest
level would bias them. Codes are packed without gaps by ``common/quantisation.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from planaria.common.quantisation import pack, unpack
from planaria.common.tensors import all_finite
from planaria.pipeline.codecs.base import Leg, Shape, Visit, WireCodec

ROW = 1 << 16
"""numbers of a message that share an offset"""
_TABLE = 1 << 20
_LEVELS = 1 << 12
"""distinct values of u, the midpoints of equal intervals: x + u stays below the next whole number in fp32"""
_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""constants of splitmix64 (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195)"""


def offsets(visit: Visit, leg: Leg, rows: int) -> list[int]:
    """Return the offset in the table of each row of a message."""
    state = 0
    for number in (*visit, leg == "backward"):
        state = _splitmix64((state ^ (number & _MASK)) + _GOLDEN & _MASK)
    return [_splitmix64(state + (row + 1) * _GOLDEN & _MASK) % (_TABLE - ROW) for row in range(rows)]


@cache
def table(device: torch.device) -> Tensor:
    """Return the table of u, fp32 [2²⁰]."""
    with np.errstate(over="ignore"):
        z = np.arange(1, _TABLE + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    level = ((z ^ (z >> np.uint64(31))) >> np.uint64(52)).astype(np.float32)
    return torch.from_numpy((level + np.float32(0.5)) / np.float32(_LEVELS)).to(device)


def uniform(starts: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Return u for ``count`` numbers in rows with these offsets, fp32 [count]."""
    if len(starts) == 1:
        return table(device)[starts[0] : starts[0] + count]
    rows = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(ROW, device=device)
    return table(device)[rows.view(-1)[:count]]


def _splitmix64(z: int) -> int:
    z = (z ^ (z >> 30)) * _FIRST & _MASK
    z = (z ^ (z >> 27)) * _SECOND & _MASK
    return z ^ (z >> 31)


Bits = Annotated[int, Field(ge=2, le=8)]
_SCALE_BYTES = 2
_MIN_SCALE = 2.0**-126
"""groups whose scale would be smaller are sent as zeros"""


class GroupQuantiser(WireCodec):
    """Integers of few bits in groups that share a bfloat16 scale."""

    forward: Bits = 6
    """bits of a number of an activation"""
    backward: Bits = 4
    """bits of a number of a gradient"""
    group: Literal[32, 64, 128, 256] = 64
    """numbers that share a scale"""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """rounding of gradients; activations are always rounded to the nearest level"""

    @property
    def random(self) -> bool:
        return self.rounding == "stochastic"

    def layout(self, shape: Shape, leg: Leg) -> tuple[tuple[int, ...], torch.dtype]:
        return (self._groups(shape) * (_SCALE_BYTES + self.group * self._bits(leg) // 8),), torch.uint8

    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1).float()
        if missing := -len(flat) % self.group:
            flat = torch.nn.functional.pad(flat, (0, missing))
        starts = offsets(visit, leg, -(-len(flat) // ROW)) if leg == "backward" and self.random else None
        if flat.is_cuda:  # one kernel per operation
            scales, codes = quantise(flat.view(-1, self.group), self._bits(leg), starts)
        else:  # parts that stay in the processor's cache
            scales = torch.empty(len(flat) // self.group, dtype=torch.bfloat16)
            codes = torch.empty(len(flat), dtype=torch.uint8)
            for row, start in enumerate(range(0, len(flat), ROW)):
                chunk = flat[start : start + ROW].view(-1, self.group)
                at = start // self.group
                quantised = quantise(chunk, self._bits(leg), None if starts is None else starts[row : row + 1])
                scales[at : at + len(chunk)], codes[start : start + ROW] = quantised
        return torch.cat([scales.view(torch.uint8), pack(codes, self._bits(leg))])

    def decode(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor:
        scales = self._scales(message, shape).float().unsqueeze(1)
        codes = unpack(message[len(scales) * _SCALE_BYTES :], self._bits(leg)).view(-1, self.group)
        numbers = torch.empty(codes.shape, device=message.device)
        step = len(codes) if message.is_cuda else ROW // self.group
        for start in range(0, len(codes), step):
            rows = numbers[start : start + step]
            rows.copy_(codes[start : start + step]).sub_(_max_level(self._bits(leg))).mul_(scales[start : start + step])
        return numbers.view(-1)[: math.prod(shape)].view(tuple(shape))

    def invalid_reason(self, message: Tensor, shape: Shape, leg: Leg) -> str:
        scales = self._scales(message, shape)
        if not all_finite(scales):
            return "a scale is not finite"
        return "a scale is negative" if bool((scales < 0).any()) else ""

    def magnitude(self, message: Tensor, shape: Shape, leg: Leg) -> float:
        return float(self._scales(message, shape).max())

    def _bits(self, leg: Leg) -> int:
        return self.forward if leg == "forward" else self.backward

    def _groups(self, shape: Shape) -> int:
        return -(-math.prod(shape) // self.group)

    def _scales(self, message: Tensor, shape: Shape) -> Tensor:
        return message[: self._groups(shape) * _SCALE_BYTES].view(torch.bfloat16)


def quantise(grouped: Tensor, bits: int, starts: list[int] | None) -> tuple[Tensor, Tensor]:
    """Return the scales, bfloat16 [groups], and the codes q + 2ᵇ⁻¹ − 1, uint8 [n], of ``grouped`` [groups, G].

    ``starts``: offsets for random rounding, or None for the nearest level.
    """
    highest = _max_level(bits)
    largest = torch.maximum(grouped.amax(1), -grouped.amin(1))
    scales = round_up_bfloat16(largest / highest)
    inverse = torch.where(scales < _MIN_SCALE, 0.0, 1.0 / scales)
    codes = grouped * inverse.unsqueeze(1)
    if starts is None:
        codes += highest + 0.5
    else:
        codes += uniform(starts, grouped.numel(), grouped.device).view_as(codes)
        codes += highest
    return scales.bfloat16(), codes.view(-1).to(torch.uint8)  # truncates


def round_up_bfloat16(numbers: Tensor) -> Tensor:
    """Return non-negative fp32 numbers rounded up to numbers of bfloat16, in fp32; 0 below its normal range."""
    up = ((numbers.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    return torch.where(numbers < _MIN_SCALE, 0.0, torch.where(numbers.isnan(), numbers, up))


def _max_level(bits: int) -> int:
    """Return the largest q."""
    return (1 << (bits - 1)) - 1
