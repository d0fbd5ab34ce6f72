"""The ranks of one machine that train a model with ``DistributedDataParallel``; together they are one member.

Rank 0 has the connection to the group. After each step it sends the next block's number and the weights to the others,
which compute their part of each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from planaria.common.errors import RunStopped
from planaria.group.member_state import MemberState
from planaria.group.membership import Membership

_FAILED = -2
"""value sent instead of a block's number: rank 0 raises an error"""
_NO_BLOCK = -1


class Ranks:
    """The ranks that train one model; a model without ``DistributedDataParallel`` has one."""

    def __init__(self, model: nn.Module) -> None:
        model = getattr(model, "_orig_mod", model)
        self._among = model.process_group if isinstance(model, DistributedDataParallel) else None
        self.count = 1 if self._among is None else dist.get_world_size(self._among)
        self.rank = 0 if self._among is None else dist.get_rank(self._among)
        self._device = next(model.parameters()).device

    @contextmanager
    def lead(self) -> Iterator[None]:
        """At rank 0: report an error within to the other ranks, which wait for :meth:`send`."""
        try:
            yield
        except BaseException:
            self._broadcast(torch.tensor([_FAILED, 0, 0, 0]))
            raise

    def send(self, member: Membership, owned: MemberState) -> None:
        """At rank 0: send the next block and the weights to the other ranks."""
        if self.count == 1:
            return
        block = member.blocks[0] if member.blocks else _NO_BLOCK
        self._broadcast(torch.tensor([block, member.step, member.progress, member.rounds]))
        self._broadcast_weights(owned)

    def receive(self, owned: MemberState) -> tuple[int, int, int, int]:
        """Receive the weights; return the next block (-1: none), and the steps, updates and rounds of rank 0.

        :raises RunStopped: if rank 0 raises an error.
        :raises RuntimeError: by torch, if rank 0 sends nothing within the time-out of the process group.
        """
        block, steps, progress, rounds = self._broadcast(torch.zeros(4, dtype=torch.int64)).tolist()
        if block == _FAILED:
            raise RunStopped("rank 0 is no longer a member; see its error")
        self._broadcast_weights(owned)
        return block, steps, progress, rounds

    def _broadcast(self, numbers: Tensor) -> Tensor:
        numbers = numbers.to(self._device)
        if self.count > 1:
            dist.broadcast(numbers, group=self._among, group_src=0)
        return numbers

    def _broadcast_weights(self, owned: MemberState) -> None:
        for weight in owned.weights().values():
            dist.broadcast(weight, group=self._among, group_src=0)


class Follower:
    """The membership of a rank that is not 0, with the interface of :class:`Membership` that the loop uses."""

    def __init__(self, ranks: Ranks, owned: MemberState) -> None:
        self._ranks, self._owned = ranks, owned
        self.blocks: Sequence[int] = ()
        self.step = self.progress = self.rounds = 0

    def take_gradient(self, block: int, updates: bool) -> None:
        """Do nothing: rank 0 has the gradient of all ranks."""

    def report(self, loss: float) -> None:
        """Do nothing: rank 0 reports its loss."""

    def advance(self) -> None:
        """Wait for rank 0.

        :raises RunStopped: if it raises an error.
        """
        block, self.step, self.progress, self.rounds = self._ranks.receive(self._owned)
        self.blocks = () if block == _NO_BLOCK else (block,)

    def leave(self) -> None:
        """Do nothing: rank 0 leaves the group."""
        self.blocks = ()
