"""Large low-priority frames, sent in pieces after all others.

Data in a connection's buffers delays the next activation. So the receiver acknowledges each piece, and the sender
limits the pieces in flight to a queueing delay of a few milliseconds, as LEDBAT does (RFC 6817). Without other frames
there is no limit.
"""

from __future__ import annotations

import math
import time
from collections import deque

import torch
from torch import Tensor

from planaria.runtime.transport.wire import Label, Piece, TensorHeader, WireError, as_bytes, pack, receive_buffer

PIECE_BYTES = 32 << 10
TARGET_S = 0.005
"""target queueing delay of a piece (s)"""
MAX_PIECES_IN_FLIGHT = 1024
"""pieces in flight"""


class Outgoing:
    """Low-priority frames that one edge has to send."""

    def __init__(self) -> None:
        self._frames: deque[tuple[memoryview, memoryview]] = deque()
        """announcement and remaining payload"""
        self._announced = False
        """whether the first frame was announced"""
        self._in_flight: deque[float] = deque()
        """send times of unacknowledged pieces"""
        self._window = 1.0
        self._least_delay_s = math.inf
        self._unlimited = False

    def add(self, label: Label, payload: Tensor) -> None:
        """Add a frame; WireError if the tensor or label does not fit one."""
        header = TensorHeader(label, payload.dtype, payload.shape, time.monotonic(), announced=True)
        self._unlimited = self._unlimited and bool(self._frames)
        self._frames.append((memoryview(pack(header)), as_bytes(payload.contiguous())))

    def on_ack(self) -> None:
        """Process an acknowledgement: adapt the window to the delay."""
        if not self._in_flight:
            return
        delay_s = time.monotonic() - self._in_flight.popleft()
        self._least_delay_s = min(self._least_delay_s, delay_s)
        change = 1.0 - (delay_s - self._least_delay_s) / TARGET_S
        self._window = min(MAX_PIECES_IN_FLIGHT, max(1.0, self._window + max(change, -self._window / 2) / self._window))

    def lift_limit(self) -> None:
        """Remove the limit until all is sent, since there are no other frames."""
        self._unlimited = True

    def next(self) -> tuple[memoryview, memoryview] | None:
        """Return the next header and payload, or None if there is nothing to send, or the window is full."""
        full = len(self._in_flight) >= self._window
        if not self._frames or (full and not self._unlimited):
            return None
        announcement, unsent = self._frames[0]
        if not self._announced:
            self._announced = True
            return announcement, unsent[:0]
        piece = unsent[:PIECE_BYTES]
        self._frames[0] = announcement, unsent[len(piece) :]
        if len(piece) == len(unsent):
            self._frames.popleft()
            self._announced = False
        now = time.monotonic()
        self._in_flight.append(now)
        return memoryview(pack(TensorHeader(Piece(), torch.uint8, (len(piece),), now))), piece

    def clear(self) -> None:
        self._frames.clear()

    def __bool__(self) -> bool:
        return bool(self._frames)


class Incoming:
    """A frame that arrives in pieces at one edge."""

    def __init__(self) -> None:
        self._header: TensorHeader | None = None
        self._payload = torch.empty(0)
        self._left = memoryview(b"")

    def announce(self, header: TensorHeader) -> None:
        """Start a frame; WireError if the previous one is incomplete."""
        if self._header is not None:
            raise WireError(f"{header.label} announced before {self._header.label} was complete")
        self._header, self._payload = header, receive_buffer(header)
        self._left = as_bytes(self._payload)

    def piece_memory(self, size: int) -> memoryview:
        """Return the memory for the next piece of ``size`` bytes; WireError if it exceeds the missing bytes."""
        if self._header is None or size > len(self._left):
            raise WireError(f"piece of {size} bytes exceeds the {len(self._left)} missing bytes")
        piece, self._left = self._left[:size], self._left[size:]
        return piece

    def whole(self) -> tuple[TensorHeader, Tensor] | None:
        """Return the frame after its last piece, else None."""
        if self._header is None or self._left:
            return None
        frame = self._header, self._payload
        self._header, self._payload = None, torch.empty(0)
        return frame
