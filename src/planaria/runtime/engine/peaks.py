"""How much memory this process has held at most."""

from __future__ import annotations

import resource
import sys
from typing import NamedTuple

import torch

_UNIT = 1 if sys.platform == "darwin" else 1024
"""bytes in which the system counts"""


class Peaks(NamedTuple):
    """Bytes, as ``record.telemetry.Worked`` tells them."""

    peak_bytes: int
    """resident memory, pages shared with other processes included"""
    device_peak_bytes: int
    """tensors on the CUDA device; 0 while none is in use"""


def peaks() -> Peaks:
    """Since the process began. Takes microseconds: one system call, and torch's own count."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.max_memory_allocated() if used else 0
    return Peaks(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT, device)
