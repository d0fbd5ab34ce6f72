"""Messages that cannot be meant: numbers that are none, another size, another type."""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.exchange.attacks.base import MessageAttack, Scene, VectorAttack


class Nan(MessageAttack):
    """Not a single number in it; where a message is bytes, all of which may be meant, one too few of them."""

    def spoilt(self, honest: Tensor) -> Tensor:
        return torch.full_like(honest, torch.nan) if honest.is_floating_point() else honest.flatten()[:-1]


class Inf(MessageAttack):
    """All numbers infinite; where a message is bytes, all bits of it set, so that no scale in it is a number."""

    def spoilt(self, honest: Tensor) -> Tensor:
        return torch.full_like(honest, torch.inf if honest.is_floating_point() else 255)


class Huge(VectorAttack):
    """1e38 everywhere: a number, and two of the same sign have no finite sum of squares in fp32."""

    def vector(self, scene: Scene) -> Tensor:
        return torch.full_like(scene.own, 1e38)


class WrongSize(MessageAttack):
    """One number too few."""

    def spoilt(self, honest: Tensor) -> Tensor:
        return honest.flatten()[:-1]


class WrongType(MessageAttack):
    """The same bytes, said to be of another type: bytes, or bfloat16 where they were bytes."""

    def spoilt(self, honest: Tensor) -> Tensor:
        data = honest.contiguous().flatten().view(torch.uint8)
        return data[: len(data) // 2 * 2].view(torch.bfloat16) if honest.dtype == torch.uint8 else data
