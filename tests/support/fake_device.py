"""A device whose copies complete when a test decides."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

SOON_S = 20.0


class FakeEvent:
    """An event that a test completes; only then the copy is made, or fails."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy, self._passed = copy, threading.Event()
        self.error: Exception | None = None

    def happen(self, error: Exception | None = None) -> None:
        self.error = error
        if error is None:
            self._copy()
        self._copy = lambda: None  # the device has finished with both tensors
        self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(SOON_S)
        if self.error is not None:
            raise self.error


class FakeCopier:
    """A slow device: targets are NaN until their event completes. It keeps neither tensor alive."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.places: list[weakref.ref[Tensor]] = []
        self.sources: list[weakref.ref[Tensor]] = []
        self.joined: list[Tensor] = []

    def _begin(self, source: Tensor) -> tuple[Tensor, FakeEvent]:
        place = torch.full_like(source, torch.nan)
        ends = weakref.ref(source), weakref.ref(place)

        def copy() -> None:
            given, taken = (end() for end in ends)
            assert given is not None and taken is not None, "memory was freed while the device used it"
            taken.copy_(given)

        self.events.append(FakeEvent(copy))
        self.sources.append(ends[0])
        self.places.append(ends[1])
        return place, self.events[-1]

    down = up = _begin

    def join(self, tensor: Tensor) -> None:
        self.joined.append(tensor)

    def in_use(self) -> int:
        gc.collect()
        return sum(end() is not None for end in (*self.sources, *self.places))
