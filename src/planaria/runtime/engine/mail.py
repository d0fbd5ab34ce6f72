"""Frames that have arrived and wait for whatever needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.runtime.transport.wire import Activation, CopyMessage, GradientShare, Header, Label, State, WireError


class Awaited(NamedTuple):
    """A frame, by the node that sends it and by what it is."""

    sender: int
    label: Label


class Mail:
    """Arrived frames, each until it is taken.

    A neighbour may already be a generation or a step ahead of this worker: its frames are kept until this worker
    follows. Frames of the past are dropped. A state is of the present, as is the edge over which it comes.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, land: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """``shape`` and ``dtype``: those of one microbatch's activation, as it travels.

        ``land`` is given each that is kept, and makes of it what is handed over.
        """
        self._activation, self._land = (shape, dtype), land
        self._held: dict[Awaited, tuple[tuple[int, int], Tensor]] = {}
        """with the generation and step that each is of"""
        self._now = 0, 0

    def turn(self, generation: int, step: int) -> None:
        """This worker is now at ``step`` of ``generation``."""
        self._now = generation, step
        self._held = {frame: held for frame, held in self._held.items() if held[0] >= self._now}

    def put(self, sender: int, header: Header, payload: Tensor) -> None:
        """Keep a frame unless it is of the past.

        :raises WireError: when it is nothing that a worker waits for, or an activation of another shape.
        """
        match label := header.label:
            case Activation() | GradientShare() | CopyMessage():
                when = label.generation, label.step
            case State():
                when = self._now
            case _:
                raise WireError(f"sent {label}, which nobody here waits for")
        if when < self._now:
            return
        if isinstance(label, Activation) and (header.shape, header.dtype) != self._activation:
            shape, dtype = self._activation
            raise WireError(
                f"sent {label.content.name} {header.dtype} {list(header.shape)} for step {label.step}; "
                f"activations here are {dtype} {list(shape)}"
            )
        if isinstance(label, Activation) and self._land is not None:
            payload = self._land(payload)
        self._held[Awaited(sender, label)] = when, payload

    def __contains__(self, frame: Awaited) -> bool:
        return frame in self._held

    def missing(self, frames: Iterable[Awaited]) -> list[int]:
        """Who has yet to send one of these."""
        return [frame.sender for frame in frames if frame not in self._held]

    def take(self, frame: Awaited) -> Tensor:
        """Hand over a frame that is here."""
        return self._held.pop(frame)[1]
