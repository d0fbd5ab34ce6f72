"""Buffer of received frames."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import NamedTuple

from torch import Tensor

from planaria.pipeline.codecs.base import LEGS, Leg, Shape, WireCodec
from planaria.runtime.transport.wire import (
    Activation,
    CopyMessage,
    FrameContent,
    GradientShare,
    Label,
    State,
    TensorHeader,
    WireError,
)

MAGNITUDES = 64
"""messages of a sender and leg whose median magnitude bounds later ones"""
MAX_GROWTH = 32.0
"""maximum magnitude of a message relative to that median"""


class UnusualMagnitude(WireError):
    """A message far above its sender's usual ones, which is no proof of a fault: the repeated step may be as large."""


class FrameId(NamedTuple):
    """A frame, identified by its sender and label."""

    sender: int
    label: Label


class ReceivedFrames:
    """Received frames, kept until taken.

    A neighbour may be a generation or a step ahead of this worker; its frames are kept until this worker follows. Stale
    frames are dropped. A state always belongs to the current generation.
    """

    def __init__(
        self, codec: WireCodec, shape: Shape, land: Callable[[Tensor], Tensor] | None = None, bounded: bool = True
    ) -> None:
        """``shape``: that of one microbatch's activation. ``land`` converts the message of each received one.

        ``bounded``: reject messages far above the neighbour's usual ones. Honest gradients of dialogues vary with the
        number of learned tokens in a step.
        """
        self._bounded = bounded
        self._codec = codec
        self._shape = shape
        self._land = land
        self._layouts = {leg: codec.layout(shape, leg) for leg in LEGS}
        self._frames: dict[FrameId, tuple[tuple[int, int], Tensor]] = {}
        """received frames, each with its generation and step"""
        self._magnitudes = defaultdict[tuple[int, Leg], deque[float]](partial(deque, maxlen=MAGNITUDES))
        """magnitudes of the last messages by sender and leg, in this generation"""
        self._now = 0, 0

    def advance(self, generation: int, step: int) -> None:
        """Advance to ``step`` of ``generation``, and drop stale frames."""
        if generation != self._now[0]:  # a rebuilt stage may send other magnitudes
            self._magnitudes.clear()
        self._now = generation, step
        self._frames = {frame: entry for frame, entry in self._frames.items() if entry[0] >= self._now}

    def put(self, sender: int, header: TensorHeader, payload: Tensor) -> None:
        """Keep a frame unless it is stale.

        :raises WireError: if no worker waits for such a frame, or an activation is invalid.
        """
        match label := header.label:
            case Activation() | GradientShare() | CopyMessage():
                when = label.generation, label.step
            case State():
                when = self._now
            case _:
                raise WireError(f"sent {label}, which no worker waits for")
        if when < self._now:
            return
        if isinstance(label, Activation):
            self._require_valid(sender, label, payload)
            payload = payload if self._land is None else self._land(payload)
        self._frames[FrameId(sender, label)] = when, payload

    def _require_valid(self, sender: int, label: Activation, payload: Tensor) -> None:
        leg: Leg = "forward" if label.content is FrameContent.FORWARD else "backward"
        shape, dtype = self._layouts[leg]
        if (payload.shape, payload.dtype) != (shape, dtype):
            raise WireError(
                f"sent {label.content.name} {payload.dtype} {list(payload.shape)} for step {label.step}; "
                f"activations here are {dtype} {list(shape)}"
            )
        what = f"sent a damaged {label.content.name} of microbatch {label.microbatch} for step {label.step}"
        if damage := self._codec.invalid_reason(payload, self._shape, leg):
            raise WireError(f"{what}: {damage}")
        if excess := self._excess(sender, leg, payload):
            raise UnusualMagnitude(f"{what}: {excess}")

    def _excess(self, sender: int, leg: Leg, payload: Tensor) -> str:
        """Return why a message is too large compared with the sender's previous ones, or an empty string."""
        magnitude, known = self._codec.magnitude(payload, self._shape, leg), self._magnitudes[sender, leg]
        if self._bounded and len(known) == MAGNITUDES and magnitude > MAX_GROWTH * (usual := median(known)) > 0:
            return f"its largest scale is {magnitude / usual:.3g} times the median of the last {MAGNITUDES} messages"
        known.append(magnitude)
        return ""

    def __contains__(self, frame: FrameId) -> bool:
        return frame in self._frames

    def missing(self, frames: Iterable[FrameId]) -> list[int]:
        """Return the senders of the ``frames`` that have not arrived."""
        return [frame.sender for frame in frames if frame not in self._frames]

    def take(self, frame: FrameId) -> Tensor:
        """Remove and return a received frame."""
        return self._frames.pop(frame)[1]
