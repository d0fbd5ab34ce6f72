"""What every exchange answers: when replicas of one stage meet, who meets whom, what each says, what it makes of it.

An exchange is pure: tensors and numbers in, tensors and numbers out. It never touches a process, a socket or a clock,
and never asks how many inner steps a replica took since the round before: they may be unequal. The words, after
arXiv 2506.10911: *fast* weights θ are what the inner optimizer trains, *slow* weights φ are what replicas agree on.

A round, as whoever drives it sees it, every ``every`` inner steps of its replica:

1. as soon as the round before is settled, the group of this round is known (``groups``) and ``prefetched`` can be sent;
2. when the inner steps are done, ``offer``; its ``blocking`` part is sent to the group;
3. ``overlap`` inner steps later, ``settle`` with all offers that came. Whose offer is missing is left out. A replica
   that hears of nobody settles with its own offer alone.

Nothing changes before ``settle``: a round that is given up halfway leaves no trace. With an exchange of gradients
(``interval`` is 0) a round lies within a step, and what ``settle`` makes of the outer state holds once that commits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from planaria.config.registry import Choice
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.dense import PLAIN

Weights = Mapping[str, Tensor]
"""one stage's parameters (or gradients) by local name"""
Shapes = Mapping[str, torch.Size]


Sharing = Literal["shared", "own", "estimate"]
"""Of a part of the outer state. shared: a copy of a replica takes it over, as it takes over the weights. own: it is of
this replica alone, as what rounding kept back of its messages is; a copy begins without it, and another number of
replicas with the mean of what was owed. estimate: own, but nothing that is owed; another number begins without it."""
Parts = Mapping[str, Sharing]
SECANTS = "secants"
"""the entry of a saved outer state that holds ``measured`` and ``secants``"""


@dataclass(frozen=True)
class Outer:
    """The outer state of one stage replica: everything that must be kept from round to round, and with a checkpoint.

    ``parts``: name → tensors in fp32, of the parameters' names and shapes. The exchange declares which there may be
    (:attr:`Exchange.parts`); what is missing is zero. ``rounds``: settled so far.
    """

    parts: Mapping[str, Weights] = field(default_factory=dict)
    rounds: int = 0
    secants: tuple[float, ...] = ()
    """Σ‖Δg‖² of each member over ``measured`` rounds, equal at all members (``compress/estimates.py``)"""
    measured: int = 0

    def __getitem__(self, part: str) -> Weights:
        return self.parts.get(part, {})

    def settled(self, **parts: Weights) -> Outer:
        """One round later, with these tensors in place of those of the same part and name; shares memory."""
        merged = {**self.parts, **{part: {**self[part], **new} for part, new in parts.items()}}
        return replace(self, parts=merged, rounds=self.rounds + 1)

    def copied(self, parts: Parts) -> Outer:
        """What a copy of this replica begins with: what is shared of the ``parts`` declared."""
        return replace(self, parts={part: held for part, held in self.parts.items() if parts.get(part) == "shared"})

    def state(self) -> dict[str, Tensor]:
        """Everything as plain tensors, for a checkpoint; shares memory."""
        named = {f"{part}/{name}": tensor for part, held in self.parts.items() for name, tensor in held.items()}
        measured = [float(self.measured), *self.secants]
        numbers = {SECANTS: torch.tensor(measured, dtype=torch.float64)} if self.measured else {}
        return {"rounds": torch.tensor(self.rounds), **numbers, **named}

    @classmethod
    def load(cls, state: Mapping[str, Tensor], parts: Parts) -> Outer:
        """What :meth:`state` made; shares memory. What the ``parts`` declared do not name is left out: of an exchange
        that rounded its messages when the state was saved, say, and sends them in full now.

        :raises ValueError: when it is not one.
        """
        found: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
        numbers = state.get(SECANTS, torch.zeros(1, dtype=torch.float64))
        if numbers.dtype != torch.float64 or numbers.ndim != 1 or not len(numbers):
            raise ValueError(f"{SECANTS!r} ({numbers.dtype}) is no part of an outer state")
        for key, tensor in state.items():
            part, _, name = key.partition("/")
            if key not in ("rounds", SECANTS) and (not name or tensor.dtype != torch.float32):
                raise ValueError(f"{key!r} ({tensor.dtype}) is no part of an outer state")
            if part in found:
                found[part][name] = tensor
        if "rounds" not in state or state["rounds"].numel() != 1 or state["rounds"].is_floating_point():
            raise ValueError("an outer state counts its rounds in one integer")
        measured, *secants = numbers.tolist()
        return cls(found, int(state["rounds"]), tuple(secants), int(measured))


