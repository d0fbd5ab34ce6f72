"""Echo: every worker keeps a quantised copy of another stage, refreshed in the background by slices. [ours]

The stages form a ring 0, 1, …, S; stage s is echoed ``distance`` stages ahead. Its parameters, as one long vector, are
cut into ``every`` slices; step t sends slice t mod ``every``, so a round takes ``every`` steps of equal size.

A message holds the difference between the weights and the host's copy, in 8, 4 or 2 bits per weight. The rounding error
of a message is part of the next difference (error feedback), so it shrinks. Both sides keep the copy in bfloat16 on the
device that trains, where messages are coded; the sender needs it to know the host's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.common.quantisation import GROUP, coded_bytes, decode, encode
from planaria.config.bounds import Positive
from planaria.models.state import StageShapes, StageState
from planaria.recovery.base import Copy, CopyCost, Holder, Moment, Original, Sender, numel
from planaria.recovery.hosted import HostedCopy

KEPT = torch.bfloat16


class Echo(HostedCopy):
    """Keep a quantised copy of each stage at another stage of the ring."""

    label: ClassVar[str] = "echo"
    caption: ClassVar[str] = "{donors} sends the coarse copy of {stage} that it has kept"
    advised_variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {" (8 bits)": {"bits": 8}, " (2 bits)": {"bits": 2}}
    bits: Literal[2, 4, 8] = 8
    """bits per weight in a message"""
    every: Positive = 4
    """steps in which a whole stage is sent once, one slice per step"""
    distance: Positive = 1
    """ring distance from a stage to its echo; with 2, adjacent stages may be lost together"""

    @property
    def quality_key(self) -> str:
        return f"{self.bits} bits"

    def copies(self, stages: int) -> tuple[Copy, ...]:
        if self.distance > stages:
            raise UserError(
                f"recovery.options.distance = {self.distance}: the ring has the ends and {stages} block stages; "
                f"use 1 to {stages}"
            )
        return super().copies(stages)

    def host(self, stage: int, stages: int) -> int:
        return (stage + self.distance) % (stages + 1)

    @property
    def commits_needed(self) -> int:
        return self.every

    def sender(self, copy: Copy, stage: int) -> Sender:
        return EchoSender(self.bits, self.every)

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        (original,) = originals.values()
        return EchoHolder(self.bits, self.every, original.shapes, original.device)

    def cost(self, copy: Copy, shapes: Mapping[int, StageShapes]) -> CopyCost:
        (parameters,) = shapes.values()
        kept = numel(parameters) * KEPT.itemsize
        return CopyCost(coded_bytes(numel(parameters), self.bits) / self.every, kept, kept)


@dataclass
class _SlicedCopy:
    """One side's copy in slices; ``agreed`` has the slices that both sides know to be equal."""

    length: int
    every: int
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        self.kept = torch.zeros(self.length, dtype=KEPT, device=self.device)
        self.agreed: set[int] = set()
        self._pending: tuple[int, Tensor] | None = None

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the range of slice ``index``; whole groups, so that slices share no scale."""
        size = -(-self.length // (self.every * GROUP)) * GROUP
        return min(index * size, self.length), min((index + 1) * size, self.length)

    def agreed_slice(self, index: int) -> Tensor:
        """Return a slice as both sides have it; zeros if they may disagree."""
        start, stop = self.bounds(index)
        return self.kept[start:stop].float() if index in self.agreed else self.kept.new_zeros(stop - start).float()

    def propose(self, index: int, difference: Tensor) -> None:
        self._pending = (index, (self.agreed_slice(index) + difference).to(KEPT))

    def commit(self) -> None:
        assert self._pending is not None
        (index, new), self._pending = self._pending, None
        start, stop = self.bounds(index)
        self.kept[start:stop] = new
        self.agreed.add(index)

    def drop(self) -> None:
        self._pending = None


class EchoSender(Sender):
    """Sends one coded slice of the committed weights at the beginning of every step."""

    def __init__(self, bits: int, every: int) -> None:
        self._bits, self._every = bits, every
        self._copy: _SlicedCopy | None = None

    @property
    def nbytes(self) -> int:
        return self._copy.kept.nbytes if self._copy else 0

    def restart(self) -> None:
        if self._copy is not None:
            self._copy.agreed.clear()

    def message_before_step(self, step: int, state: StageState) -> Tensor | None:
        if self._copy is None:
            tensors = list(state.weights.values())
            device = tensors[0].device if tensors else torch.device("cpu")  # a stage without adapters has none
            self._copy = _SlicedCopy(sum(t.numel() for t in tensors), self._every, device)
        index = step % self._every
        exact = _slice(state.weights, *self._copy.bounds(index))
        coded = encode(exact - self._copy.agreed_slice(index), self._bits)
        self._copy.propose(index, decode(coded, len(exact), self._bits))
        return coded.cpu()

    def commit(self, step: int) -> None:
        if self._copy is not None:
            self._copy.commit()

    def drop(self) -> None:
        if self._copy is not None:
            self._copy.drop()


class EchoHolder(Holder):
    """Holds the copy. Slices from an earlier worker of the stage stay until the new one has sent its own."""

    def __init__(self, bits: int, every: int, shapes: Mapping[str, torch.Size], device: str = "cpu") -> None:
        self._bits, self._every = bits, every
        self._shapes = dict(sorted(shapes.items()))
        self._copy = _SlicedCopy(numel(shapes), every, device)

    @property
    def nbytes(self) -> int:
        return self._copy.kept.nbytes

    def restart(self) -> None:
        self._copy.agreed.clear()

    def expects(self, step: int) -> tuple[Moment, ...]:
        return ("before",)

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        index = step % self._every
        start, stop = self._copy.bounds(index)
        self._copy.propose(index, decode(message.to(self._copy.device), stop - start, self._bits))

    def commit(self, step: int) -> None:
        self._copy.commit()

    def drop(self) -> None:
        self._copy.drop()

    def state(self) -> StageState:
        """Return the known weights in fp32; the stage's optimizer starts fresh."""
        pieces = torch.split(self._copy.kept.float(), [shape.numel() for shape in self._shapes.values()])
        named = zip(self._shapes.items(), pieces, strict=True)
        return StageState({name: piece.view(shape) for (name, shape), piece in named})


def _slice(weights: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
    """Return elements ``start``..``stop`` of all weights, concatenated by name, in fp32."""
    pieces = list(_overlaps(weights, start, stop))
    return torch.cat(pieces) if pieces else torch.empty(0)


def _overlaps(weights: Mapping[str, Tensor], start: int, stop: int) -> Iterator[Tensor]:
    begin = 0
    for name in sorted(weights):
        flat = weights[name].detach().reshape(-1)
        low, high = max(start - begin, 0), min(stop - begin, len(flat))
        if low < high:
            yield flat[low:high].float()
        begin += len(flat)
