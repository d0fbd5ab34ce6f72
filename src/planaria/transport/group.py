"""Two-rank gloo groups and the store they meet at.

The one place that knows how torch.distributed makes a group; newer in-place reconfiguration would slot in here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Work  # type: ignore[attr-defined]

from planaria.transport.rendezvous import Client

NEVER = timedelta(days=30)
"""How long to ``wait`` for messages, always given: gloo would otherwise close the group after the time it had to open.

Deadlines are kept by whoever waits for a message, and can name it.
"""


class Group(Protocol):
    """The part of a process group that edges use; torch's own type stubs leave it out."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...


def open_group(host: str, port: int, link_id: str, rank: int, timeout_s: float) -> Group:
    """The two-rank group named ``link_id`` as seen from ``rank`` (0 or 1); blocks until the other end is there too.

    ``host`` and ``port`` are the rendezvous's; this end listens at its own machine's address on the way there.

    :raises RuntimeError: when the other end does not come within ``timeout_s`` seconds.
    """
    try:
        store = Client(host, port, timeout_s)
    except OSError as error:
        raise RuntimeError(f"no rendezvous at {host}:{port}: {error}") from None
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=store.own_address)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    try:
        return ProcessGroupGloo(PrefixStore(link_id, store), rank, 2, options)  # type: ignore[return-value]
    finally:
        store.close()
