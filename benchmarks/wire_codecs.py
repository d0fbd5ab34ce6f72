"""Codecs between stages that are no part of planaria: groups of few bits after a Hadamard rotation, and false scales.

``pipeline.wire = { kind = "benchmarks.wire_codecs:RotatedGroups", rotate = "gated" }`` selects it, with
``--allow-code``. A rotation spreads an outlier over the numbers that are rotated with it. ``gated`` rotates only groups
that a single outlier dominates, as TAH-Quant does (arXiv 2506.01352). Its zero points and 3-bit groups are left out.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from planaria.common.errors import UserError
from planaria.common.quantisation import pack, unpack
from planaria.config.schema import ModelConfig
from planaria.pipeline.codecs.base import Leg, Shape, Visit
from planaria.pipeline.codecs.group_quantisation import Bits, GroupQuantiser


def hadamard(x: Tensor) -> Tensor:
    """Return H x / √n of x [..., n], where H is the Hadamard matrix and n a power of two; its own inverse.

    Sums are taken in pairs, in a fixed order, so results are equal on every machine.
    """
    shape, half = x.shape, 1
    while half < shape[-1]:
        even, odd = x.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        x, half = torch.stack([even + odd, even - odd], -2), 2 * half
    return x.reshape(shape) / math.sqrt(shape[-1])


class RotatedGroups(GroupQuantiser):
    """Groups of few bits; activations are rotated before rounding, gradients are not."""

    forward: Bits = 4
    backward: Bits = 6
    group: Literal[32, 64, 128, 256] = 32
    rotate: Literal["none", "whole", "gated"] = "gated"
    """none; whole: the whole width; gated: each group whose largest number exceeds ``ratio`` times its second"""
    ratio: Annotated[float, Field(ge=1)] = 2.0

    def for_model(self, model: ModelConfig) -> RotatedGroups:
        if self.rotate == "whole" and model.dim & (model.dim - 1):
            raise UserError(f"pipeline.wire: rotate = 'whole' needs a power of two; model.dim = {model.dim}")
        return self

    def layout(self, shape: Shape, leg: Leg) -> tuple[tuple[int, ...], torch.dtype]:
        (size,), dtype = super().layout(shape, leg)
        return (size + self._flag_bytes(shape, leg),), dtype

    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        if leg == "backward" or self.rotate == "none":
            return super().encode(x, leg, visit)
        if self.rotate == "whole":
            return super().encode(hadamard(x.float()), leg, visit)
        groups = self._grouped(x.float())
        largest = groups.abs().topk(2, dim=1).values
        flags = largest[:, 0] > self.ratio * largest[:, 1]
        rotated = torch.where(flags.unsqueeze(1), hadamard(groups), groups)
        padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8))
        return torch.cat([super().encode(rotated, leg, visit), pack(padded, 1)])

    def decode(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor:
        if not (flag_bytes := self._flag_bytes(shape, leg)):
            x = super().decode(message, shape, leg)
            return hadamard(x) if leg == "forward" and self.rotate == "whole" else x
        groups = self._grouped(super().decode(message[:-flag_bytes], shape, leg))
        flags = unpack(message[-flag_bytes:], 1).reshape(-1)[: len(groups)].bool()
        restored = torch.where(flags.unsqueeze(1), hadamard(groups), groups)
        return restored.view(-1)[: math.prod(shape)].view(tuple(shape))

    def _grouped(self, x: Tensor) -> Tensor:
        """Return x as [groups, group], padded with zeros."""
        return torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % self.group)).view(-1, self.group)

    def _flag_bytes(self, shape: Shape, leg: Leg) -> int:
        """Return the bytes that state which groups are rotated, one bit for each."""
        return -(-self._groups(shape) // 8) if leg == "forward" and self.rotate == "gated" else 0


class FalseScales(GroupQuantiser):
    """``6/4``, but the sender at ``hop`` multiplies the scales of its gradients, as a hostile member may."""

    factor: Annotated[float, Field(gt=0)] = 16.0
    hop: int = 2

    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        message = super().encode(x, leg, visit, ids)
        if leg == "backward" and visit.hop == self.hop:
            self._scales(message, x.shape).mul_(self.factor)
        return message
