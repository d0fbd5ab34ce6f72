"""Edges between workers of one process: they pass tensors by reference.

Each worker is a greenlet. It yields to its parent, the fleet, while its inbox is empty.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from queue import Empty
from typing import Any

from greenlet import getcurrent
from torch import Tensor

from planaria.runtime.transport.edge import EdgeEnd, EdgeFailed, EdgeOpened, EdgeSpec, FrameArrived
from planaria.runtime.transport.wire import Activation, Label, TensorHeader


class LocalInbox:
    """The message queue of a worker that shares its thread with others."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self.rounds = 0
        self.patience_s, self.in_vain = math.inf, False
        """timeout in seconds of the current :meth:`get`, and whether the fleet has declared it expired"""

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        """Return the next item. Only time in which all workers are idle counts towards ``timeout``.

        :raises Empty: on a timeout.
        """
        self.patience_s = math.inf if timeout is None else timeout
        while not self._items:
            parent = getcurrent().parent
            assert parent is not None, "an inbox is read by its worker"
            parent.switch()
            if self.in_vain and not self._items:
                self.in_vain = False
                raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def pending(self) -> bool:
        return bool(self._items)


class Rendezvous:
    """Pairs up the two ends of each edge; the first end waits here for the second."""

    def __init__(self) -> None:
        self._waiting: dict[str, LocalEdge] = {}

    def enter(self, end: LocalEdge) -> None:
        """Connect ``end`` to its other end, now or when that one enters."""
        peer = self._waiting.pop(end.spec.link_id, None)
        if peer is None:
            self._waiting[end.spec.link_id] = end
        elif peer.broken:
            end.reset()
        else:
            end.pair_with(peer)
            peer.pair_with(end)
            peer.flush()

    def leave(self, inbox: LocalInbox) -> None:
        """Remove the waiting ends of a dead worker, identified by its inbox."""
        self._waiting = {name: end for name, end in self._waiting.items() if end._inbox is not inbox}


@dataclass(frozen=True)
class LocalTransport:
    """The transport of a worker in a process that it shares with others."""

    rendezvous: Rendezvous
    inbox: LocalInbox
    address: str = ""
    trouble: str = ""

    def edge(self, spec: EdgeSpec) -> LocalEdge:
        end = LocalEdge(spec, self.inbox)
        self.rendezvous.enter(end)
        return end

    def partition(self, seconds: float) -> None:
        """Do nothing: there is no network to partition."""


class LocalEdge(EdgeEnd):
    """One end of an edge; frames go straight to the other end's inbox."""

    def __init__(self, spec: EdgeSpec, inbox: LocalInbox) -> None:
        super().__init__(spec)
        self._inbox = inbox
        self._other: LocalEdge | None = None
        self._unsent: list[tuple[Label, Tensor]] = []
        self._over = False
        """whether it was abandoned or broken"""
        self.broken = False

    def pair_with(self, peer: LocalEdge) -> None:
        self._other = peer
        if not self._over:
            self._inbox.put(EdgeOpened(self, 0.0))

    def flush(self) -> None:
        """Deliver frames that were sent before the other end connected, also from an abandoned end."""
        unsent, self._unsent = self._unsent, []
        for label, payload in unsent:
            self._deliver(label, payload)

    def send(self, label: Label, payload: Tensor, later: bool = False) -> None:
        """Deliver a frame. Activations are passed by reference, since no worker modifies one; other tensors are
        copied."""
        self.sent_bytes += payload.nbytes
        if self._over:
            return
        if not isinstance(label, Activation):
            payload = payload.clone()
        if self._other is None:
            self._unsent.append((label, payload))
        else:
            self._deliver(label, payload)

    def _deliver(self, label: Label, payload: Tensor) -> None:
        if self._other is not None and not self._other._over:
            header = TensorHeader(label, payload.dtype, payload.shape)
            self._other._inbox.put(FrameArrived(self._other, header, payload))

    def flush_deferred(self) -> None:
        """Do nothing: frames are delivered immediately."""

    def abandon(self) -> None:
        """Stop receiving; frames that were sent before are still delivered."""
        self._over = True

    def reset(self) -> None:
        """Break the edge; both ends receive :class:`EdgeFailed`."""
        for end in (self, self._other):
            if end is not None and not end._over:
                end._over = end.broken = True
                end._inbox.put(EdgeFailed(end, "reset"))
