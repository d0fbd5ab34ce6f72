"""Hidden states in the run's subspace (:mod:`planaria.models.subspace`): k numbers and a token id instead of D.

Forward: y = (x − F[id]) U and the ids; backward: g U. Nothing is lost before rounding, since every stage writes to the
subspace. A message holds the k numbers of each token, as bfloat16 or in groups, then the ids in 2 bytes each, little
endian, or 3 where the vocabulary needs them.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, PrivateAttr
from torch import Tensor

from planaria.config.bounds import Positive
from planaria.config.schema import ModelConfig
from planaria.models.subspace import Subspace
from planaria.pipeline.codecs.base import Leg, Shape, Visit, WireCodec, tensor_bytes
from planaria.pipeline.codecs.floats import Bf16
from planaria.pipeline.codecs.group_quantisation import GroupQuantiser

_ID_BYTES = 8
"""bytes of an int64"""


def _bits(bits: int) -> int:
    if not (2 <= bits <= 8 or bits == 16):
        raise ValueError("bits is 2 to 8, or 16 for bfloat16")
    return bits


Bits = Annotated[int, AfterValidator(_bits)]


class SubspaceCodec(WireCodec):
    """Send token ids and the coordinates of hidden states in a fixed subspace."""

    rank: Positive
    """k: dimensions of the subspace, at most model.dim"""
    forward: Bits = 8
    """bits of a number of an activation; 16: bfloat16"""
    backward: Bits = 4
    """bits of a number of a gradient, rounded at random; 16: bfloat16"""
    group: Literal[32, 64, 128, 256] = 32
    """numbers that share a scale"""
    _space: Subspace | None = PrivateAttr(None)

    def for_model(self, model: ModelConfig) -> SubspaceCodec:
        made = self.model_copy()
        made._space = Subspace.of(model)
        return made

    @property
    def random(self) -> bool:
        return self.backward != 16

    def layout(self, shape: Shape, leg: Leg) -> tuple[tuple[int, ...], torch.dtype]:
        return (self._number_bytes(shape, leg) + self._id_bytes(leg) * math.prod(shape[:2]),), torch.uint8

    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        numbers = self._inner_codec(leg).encode(self.space.coordinates(x, ids), leg, visit).view(-1).view(torch.uint8)
        if leg == "backward":
            return numbers
        assert ids is not None, "activations in a subspace need their token ids"
        id_bytes = ids.reshape(-1, 1).contiguous().view(torch.uint8)[:, : self._id_bytes(leg)]
        return torch.cat([numbers, id_bytes.reshape(-1)])

    def decode(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor:
        numbers = self._inner_codec(leg).decode(self._numbers(message, shape, leg), self._inner_shape(shape), leg)
        return self.space.restore(numbers, self.ids(message, shape, leg))

    def ids(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor | None:
        if leg == "backward":
            return None
        sent = message[self._number_bytes(shape, leg) :].view(-1, self._id_bytes(leg))
        id_bytes = torch.zeros(len(sent), _ID_BYTES, dtype=torch.uint8, device=message.device)
        id_bytes[:, : sent.shape[1]] = sent
        return id_bytes.view(torch.int64).view(tuple(shape[:2]))

    def invalid_reason(self, message: Tensor, shape: Shape, leg: Leg) -> str:
        ids = self.ids(message, shape, leg)
        if ids is not None and (largest := int(ids.max())) >= self.space.vocab:
            return f"token id {largest} of a vocabulary of {self.space.vocab}"
        numbers = self._numbers(message, shape, leg)
        return self._inner_codec(leg).invalid_reason(numbers, self._inner_shape(shape), leg)

    def magnitude(self, message: Tensor, shape: Shape, leg: Leg) -> float:
        return self._inner_codec(leg).magnitude(self._numbers(message, shape, leg), self._inner_shape(shape), leg)

    @property
    def space(self) -> Subspace:
        """The subspace of the model."""
        assert self._space is not None, "for_model sets a codec's subspace"
        return self._space

    def _inner_codec(self, leg: Leg) -> WireCodec:
        """Return the codec of the k numbers."""
        bits = self.forward if leg == "forward" else self.backward
        return Bf16() if bits == 16 else GroupQuantiser(forward=bits, backward=bits, group=self.group)

    def _inner_shape(self, shape: Shape) -> tuple[int, ...]:
        return (*shape[:2], self.rank)

    def _numbers(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor:
        """Return the inner codec's message of the k numbers."""
        inner_shape, dtype = self._inner_codec(leg).layout(self._inner_shape(shape), leg)
        return message[: self._number_bytes(shape, leg)].view(dtype).view(inner_shape)

    def _number_bytes(self, shape: Shape, leg: Leg) -> int:
        """Return the bytes of the k numbers of all tokens."""
        return tensor_bytes(*self._inner_codec(leg).layout(self._inner_shape(shape), leg))

    def _id_bytes(self, leg: Leg) -> int:
        if leg == "backward":
            return 0
        return 2 if self.space.vocab <= 1 << 16 else 3
