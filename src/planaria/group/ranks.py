"""The ranks of one machine that train a model together: ``DistributedDataParallel``, FSDP2 or tensor parallelism.

Together they are one member. Rank 0 has the connection to the group. The other ranks compute their part of each block,
and wait for rank 0 between two blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from planaria.common.errors import RunStopped
from planaria.group.member_state import MemberState, Stateful
from planaria.group.membership import Membership
from planaria.group.sharded import Call, ShardedState, mesh_of

_NO_BLOCK = -1


class Ranks:
    """The ranks that train one model; a model of one process has one."""

    def __init__(self, model: nn.Module) -> None:
        """:raises UserError: if the model is sharded in an unsupported way."""
        model = getattr(model, "_orig_mod", model)
        self.sharded = mesh_of(model) is not None
        several = self.sharded or isinstance(model, DistributedDataParallel)
        self._among = model.process_group if isinstance(model, DistributedDataParallel) else None
        self.count = dist.get_world_size(self._among) if several else 1
        self.rank = dist.get_rank(self._among) if several else 0
        self._device = next(model.parameters()).device

    def state_of(self, model: nn.Module, optimizer: Optimizer, also: Mapping[str, Stateful]) -> MemberState:
        """Return the state of this rank.

        :raises UserError: as :class:`MemberState`.
        """
        if self.sharded:
            return ShardedState(model, optimizer, also, self._exchange_call, self._broadcast)
        return MemberState(model, optimizer, also)

    @contextmanager
    def lead(self) -> Iterator[None]:
        """At rank 0: report an error within to the other ranks, which wait for :meth:`proceed`."""
        try:
            yield
        except BaseException:
            self._exchange_call(Call.FAIL)
            raise

    def proceed(self, member: Membership, owned: MemberState) -> None:
        """At rank 0: let the other ranks proceed with the next block; with equal weights, if each has all of them."""
        if self.count == 1:
            return
        block = member.blocks[0] if member.blocks else _NO_BLOCK
        self._exchange_call(Call.PROCEED, block, member.step, member.progress, member.rounds)
        self._share_weights(owned)

    def follow(self, owned: MemberState) -> tuple[int, int, int, int]:
        """At another rank: take part in what rank 0 does until it proceeds.

        Return the next block (-1: none), and the steps, updates and rounds of rank 0.

        :raises RunStopped: if rank 0 raises an error.
        :raises RuntimeError: by torch, if rank 0 sends nothing within the time-out of the process group.
        """
        call, *numbers = self._exchange_call()
        while call != Call.PROCEED:
            if call == Call.FAIL:
                raise RunStopped("rank 0 is no longer a member; see its error")
            assert isinstance(owned, ShardedState)
            owned.follow(Call(call))
            call, *numbers = self._exchange_call()
        block, steps, progress, rounds = numbers
        self._share_weights(owned)
        return block, steps, progress, rounds

    def _exchange_call(
        self, call: Call = Call.FAIL, block: int = 0, steps: int = 0, progress: int = 0, rounds: int = 0
    ) -> list[int]:
        """Return the call of rank 0 and its numbers at all ranks; the arguments count at rank 0 only."""
        numbers: list[int] = self._broadcast(torch.tensor([call, block, steps, progress, rounds])).tolist()
        return numbers

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor at all ranks, on the CPU."""
        if self.count == 1:
            return tensor
        sent = tensor.to(self._device).contiguous()
        dist.broadcast(sent, group=self._among, group_src=0)
        return sent.cpu()

    def _share_weights(self, owned: MemberState) -> None:
        """Give all ranks the weights of rank 0, unless each has its own part of them."""
        for weight in () if self.sharded else owned.weights().values():
            dist.broadcast(weight, group=self._among, group_src=0)


class Follower:
    """The membership of a rank that is not 0, with the interface of :class:`Membership` that the loop uses."""

    def __init__(self, ranks: Ranks, owned: MemberState) -> None:
        self._ranks, self._owned = ranks, owned
        self.blocks: Sequence[int] = ()
        self.step = self.progress = self.rounds = 0

    def take_gradient(self, block: int, updates: bool) -> None:
        """Do nothing: rank 0 reports the gradient of all ranks."""

    def report(self, loss: float) -> None:
        """Do nothing: rank 0 reports its loss."""

    def advance(self) -> None:
        """Wait for rank 0.

        :raises RunStopped: if it raises an error.
        """
        block, self.step, self.progress, self.rounds = self._ranks.follow(self._owned)
        self.blocks = () if block == _NO_BLOCK else (block,)

    def leave(self) -> None:
        """Do nothing: rank 0 leaves the group."""
        self.blocks = ()
