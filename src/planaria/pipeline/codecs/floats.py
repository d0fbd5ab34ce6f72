"""Floating-point types."""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.pipeline.codecs.base import Leg, Shape, Visit, WireCodec


class Fp32(WireCodec):
    """Every number in single precision: lossless."""

    def layout(self, shape: Shape, leg: Leg) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(shape), torch.float32

    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        return x.to(self.layout(x.shape, leg)[1])

    def decode(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor:
        return message


class Bf16(Fp32):
    """Every number rounded to bfloat16."""

    def layout(self, shape: Shape, leg: Leg) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(shape), torch.bfloat16
