"""A stage's state as one flat tensor, the way it travels between workers.

Little endian: the header's length (4 bytes), the header as JSON, zeros up to a multiple of 64 bytes, then all tensors
as fp32, one after the other. No pickle; every size that a header claims is checked against the bytes that are there.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from planaria.model.state import StageState

HEADROOM = 1 << 20
"""more than any header takes"""
_ALIGNED = 64


class PackingError(ValueError):
    """Bytes that should be a stage's state are not; the message says why."""


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    weights: list[tuple[str, list[Annotated[int, Field(ge=1, lt=1 << 48)]]]]
    """name and shape, in the order of the bytes"""
    moments: list[str]
    """whose first and second moments follow, in this order"""
    outer: list[tuple[str, list[Annotated[int, Field(ge=1, lt=1 << 48)]]]] = []
    """name and shape of what replicas keep from round to round, which comes last"""
    updates: Annotated[int, Field(ge=0, lt=1 << 48)]
    lr_scale: float
    grad_norm: float | None
    clipped_norm: float | None


def pack(state: StageState) -> Tensor:
    """A copy of ``state`` (without its generator) as a uint8 tensor on the CPU."""
    header = _Header(
        weights=[(name, list(tensor.shape)) for name, tensor in state.weights.items()],
        moments=list(state.moments),
        outer=[(name, list(tensor.shape)) for name, tensor in state.outer.items()],
        updates=state.updates,
        lr_scale=state.lr_scale,
        grad_norm=state.grad_norm,
        clipped_norm=state.clipped_norm,
    )
    text = header.model_dump_json().encode()
    start = _begin(len(text))
    head = bytearray(start)
    head[:4], head[4 : 4 + len(text)] = len(text).to_bytes(4, "little"), text
    moments = (tensor for pair in state.moments.values() for tensor in pair)
    tensors = [*state.weights.values(), *moments, *state.outer.values()]
    raw = [tensor.detach().to(torch.float32).contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *(piece.cpu() for piece in raw)])


def unpack(flat: Tensor) -> StageState:
    """The state that :func:`pack` packed; its tensors share the memory of ``flat``.

    :raises PackingError: when the bytes are not one.
    """
    if flat.dtype != torch.uint8 or flat.ndim != 1 or len(flat) < _ALIGNED:
        raise PackingError(f"a packed state is a row of bytes, not {flat.dtype} {list(flat.shape)}")
    length = int.from_bytes(flat[:4].numpy().tobytes(), "little")
    if length > min(len(flat) - 4, HEADROOM):
        raise PackingError(f"a packed state of {len(flat)} bytes cannot have a header of {length}")
    try:
        header = _Header.model_validate_json(flat[4 : 4 + length].numpy().tobytes())
    except ValidationError as error:
        raise PackingError(f"header of a packed state: {error.errors()[0]['msg']}") from None
    shapes, outer = dict(header.weights), dict(header.outer)
    moving = set(header.moments)
    twice = len(shapes) < len(header.weights) or len(moving) < len(header.moments) or len(outer) < len(header.outer)
    if twice or not shapes.keys() >= moving:
        raise PackingError("a packed state names a parameter twice, or moments of one that it lacks")
    order = [shapes[name] for name in (*shapes, *(name for name in header.moments for _ in range(2)))]
    order += outer.values()
    sizes = [math.prod(shape) for shape in order]
    start = _begin(length)
    if len(flat) != start + 4 * sum(sizes):
        raise PackingError(f"a packed state announces {start + 4 * sum(sizes)} bytes and has {len(flat)}")
    pieces = torch.split(flat[start:].view(torch.float32), sizes) if sizes else ()
    tensors = [piece.view(shape) for piece, shape in zip(pieces, order, strict=True)]
    weights, moments = tensors[: len(shapes)], iter(tensors[len(shapes) :])
    return StageState(
        dict(zip(shapes, weights, strict=True)),
        {name: (next(moments), next(moments)) for name in header.moments},
        header.updates,
        header.lr_scale,
        header.grad_norm,
        header.clipped_norm,
        outer=dict(zip(outer, tensors[len(tensors) - len(outer) :], strict=True)),
    )


def _begin(header: int) -> int:
    """Where the tensors begin after a header of so many bytes."""
    return -(-(4 + header) // _ALIGNED) * _ALIGNED