@dataclass(frozen=True)
class Compressed:
    """What compression made of one message, in L2 norms."""

    sent_bytes: int
    dense_bytes: int
    """of the same numbers in fp32"""
    norm: float
    """‖g‖, of the exact vector"""
    lost: float
    """‖C(v) − v‖²/‖v‖² for the vector v that the message was to carry: 1 − δ as measured; 0 if it is all zeros"""
    owed: float | None = None
    """‖e‖ afterwards, where what is lost is owed"""
    off: float | None = None
    """‖g − h‖ afterwards, where others follow an estimate"""
    full: bool = False
    """sent as it is, so that estimates begin"""


@dataclass(frozen=True)
class Offer:
    """What one replica says to its group in one round. Messages are flat tensors on the CPU."""

    blocking: Tensor | None = None
    """needs the inner steps to be done: the others wait for it"""
    prefetched: Tensor | None = None
    """was known when the round before was settled: sent while the inner steps run"""
    kept: Mapping[str, Weights] = field(default_factory=dict)
    """parts of the sender's outer state once others have heard ``blocking``; stay with it, for its own ``settle``"""
    compressed: Compressed | None = None
    """what ``blocking`` lacks; None where it lacks nothing, or its norms are not finite"""


Offers = Mapping[int, Offer]
"""member → its offer of one round"""
Settled = tuple[dict[str, Tensor], Outer]
"""new fast weights and outer state"""


class Counted(NamedTuple):
    """How much offers counted in what a round came to, where that can be told."""

    coefficients: Mapping[int, float] = MappingProxyType({})
    """member → its coefficient"""
    rivals: Callable[[], Mapping[str, Mapping[int, float]]] = dict
    """works out what other rules would have counted of those that counted little: rule → member → coefficient"""


Told = Callable[[Counted], None]


class Weighs(Protocol):
    """Judges offers over all stages of a replica; each method as in ``exchange/weighing.py``."""

    @property
    def spoken(self) -> Callable[[Outer, Offers], Mapping[int, Weights]]: ...

    def products(
        self, outer: Outer, said: Mapping[int, Weights], me: int, news: Collection[int]
    ) -> Mapping[int, Mapping[int, float]]: ...

    def counted(
        self, stages: Sequence[Mapping[int, Mapping[int, float]]], members: Sequence[int], me: int, draw: int
    ) -> Counted | None: ...


class TooManyLiars(ValueError):
    """More members say what cannot be meant than a robust rule bears."""


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


