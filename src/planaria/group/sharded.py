"""A member whose parameters are sharded over the ranks of one machine: FSDP2, tensor parallelism, or both.

Members exchange whole tensors, so they need not agree on the number of ranks. For a round, rank 0 gathers them in its
CPU's memory, and divides the result. All ranks must take part in that: rank 0 names what it is about to do
(:class:`Call`), and the others do the same (:meth:`ShardedState.follow`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from planaria.common.errors import UserError
from planaria.group.member_state import MemberState, Stateful, document_of, tensor_paths, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Broadcast = Callable[[Tensor], Tensor]
"""sends rank 0's tensor to all ranks; returns it, on the CPU"""


class Call(IntEnum):
    """What rank 0 does next."""

    FAIL = 0
    """it raises an error"""
    PROCEED = 1
    """it continues with the owner's loop"""
    STEP = 2
    GATHER = 3
    SET = 4
    COLLECT = 5
    LOAD = 6


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the device mesh of a sharded model, or None if no parameter is sharded.

    :raises UserError: if its ranks are not those of the process group, or its parameters cannot be divided from rank 0.
    """
    shards = {name: p for name, p in model.named_parameters() if type(p.data).__name__ == "DTensor"}
    if not shards:
        return None
    meshes: list[DeviceMesh] = list({shard.device_mesh: None for shard in shards.values()})  # type: ignore[attr-defined]
    if len(meshes) > 1 or meshes[0].size() != dist.get_world_size():
        raise UserError(
            f"wrap: the model's parameters are on {len(meshes)} device meshes, the first with {meshes[0].size()} of "
            f"{dist.get_world_size()} ranks; shard all of them over all ranks"
        )
    for name, shard in shards.items():
        for placement in shard.placements:  # type: ignore[attr-defined]
            if (kind := type(placement).__name__) not in ("Shard", "Replicate"):
                raise UserError(f"wrap: parameter {name!r} has the placement {kind}; use Shard or Replicate")
    return meshes[0]


class ShardedState(MemberState):
    """The state of one rank of a sharded member.

    All ranks call :meth:`require_sendable`. Rank 0 calls the other methods of the base class, the other ranks
    :meth:`follow`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        also: Mapping[str, Stateful],
        announce: Callable[[Call], object],
        broadcast: Broadcast,
    ) -> None:
        """:param announce: tells the other ranks what rank 0 does next."""
        super().__init__(model, optimizer, also)
        self._announce = announce
        self._broadcast = broadcast
        self._gathered: dict[str, Tensor] | None = None
        """whole weights until they change"""
        _ = self.layout  # computed at all ranks, since frozen weights may be sharded too

    def follow(self, call: Call) -> None:
        """At another rank than 0: take part in a call of rank 0. An error is rank 0's, which reports it."""
        if call == Call.STEP:
            super().step()
        elif call == Call.GATHER:
            self._gather()
        elif call == Call.SET:
            self._set({})
        elif call == Call.COLLECT:
            super().extra_state()
        elif call == Call.LOAD:
            document, sizes = json.loads(self._share_text(b""))
            with suppress(UserError):
                self._load(document, sizes, {})

    def require_sendable(self) -> None:
        super().extra_state()

    def step(self) -> None:
        self._announce(Call.STEP)
        self._gathered = None
        super().step()

    def weights(self) -> dict[str, Tensor]:
        """Return the whole trained parameters by name, on the CPU."""
        if self._gathered is None:
            self._announce(Call.GATHER)
            self._gathered = self._gather()
        return dict(self._gathered)

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._announce(Call.SET)
        self._gathered = None
        self._set(weights)

    def extra_state(self) -> dict[str, Tensor]:
        self._announce(Call.COLLECT)
        return super().extra_state()

    def load_extra_state(self, tensors: Mapping[str, Tensor]) -> None:
        document = document_of(tensors)
        sizes = {path: [str(tensors[path].dtype), list(tensors[path].shape)] for path in tensor_paths(document)}
        self._announce(Call.LOAD)
        self._share_text(json.dumps([document, sizes]).encode())
        self._load(document, sizes, tensors)

    def _gather(self) -> dict[str, Tensor]:
        return {name: whole(parameter) for name, parameter in self.parameters.items()}

    def _set(self, weights: Mapping[str, Tensor]) -> None:
        """Set this rank's part of rank 0's ``weights``; other ranks pass none."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                weight = weights[name] if weights else torch.empty(parameter.shape)
                parameter.copy_(self._divided(weight, parameter))

    def _divided(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of rank 0's whole ``tensor``, divided as ``like`` is."""
        mesh = getattr(like, "device_mesh", None)
        if mesh is None:
            return self._broadcast(tensor)
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(like.dtype).to(mesh.device_type), mesh, like.placements)  # type: ignore[attr-defined]

    def _load(self, document: Any, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load rank 0's state; other ranks pass no ``tensors``."""

        def fetch(path: str) -> Tensor:
            dtype, shape = sizes[path]
            kind = getattr(torch, dtype.removeprefix("torch."))
            tensor = tensors[path].clone() if tensors else torch.empty(shape, dtype=kind)
            like = self.parameters.get(path.removeprefix("optimizer.state.").rpartition(".")[0])
            if not path.startswith("optimizer.state.") or like is None or list(like.shape) != shape:
                return self._broadcast(tensor)
            return self._divided(tensor, like)

        self._load_document(document, fetch)

    def _share_text(self, text: bytes) -> bytes:
        """Return the text of rank 0 at all ranks."""
        size = int(self._broadcast(torch.tensor([len(text)])))
        buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(size, dtype=torch.uint8)
        return self._broadcast(buffer).numpy().tobytes()
