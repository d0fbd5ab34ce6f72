"""Random numbers for stochastic rounding: equal for equal visits on every machine, device and number of threads.

⌊x + u⌋ with u uniform in [0, 1) has the mean x. The numbers u are slices of one fixed table, each row of a message at
an offset that is a hash of the visit and the row. Both come from integer arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from planaria.pipeline.codecs.base import Leg, Visit

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
        state = _mixed((state ^ (number & _MASK)) + _GOLDEN & _MASK)
    return [_mixed(state + (row + 1) * _GOLDEN & _MASK) % (_TABLE - ROW) for row in range(rows)]


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


def _mixed(z: int) -> int:
    """Return the output of splitmix64 for the state ``z``."""
    z = (z ^ (z >> 30)) * _FIRST & _MASK
    z = (z ^ (z >> 27)) * _SECOND & _MASK
    return z ^ (z >> 31)
