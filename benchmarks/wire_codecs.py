"""Codecs between stages that are no part of planaria: rotated groups, projections with token ids, and false scales.

``pipeline.wire = { kind = "benchmarks.wire_codecs:RotatedGroups", rotate = "gated" }`` selects it, with
``--allow-code``. A rotation spreads an outlier over the numbers that are rotated with it. ``gated`` rotates only groups
that a single outlier dominates, as TAH-Quant does (arXiv 2506.01352). Its zero points and 3-bit groups are left out.

Hidden states of ``benchmarks.learned_projection`` with anchors end in the digits of their token ids, which
``AnchoredGroups`` sends as bytes.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from benchmarks.learned_projection import BASE, ID_DIGITS
from planaria.common.errors import UserError
from planaria.common.quantisation import pack, unpack
from planaria.config.schema import ModelConfig
from planaria.pipeline.codecs.base import Leg, Shape, Visit
from planaria.pipeline.codecs.group_quantisation import Bits, GroupQuantiser

PLACES = torch.tensor([BASE, 1])
"""values of an id's digits"""


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


class AnchoredGroups(GroupQuantiser):
    """Groups of few bits; the digits of token ids are sent exactly with activations, and not with gradients."""

    forward: Bits = 8
    group: Literal[32, 64, 128, 256] = 32
    _vocab: int = PrivateAttr(0)

    def for_model(self, model: ModelConfig) -> AnchoredGroups:
        made = self.model_copy()
        made._vocab = model.vocab
        return made

    def layout(self, shape: Shape, leg: Leg) -> tuple[tuple[int, ...], torch.dtype]:
        (size,), dtype = super().layout(_numbers(shape), leg)
        return (size + self._id_bytes(shape, leg),), dtype

    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        numbers = super().encode(x[..., :-ID_DIGITS], leg, visit)
        return numbers if leg == "backward" else torch.cat([numbers, x[..., -ID_DIGITS:].reshape(-1).byte()])

    def decode(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor:
        if leg == "backward":
            return torch.nn.functional.pad(super().decode(message, _numbers(shape), leg), (0, ID_DIGITS))
        digits = self._digits(message, shape)
        numbers = super().decode(message[: -digits.numel()], _numbers(shape), leg)
        return torch.cat([numbers, digits.float()], -1)

    def invalid_reason(self, message: Tensor, shape: Shape, leg: Leg) -> str:
        if leg == "forward" and int((self._digits(message, shape).long() @ PLACES).max()) >= self._vocab:
            return f"a token id exceeds the vocabulary of {self._vocab}"
        return super().invalid_reason(message, _numbers(shape), leg)

    def magnitude(self, message: Tensor, shape: Shape, leg: Leg) -> float:
        return super().magnitude(message, _numbers(shape), leg)

    def _digits(self, message: Tensor, shape: Shape) -> Tensor:
        """Return [B, T, 2]: the digits of the ids in an activation's message."""
        return message[-self._id_bytes(shape, "forward") :].view(*shape[:-1], ID_DIGITS)

    def _id_bytes(self, shape: Shape, leg: Leg) -> int:
        return ID_DIGITS * math.prod(shape[:-1]) if leg == "forward" else 0


def _numbers(shape: Shape) -> Shape:
    """Return the shape of a message's numbers without the digits of ids."""
    return (*shape[:-1], shape[-1] - ID_DIGITS)


class FalseScales(GroupQuantiser):
    """``6/4``, but the sender at ``hop`` multiplies the scales of its gradients, as a hostile member may."""

    factor: Annotated[float, Field(gt=0)] = 16.0
    hop: int = 2

    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        message = super().encode(x, leg, visit, ids)
        if leg == "backward" and visit.hop == self.hop:
            self._scales(message, x.shape).mul_(self.factor)
        return message
