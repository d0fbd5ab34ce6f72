"""Frames that have arrived and wait for the action that needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.plan.actions import Action, Key
from planaria.transport.wire import Content, Header, WireError

_KINDS = {Content.FORWARD: "forward", Content.BACKWARD: "backward"}


class Mail:
    """Arrived activations and gradients, by the action that sent them.

    A neighbour may already be a generation or a step ahead of this worker: its frames are kept until this worker
    follows. Frames of older generations are dropped.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """All frames have the shape of one microbatch's activation."""
        self._shape = shape
        self._held: dict[tuple[int, int, Key], Tensor] = {}
        self.generation, self.step = 0, 0

    def turn(self, generation: int, step: int) -> None:
        """This worker is now at ``step`` of ``generation``."""
        self.generation, self.step = generation, step
        self._held = {k: v for k, v in self._held.items() if k[:2] >= (generation, step)}

    def put(self, header: Header, payload: Tensor) -> None:
        """Keep a frame if it is of this generation or a later one.

        :raises WireError: when it is not an activation of the expected shape.
        """
        if header.generation < self.generation:
            return
        if header.content not in _KINDS or header.shape != self._shape or header.dtype != torch.float32:
            raise WireError(
                f"sent {header.content.name} {header.dtype} {list(header.shape)} for step {header.step}; "
                f"activations here are torch.float32 {list(self._shape)}"
            )
        kind = _KINDS[header.content]
        self._held[header.generation, header.step, Key(kind, header.microbatch, header.hop)] = payload  # type: ignore[arg-type]

    def has(self, action: Action) -> bool:
        """Is the input of ``action`` here (or local)?"""
        return action.needs is None or (self.generation, self.step, action.needs) in self._held

    def take(self, action: Action) -> Tensor | None:
        """Hand over the input of ``action``."""
        return None if action.needs is None else self._held.pop((self.generation, self.step, action.needs))
