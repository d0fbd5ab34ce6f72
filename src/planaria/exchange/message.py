"""Weights as one flat message and back: in full, in half precision, or in 8 or 4 bits each."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from planaria.exchange.base import Offer, Parts, Shapes, Weights
from planaria.model.quantise import coded_bytes, coded_count, decode, encode, has_finite_scales

_PLAIN = {32: torch.float32, 16: torch.float16}


def pack(weights: Weights, bits: int = 32) -> Tensor:
    """All tensors end to end in order of name, on the CPU: fp32, fp16 (clamped to its range) or uint8."""
    pieces = [weights[name].detach().float().cpu().reshape(-1) for name in sorted(weights)]
    vector = torch.cat([*pieces, torch.empty(0)])
    if bits == 16:
        largest = torch.finfo(torch.float16).max
        return vector.clamp_(-largest, largest).half()
    return vector if bits == 32 else encode(vector, bits)


def unpack(message: Tensor | None, like: Weights, bits: int = 32) -> dict[str, Tensor]:
    """What :func:`pack` packed, fp32, with the names, shapes and devices of ``like``.

    :raises ValueError: when the message has another size or type.
    """
    if message is None:
        raise ValueError("an offer lacks a part that it must have")
    shapes = {name: like[name].shape for name in sorted(like)}
    count = sum(shape.numel() for shape in shapes.values())
    if bits in _PLAIN and (message.dtype != _PLAIN[bits] or message.shape != (count,)):
        raise ValueError(f"{count} numbers of {bits} bits are not {message.dtype} {list(message.shape)}")
    vector = message.float() if bits in _PLAIN else decode(message, count, bits)
    pieces = torch.split(vector, [shape.numel() for shape in shapes.values()])
    named = zip(shapes.items(), pieces, strict=True)
    return {name: piece.view(shape).to(like[name].device) for (name, shape), piece in named}


def packed_bytes(shapes: Shapes, bits: int = 32) -> int:
    """Bytes that :func:`pack` makes of tensors of these shapes."""
    count = sum(shape.numel() for shape in shapes.values())
    return count * bits // 8 if bits in _PLAIN else coded_bytes(count, bits)


def flaw(message: Tensor, like: Tensor, bits: int) -> str:
    """Why a message of ``bits`` is none that could be meant, beside one that is; empty if nothing is wrong with it.

    Size and type must be the same, and every number, or every scale of coded ones, finite.
    """
    if (message.dtype, message.shape) != (like.dtype, like.shape):
        return f"{message.dtype} {list(message.shape)}, not {like.dtype} {list(like.shape)}"
    sound = bool(torch.isfinite(message).all()) if bits in _PLAIN else has_finite_scales(message, bits)
    return "" if sound else "not all of its numbers are finite"


def residual(bits: int) -> Parts:
    """The part of an outer state that holds what rounding keeps back, where anything is rounded."""
    return {} if bits == 32 else {"residual": "own"}


def rounded_offer(exact: Weights, kept: Weights, bits: int, prefetched: Tensor | None = None) -> Offer:
    """An offer of ``exact`` plus what rounding ``kept`` back so far: the error is fed back and stays bounded.

    Source: error feedback as in Seide et al. (2014) and Karimireddy et al. (arXiv 1901.09847, algorithm 2), at the
    sender, without decay.
    """
    if bits == 32:
        return Offer(pack(exact), prefetched)
    meant = {name: tensor.detach().float() + kept.get(name, 0.0) for name, tensor in exact.items()}
    blocking = pack(meant, bits)
    sent = unpack(blocking, meant, bits)
    return Offer(blocking, prefetched, {name: meant[name] - sent[name] for name in meant})


def heard(
    offers: Mapping[int, Offer], me: int, like: Weights, bits: int
) -> tuple[dict[int, dict[str, Tensor]], Weights]:
    """The blocking parts in order of member id, and what rounding still owes ``me``: zero where nobody else heard."""
    blocking = {member: unpack(offers[member].blocking, like, bits) for member in sorted(offers)}
    lost = offers[me].lost
    if len(offers) > 1 or not lost:
        return blocking, lost
    return {me: {name: blocking[me][name] + lost[name] for name in lost}}, zeros(lost)


def apart(offers: Mapping[int, Offer], bits: int) -> float:
    """How far what members say lies from their mean, root mean square over members and numbers; 0 for a single one.

    Corrected for how few they are (n − 1 in the denominator), so that it tells of all replicas, not of this group only.
    """
    said = []
    for offer in offers.values():
        if offer.blocking is None:
            return 0.0
        # Numbers that fill up the last coded group do no harm here.
        blocking = (
            offer.blocking.float()
            if bits in _PLAIN
            else decode(offer.blocking, coded_count(len(offer.blocking), bits), bits)
        )
        said.append(blocking if offer.prefetched is None else blocking[: len(offer.prefetched)] + offer.prefetched)
    if len(said) < 2 or not len(said[0]):
        return 0.0
    stacked = torch.stack(said)
    return math.sqrt(float((stacked - stacked.mean(dim=0)).square().sum()) / ((len(said) - 1) * len(said[0])))


def slow_copy(weights: Weights) -> dict[str, Tensor]:
    """An fp32 copy that shares no memory."""
    return {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in weights.items()}


def fast_copy(slow: Weights, like: Weights) -> dict[str, Tensor]:
    """A copy of ``slow`` with the dtypes of ``like``; shares no memory."""
    return {name: tensor.to(like[name].dtype, copy=True) for name, tensor in slow.items()}


def zeros(like: Weights) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in like.items()}
