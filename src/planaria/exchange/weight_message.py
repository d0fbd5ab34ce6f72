"""Encode weights as one flat message; means and copies of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from planaria.exchange.base import Shapes, Updates, Weights
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.dense import UNCOMPRESSED


def flat(weights: Weights) -> Tensor:
    """Return all tensors concatenated in order of name: fp32 [n] on the CPU, in new memory."""
    return torch.cat([*pieces(weights), torch.empty(0)])


def pieces(weights: Weights) -> list[Tensor]:
    """Return the tensors flattened, in order of name; shares memory where possible."""
    return [weights[name].detach().float().cpu().reshape(-1) for name in sorted(weights)]


def unflatten(vector: Tensor, like: Weights) -> dict[str, Tensor]:
    """Return the tensors of a flat vector, fp32, with the names, shapes and devices of ``like``; shares memory."""
    shapes = {name: like[name].shape for name in sorted(like)}
    pairs = zip(shapes.items(), torch.split(vector, [shape.numel() for shape in shapes.values()]), strict=True)
    return {name: piece.view(shape).to(like[name].device) for (name, shape), piece in pairs}


def pack(weights: Weights, codec: Compressor = UNCOMPRESSED) -> Tensor:
    """Return weights as a message on the CPU."""
    return codec.encode(flat(weights))


def unpack(message: Tensor | None, like: Weights, codec: Compressor = UNCOMPRESSED, draw: int = 0) -> dict[str, Tensor]:
    """Return the decoded weights, fp32, with the names, shapes and devices of ``like``.

    :raises ValueError: if the message has the wrong size or dtype.
    """
    if message is None:
        raise ValueError("an update lacks a required part")
    return unflatten(codec.decode(message, sum(tensor.numel() for tensor in like.values()), draw), like)


def packed_bytes(shapes: Shapes) -> int:
    """Return the bytes of :func:`pack` for tensors of these shapes, uncompressed."""
    return UNCOMPRESSED.bytes(sum(shape.numel() for shape in shapes.values()))


def rms_spread(updates: Updates, codec: Compressor, draw: int = 0) -> float:
    """Return the RMS distance of the members' values from their mean, over members and numbers; 0 for one member.

    Uses n − 1 in the denominator, so that it estimates the spread of all replicas.
    """
    sent = []
    for update in updates.values():
        if update.blocking is None:
            return 0.0
        # The padding of the last coded group is zero in every message.
        blocking = codec.decode(update.blocking, codec.count(update.blocking), draw)
        sent.append(blocking if update.prefetched is None else blocking[: len(update.prefetched)] + update.prefetched)
    if len(sent) < 2 or not len(sent[0]):
        return 0.0
    stacked = torch.stack(sent)
    return math.sqrt(float((stacked - stacked.mean(dim=0)).square().sum()) / ((len(sent) - 1) * len(sent[0])))


def slow_copy(weights: Weights) -> dict[str, Tensor]:
    """Return an fp32 copy that shares no memory."""
    return {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in weights.items()}


def fast_copy(slow: Weights, like: Weights) -> dict[str, Tensor]:
    """Return a copy of ``slow`` with the dtypes of ``like``; shares no memory."""
    return {name: tensor.to(like[name].dtype, copy=True) for name, tensor in slow.items()}


def zeros(like: Weights) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in like.items()}


def consensus(of: Sequence[Weights]) -> dict[str, Tensor]:
    """Return the mean of the replicas' fast weights, in fp32, by parameter."""
    return {name: torch.stack([weights[name].float() for weights in of]).mean(dim=0) for name in of[0]}
