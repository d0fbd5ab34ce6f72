"""Asynchronous copies of tensors between a device and its host.

Only users of a copy wait for it. Both ends of a copy stay allocated until its event has passed, even if it is dropped.
Copies are delivered in the order of their start.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planaria.runtime.transport.ring import Ring, Rings
from planaria.runtime.transport.wire import use_allocator

log = logging.getLogger(__name__)
DEPTH = 4
"""concurrent copies in each direction"""
SLOTS = 8
"""slots of a worker's ring; a tensor without a free slot goes through the socket"""


class _Down(NamedTuple):
    tensor: Tensor
    host: Tensor
    event: torch.cuda.Event
    then: Callable[[Tensor], None]


class Staging:
    """The copies of one worker. Its main thread calls the methods; a separate thread delivers."""

    def __init__(self, copier: Cuda, depth: int = DEPTH) -> None:
        self._copier, self._depth = copier, depth
        self._down: deque[_Down] = deque()
        self._dropped = 0
        """number of leftmost copies that will not be delivered"""
        self._up: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None

    def send(self, tensor: Tensor, then: Callable[[Tensor], None]) -> None:
        """Copy to the host, then call ``then`` with the copy in another thread. Blocks while ``depth`` copies are
        pending.

        :raises RuntimeError: if the device failed in this copy or an earlier one.
        """
        with self._changed:
            while len(self._down) >= self._depth and self._failed is None:
                self._changed.wait()
            if self._failed is not None:
                raise RuntimeError("a copy from the device failed") from self._failed
            self._down.append(_Down(tensor, *self._copier.down(tensor), then))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="staging", daemon=True)
                self._thread.start()

    def receive(self, host: Tensor) -> Tensor:
        """Start to copy to the device; call :meth:`join` before using the result."""
        while self._up and (len(self._up) >= self._depth or self._up[0][1].query()):  # type: ignore[no-untyped-call]
            self._up[0][1].synchronize()
            self._up.popleft()
        tensor, event = self._copier.up(host)
        self._up.append((host, event))
        return tensor

    def join(self, tensor: Tensor) -> Tensor:
        self._copier.join(tensor)
        return tensor

    def drop(self) -> None:
        """Do not deliver pending copies."""
        with self._changed:
            self._dropped = len(self._down)

    @property
    def under_way(self) -> int:
        """Number of copies to the host that were neither delivered nor dropped."""
        return len(self._down)

    def _deliver(self) -> None:
        while True:
            with self._changed:
                while not self._down:
                    self._changed.wait()
                first = self._down[0]
            try:
                first.event.synchronize()
                with self._changed:
                    self._down.popleft()
                    if self._dropped:
                        self._dropped -= 1
                    else:
                        first.then(first.host)
                    del first
                    self._changed.notify_all()
            except BaseException as error:
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                return


def with_cuda(sizes: Collection[int]) -> tuple[Staging, Rings]:
    """Return the staging and rings of a worker with a CUDA device, for tensors of these ``sizes`` in bytes.

    Tensors for workers of this machine are copied to a ring; received ones use page-locked memory.
    """
    use_allocator(pinned, sizes)
    try:
        ring = Ring(SLOTS, max(sizes), page_locked)
    except OSError as error:
        log.warning("%.0f MB of shared memory: %s; activations go through sockets", SLOTS * max(sizes) / 1e6, error)
        return Staging(Cuda()), Rings(None, page_locked)
    return Staging(Cuda(ring.allocate)), Rings(ring, page_locked)


class Cuda:
    """Copies between a CUDA device and pinned host memory, with a stream for each direction."""

    def __init__(self, room: Callable[[int], Tensor | None] = lambda _: None) -> None:
        """``room``: returns page-locked memory, uint8 [size], for copies to the host, or None."""
        self._room = room
        self._down, self._up = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]

    def down(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start to copy a tensor once it is computed; return the host tensor and the completion event."""
        room = self._room(tensor.nbytes)
        host = (pinned(tensor.nbytes) if room is None else room).view(tensor.dtype).view(tensor.shape)
        self._down.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._down):
            host.copy_(tensor, non_blocking=True)
            return host, self._down.record_event()

    def up(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start to copy to the device; return the device tensor and the completion event."""
        with torch.cuda.stream(self._up):  # allocates from this stream, so that no computation uses the memory
            return host.to("cuda", non_blocking=True), self._up.record_event()

    def join(self, tensor: Tensor) -> None:
        """Let later work on the device wait for a tensor of :meth:`up`."""
        stream = torch.cuda.current_stream()
        stream.wait_stream(self._up)
        tensor.record_stream(stream)


def page_locked(address: int, size: int) -> Callable[[], None]:
    """Page-lock memory that torch has not allocated; return a function that unlocks it.

    Copies to and from the device are then asynchronous. If the system refuses, copies are synchronous.
    """
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cuda.cudaHostRegister(address, size, 0)):
        log.warning("%.0f MB of shared memory could not be page-locked; copies are synchronous", size / 1e6)
        with suppress(RuntimeError):  # the next launch reports the error once
            torch.zeros((), device="cuda").add_(1)
        return lambda: None
    return lambda: cuda.cudaHostUnregister(address)


def pinned(size: int) -> Tensor:
    """Return pinned memory, uint8 [size]; torch reuses it after its last copy."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
