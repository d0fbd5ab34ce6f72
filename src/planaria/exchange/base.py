"""What every exchange answers: when replicas of one stage meet, who meets whom, what each says, what it makes of it.

An exchange is pure: tensors and numbers in, tensors and numbers out. It never touches a process, a socket or a clock,
and never asks how many inner steps a replica took since the round before: they may be unequal. The words, after
arXiv 2506.10911: *fast* weights θ are what the inner optimizer trains, *slow* weights φ are what replicas agree on.

A round, as whoever drives it sees it, every ``every`` inner steps of its replica:

1. as soon as the round before is settled, the group of this round is known (``groups``) and ``prefetched`` can be sent;
2. when the inner steps are done, ``offer``; its ``blocking`` part is sent to the group;
3. ``delay`` inner steps later, ``settle`` with all offers that came. Whose offer is missing is left out. A replica
   that hears of nobody settles with its own offer alone.

Nothing changes before ``settle``: a round that is given up halfway leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
"""one stage's parameters (or gradients) by local name"""
Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class Outer:
    """The outer state of one stage replica: everything that must be kept from round to round, and with a checkpoint.

    Tensors are fp32, of the parameters' names and shapes; an exchange leaves out what it has no use for.
    """

    slow: Weights = field(default_factory=dict)
    """φ, what the replica last settled for"""
    momentum: Weights = field(default_factory=dict)
    """δ, zero at the start"""
    residual: Weights = field(default_factory=dict)
    """what rounding has kept from the others so far (error feedback)"""
    rounds: int = 0
    """settled so far"""

    def state(self) -> dict[str, Tensor]:
        """Everything as plain tensors, for a checkpoint; shares memory."""
        named = {f"{part}/{name}": tensor for part in _PARTS for name, tensor in getattr(self, part).items()}
        return {"rounds": torch.tensor(self.rounds), **named}

    @classmethod
    def load(cls, state: Mapping[str, Tensor]) -> Outer:
        """What :meth:`state` made; shares memory.

        :raises ValueError: when it is not one.
        """
        parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
        for key, tensor in state.items():
            part, _, name = key.partition("/")
            if part in parts and name and tensor.dtype == torch.float32:
                parts[part][name] = tensor
            elif key != "rounds":
                raise ValueError(f"{key!r} ({tensor.dtype}) is no part of an outer state")
        if "rounds" not in state or state["rounds"].numel() != 1 or state["rounds"].is_floating_point():
            raise ValueError("an outer state counts its rounds in one integer")
        return cls(**parts, rounds=int(state["rounds"]))


_PARTS = ("slow", "momentum", "residual")


@dataclass(frozen=True)
class Offer:
    """What one replica says to its group in one round. Messages are flat tensors on the CPU."""

    blocking: Tensor | None = None
    """needs the inner steps to be done: the others wait for it"""
    prefetched: Tensor | None = None
    """was known when the round before was settled: sent while the inner steps run"""
    lost: Weights = field(default_factory=dict)
    """what rounding took from ``blocking``; stays with the sender, for its own ``settle``"""


@dataclass(frozen=True)
class ExchangeCost:
    """Bytes that one replica sends in one round, as the mean over rounds, when everyone sends to everyone in its group.

    Message headers are not counted. Where only the mean of a group is needed, a ring sends 2(n − 1)/n of an offer
    instead of n − 1; then the offers themselves are no longer seen.
    """

    critical: float
    """that somebody waits for"""
    total: float


def meeting_cost(groups: Sequence[tuple[int, ...]], blocking: float, prefetched: float = 0.0) -> ExchangeCost:
    """What an offer of so many bytes costs the mean member of ``groups``."""
    peers = sum(len(group) * (len(group) - 1) for group in groups) / sum(map(len, groups))
    return ExchangeCost(peers * blocking, peers * (blocking + prefetched))


class Exchange(Protocol):
    """One way in which the replicas of a stage agree."""

    @property
    def every(self) -> int | None:
        """Inner steps from one round to the next. None: never.

        0: in every step, before the update; then ``fast`` is the step's gradient, not the weights, everywhere below.
        """
        ...

    @property
    def delay(self) -> int:
        """Inner steps from ``offer`` to ``settle``, while which messages travel; fewer than ``every``."""
        ...

    @property
    def prefetches(self) -> bool:
        """Is a part of each offer known as soon as the round before is settled?"""
        ...

    @property
    def synchronised(self) -> bool:
        """Do all replicas have the same outer state? Then who misses a round must take over that of one who did not."""
        ...

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        """Who meets whom: ``members`` (any distinct ids, in any order) in groups, ids in each group in order.

        Depends on the arguments alone, so that all peers with one membership list agree without a message. A seed that
        names the stage too makes stages draw their groups apart.
        """
        ...

    def start(self, weights: Weights) -> Outer:
        """The outer state of a replica that starts from ``weights``, equal at all replicas; a copy.

        Who joins later starts from the slow weights of a peer.
        """
        ...

    def prefetched(self, outer: Outer) -> Tensor | None:
        """The part of the next offer that ``outer`` alone determines, if there is one."""
        ...

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        """What a replica with the state ``outer`` says once its inner steps have made ``fast``.

        ``prefetched``: what :meth:`prefetched` made of the same state, if it was asked before.
        """
        ...

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        """What replica ``me`` goes on with: new fast weights, of the dtypes and devices of ``fast``, and outer state.

        What the round does not touch shares memory with what was given; nothing that was given is changed.

        ``offers`` are those of its group that came, by member id, its own among them. They are added up in order of id,
        so that two members who got the same offers make the same of them to the last bit. Alone, nothing is rounded.

        :raises ValueError: when a message does not have the size or type that it must have.
        """
        ...

    def apart(self, offers: Mapping[int, Offer]) -> float:
        """How far the weights of these members lie apart (``exchange.message.apart``), as far as their offers tell."""
        ...

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        """Bytes of a round in which all ``members`` replicas take part, for one stage of these shapes."""
        ...