def one_group(members: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all ``members`` as one group."""
    return [tuple(sorted(members))] if members else []


class Exchange(Choice, ABC):
    """One way in which the replicas of a stage agree; its fields are its options.

    Unless it says otherwise, all meet, nothing is kept from round to round, and others wait for the whole offer.
    """

    synchronised: ClassVar[bool] = False
    """do all replicas have the same outer state? Then one that misses a round must take over that of another"""
    lasting: ClassVar[tuple[str, ...]] = ()
    """options that say what the outer state means: they cannot change where a run is resumed with one"""

    @property
    @abstractmethod
    def interval(self) -> int | None:
        """Inner steps from one round to the next. None: never.

        0: in every step, before the update; then ``fast`` is the step's gradient, not the weights, everywhere below.
        """

    @property
    def overlap(self) -> int:
        """Inner steps from ``offer`` to ``settle``, while which messages travel; fewer than the interval."""
        return 0

    @property
    def prefetches(self) -> bool:
        """Is a part of each offer known as soon as the round before is settled?"""
        return False

    @property
    def parts(self) -> Parts:
        """The parts of its outer state by name, and whose each is."""
        return {}

    def codec(self, outer: Outer) -> Compressor:
        """What the blocking parts of the round after ``outer`` are encoded with (``exchange.message.pack``)."""
        return PLAIN

    @property
    def borne(self) -> int:
        """f: so many members may say what cannot be meant, and the others go on without them."""
        return 0

    @property
    def strikes(self) -> int:
        """In so many steps, or rounds, a member may be found to tell others different things, or nothing that is of
        use, before it is left out for good.

        0: it never is.
        """
        return 0

    @property
    def weighing(self) -> Weighs | None:
        """How offers are judged over all stages of a replica at once; None: each stage judges by itself."""
        return None

    def facing(self, refused: int, told: Told, counted: Counted | None = None) -> Self:
        """The same for a round in which the offers of so many members were refused: these are among its liars.

        ``told`` is told how much each of the others counts, if the exchange finds that; ``counted``: what they count,
        where others have found that.
        """
        return self

    def anew(self, outer: Outer) -> Outer:
        """What a replica goes on with whose fellow members have changed within a step."""
        return outer

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        """Who meets whom: ``members`` (any distinct ids, in any order) in groups, ids in each group in order.

        Depends on the arguments alone, so that all peers with one membership list agree without a message. A seed that
        names the stage too makes stages draw their groups apart.
        """
        return one_group(members)

    def quorum(self, members: int) -> int:
        """How many others of a group of so many a member has to hear before it settles, if the rest is silent."""
        return members - 1

    def witnessed(self, members: int) -> bool:
        """Do members tell what each has heard, so that one who tells others different things is found out?

        Where all go on with one value and there is somebody to compare with. In every step only beside a robust rule:
        where nobody is distrusted, nobody has to pay for it.
        """
        return self.synchronised and members > 2 and (self.borne > 0 or bool(self.interval))

    @property
    def equal(self) -> bool:
        """Are all members' weights the same after every step, bit for bit? Then they are compared at each save."""
        return False

    def misfit(self, members: int) -> str:
        """Why it does not work with so many replicas; empty if it does."""
        return ""

    def start(self, weights: Weights) -> Outer:
        """The outer state of a replica that starts from ``weights``, equal at all replicas; a copy.

        Who joins later starts from the slow weights of a peer.
        """
        return Outer()

    def prefetched(self, outer: Outer) -> Tensor | None:
        """The part of the next offer that ``outer`` alone determines, if there is one."""
        return None

    def speaking(self, me: int) -> Self:
        """The same as member ``me`` drives it, if its messages depend on who sends them."""
        return self

    @abstractmethod
    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        """What a replica with the state ``outer`` says once its inner steps have made ``fast``.

        ``prefetched``: what :meth:`prefetched` made of the same state, if it was asked before.
        """

    @abstractmethod
    def settle(self, outer: Outer, fast: Weights, offers: Offers, me: int) -> Settled:
        """What replica ``me`` goes on with: new fast weights, of the dtypes and devices of ``fast``, and outer state.

        What the round does not touch shares memory with what was given; nothing that was given is changed.

        ``offers`` are those of its group that came, by member id, its own among them unless that was refused; all are
        sound (:meth:`~planaria.exchange.compress.base.Compressor.flaw`). They are added up in order of id, so that two
        members who got the same offers make the same of them to the last bit. Alone, nothing is rounded.

        :raises ValueError: when a message does not have the size or type that it must have.
        """

    def apart(self, outer: Outer, offers: Offers) -> float:
        """How far the weights of these members lie apart (``exchange.message.apart``), as far as their offers tell."""
        return 0.0

    @abstractmethod
    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        """Bytes of a round in which all ``members`` replicas take part, for one stage of these shapes."""
