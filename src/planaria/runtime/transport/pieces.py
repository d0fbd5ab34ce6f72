"""Large frames that may wait: sent piece by piece behind all others, never much ahead of what has arrived.

Whatever lies in a connection's buffers is ahead of the next activation. So the receiver tells of each piece that has
come, and the sender has only so many on their way that they wait a few milliseconds for one another, as LEDBAT does
(RFC 6817): more while they come sooner, fewer when they come later. Once a worker has nothing else to send, there is
no limit.
"""

from __future__ import annotations

import math
import time
from collections import deque

import torch
from torch import Tensor

from planaria.runtime.transport.wire import Header, Label, Piece, WireError, as_bytes, pack, receive_buffer

PIECE_BYTES = 32 << 10
TARGET_S = 0.005
"""that a piece may take longer than the quickest one"""
MOST = 1024
"""pieces on their way"""


class Outgoing:
    """What one edge has still to send of such frames."""

    def __init__(self) -> None:
        self._frames: deque[tuple[memoryview, memoryview]] = deque()
        """announcement, and what of the payload is left"""
        self._announced = False
        """is the first of them?"""
        self._on_the_way: deque[float] = deque()
        """when each piece was sent that has not arrived yet"""
        self._window, self._quickest = 1.0, math.inf
        self._hurried = False

    def add(self, label: Label, payload: Tensor) -> None:
        """:raises WireError: when such a tensor or label does not fit a frame."""
        header = Header(label, payload.dtype, payload.shape, time.monotonic(), announced=True)
        self._hurried = self._hurried and bool(self._frames)
        self._frames.append((memoryview(pack(header)), as_bytes(payload.contiguous())))

    def taken(self) -> None:
        """The other end has got a piece: the window follows how long it took."""
        if not self._on_the_way:
            return
        took = time.monotonic() - self._on_the_way.popleft()
        self._quickest = min(self._quickest, took)
        change = 1.0 - (took - self._quickest) / TARGET_S
        self._window = min(MOST, max(1.0, self._window + max(change, -self._window / 2) / self._window))

    def hurry(self) -> None:
        """There is nothing else to send: no limit, until all is out."""
        self._hurried = True

    def next(self) -> tuple[memoryview, memoryview] | None:
        """What to write now, header and payload; None while there is nothing, or enough on its way."""
        full = len(self._on_the_way) >= self._window
        if not self._frames or (full and not self._hurried):
            return None
        announcement, left = self._frames[0]
        if not self._announced:
            self._announced = True
            return announcement, left[:0]
        piece = left[:PIECE_BYTES]
        self._frames[0] = announcement, left[len(piece) :]
        if len(piece) == len(left):
            self._frames.popleft()
            self._announced = False
        now = time.monotonic()
        self._on_the_way.append(now)
        return memoryview(pack(Header(Piece(), torch.uint8, (len(piece),), now))), piece

    def clear(self) -> None:
        """Nobody wants it any more."""
        self._frames.clear()

    def __bool__(self) -> bool:
        return bool(self._frames)


class Incoming:
    """A frame that arrives piece by piece at one edge."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._payload = torch.empty(0)
        self._left = memoryview(b"")

    def announce(self, header: Header) -> None:
        """:raises WireError: when the one before has not come whole."""
        if self._header is not None:
            raise WireError(f"{header.label} is announced before {self._header.label} has come")
        self._header, self._payload = header, receive_buffer(header)
        self._left = as_bytes(self._payload)

    def room(self, size: int) -> memoryview:
        """Where the next piece, of so many bytes, goes.

        :raises WireError: when it is more than what is missing.
        """
        if self._header is None or size > len(self._left):
            raise WireError(f"a piece of {size} bytes, where {len(self._left)} are missing")
        piece, self._left = self._left[:size], self._left[size:]
        return piece

    def whole(self) -> tuple[Header, Tensor] | None:
        """The frame, once its last piece has come."""
        if self._header is None or self._left:
            return None
        found = self._header, self._payload
        self._header, self._payload = None, torch.empty(0)
        return found
