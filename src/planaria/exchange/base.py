"""Interface of exchanges: when replicas of a stage meet, in which groups, and how they combine updates.

An exchange is pure: it maps tensors and numbers to tensors and numbers, without processes, sockets or clocks. It does
not depend on the number of inner steps since the previous round, so replicas may take different numbers. After
arXiv 2506.10911, *fast* weights θ are those the inner optimizer trains and *slow* weights φ are those replicas share.

A round takes place every ``interval`` inner steps:

1. After the previous round, the group of this round is known (``groups``) and ``prefetched`` can be sent.
2. After the inner steps, each replica makes its update (``update``) and sends the ``blocking`` part to its group.
3. After ``overlap`` more inner steps, ``settle`` combines the updates that arrived; a replica that received none
   settles with its own alone.

Nothing changes before ``settle``, so a cancelled round has no effect. In an exchange of gradients (``interval`` = 0) a
round lies within a step; its outer state takes effect when the step commits.
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
from planaria.exchange.compress.dense import UNCOMPRESSED

Weights = Mapping[str, Tensor]
"""one stage's parameters (or gradients) by local name"""
Shapes = Mapping[str, torch.Size]


Sharing = Literal["shared", "own", "estimate"]
"""Sharing of a part of the outer state. shared: equal at all replicas; a copy of a replica takes it over. own: belongs
to this replica, such as its rounding residual; a copy starts without it, and a different number of replicas starts with
the mean. estimate: like own, but it carries nothing that must not be lost, so a different number of replicas starts
without it.
"""
Parts = Mapping[str, Sharing]
SECANTS = "secants"
"""entry of a saved outer state with ``measured`` and ``secants``"""


@dataclass(frozen=True)
class StageOuterState:
    """Outer state of one stage replica, which checkpoints keep between rounds.

    ``parts``: name → fp32 tensors with the parameters' names and shapes. :attr:`Exchange.parts` declares the names; a
    missing part is zero. ``rounds``: number of completed rounds.
    """

    parts: Mapping[str, Weights] = field(default_factory=dict)
    rounds: int = 0
    secants: tuple[float, ...] = ()
    """Σ‖Δg‖² of each member over ``measured`` rounds, equal at all members (``compress/estimates.py``)"""
    measured: int = 0

    def __getitem__(self, part: str) -> Weights:
        return self.parts.get(part, {})

    def settled(self, **parts: Weights) -> StageOuterState:
        """Return the state one round later; tensors in ``parts`` replace those of the same name. Memory is shared."""
        merged = {**self.parts, **{part: {**self[part], **new} for part, new in parts.items()}}
        return replace(self, parts=merged, rounds=self.rounds + 1)

    def for_copy(self, parts: Parts) -> StageOuterState:
        """Return the state that a copy of this replica starts with: the shared ones of the declared ``parts``."""
        return replace(self, parts={name: part for name, part in self.parts.items() if parts.get(name) == "shared"})

    def state(self) -> dict[str, Tensor]:
        """Return the state as plain tensors for a checkpoint; shares memory."""
        named = {f"{part}/{name}": tensor for part, weights in self.parts.items() for name, tensor in weights.items()}
        measured = [float(self.measured), *self.secants]
        numbers = {SECANTS: torch.tensor(measured, dtype=torch.float64)} if self.measured else {}
        return {"rounds": torch.tensor(self.rounds), **numbers, **named}

    @classmethod
    def load(cls, state: Mapping[str, Tensor], parts: Parts) -> StageOuterState:
        """Return the outer state that :meth:`state` saved, restricted to the declared ``parts``; shares memory.

        :raises ValueError: if ``state`` is not a saved outer state.
        """
        tensors: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
        numbers = state.get(SECANTS, torch.zeros(1, dtype=torch.float64))
        if numbers.dtype != torch.float64 or numbers.ndim != 1 or not len(numbers):
            raise ValueError(f"{SECANTS!r} ({numbers.dtype}) is not part of an outer state")
        for key, tensor in state.items():
            part, _, name = key.partition("/")
            if key not in ("rounds", SECANTS) and (not name or tensor.dtype != torch.float32):
                raise ValueError(f"{key!r} ({tensor.dtype}) is not part of an outer state")
            if part in tensors:
                tensors[part][name] = tensor
        if "rounds" not in state or state["rounds"].numel() != 1 or state["rounds"].is_floating_point():
            raise ValueError("an outer state counts its rounds in one integer")
        measured, *secants = numbers.tolist()
        return cls(tensors, int(state["rounds"]), tuple(secants), int(measured))


@dataclass(frozen=True)
class CompressionEffect:
    """Effect of compression on one message, in L2 norms."""

    sent_bytes: int
    dense_bytes: int
    """size of the same numbers in fp32"""
    norm: float
    """‖g‖ of the exact vector"""
    relative_error: float
    """relative squared error ‖C(v) − v‖²/‖v‖² of the encoded vector v, that is, the measured 1 − δ; 0 if v is zero"""
    residual: float | None = None
    """‖e‖ of the residual after encoding, if the feedback keeps one"""
    estimate_error: float | None = None
    """‖g − h‖ after encoding, if the feedback keeps an estimate h"""
    full: bool = False
    """sent uncompressed, to initialise estimates"""


@dataclass(frozen=True)
class Update:
    """One replica's update in a round. Messages are flat CPU tensors."""

    blocking: Tensor | None = None
    """the part that depends on the inner steps; other members wait for it"""
    prefetched: Tensor | None = None
    """the part known after the previous round; sent during the inner steps"""
    kept: Mapping[str, Weights] = field(default_factory=dict)
    """parts of the sender's outer state that take effect if others receive ``blocking``; never sent"""
    compressed: CompressionEffect | None = None
    """effect of compression on ``blocking``, or None if nothing is lost or a norm is not finite"""


Updates = Mapping[int, Update]
"""member → its update in one round"""
Settled = tuple[dict[str, Tensor], StageOuterState]
"""new fast weights and outer state"""


class UpdateWeights(NamedTuple):
    """Weight of each update in the result of a round, where the rule determines one."""

    coefficients: Mapping[int, float] = MappingProxyType({})
    """member → its coefficient"""
    rivals: Callable[[], Mapping[str, Mapping[int, float]]] = dict
    """computes, for members with small coefficients, those under other rules: rule → member → coefficient"""


OnWeights = Callable[[UpdateWeights], None]


class UpdateWeigher(Protocol):
    """Computes the weights of updates over all stages of a replica; methods as in ``exchange/robust/weighing.py``."""

    @property
    def decoded_values(self) -> Callable[[StageOuterState, Updates], Mapping[int, Weights]]: ...

    def products(
        self, outer: StageOuterState, decoded: Mapping[int, Weights], me: int, new: Collection[int]
    ) -> Mapping[int, Mapping[int, float]]: ...

    def update_weights(
        self, stages: Sequence[Mapping[int, Mapping[int, float]]], members: Sequence[int], me: int, draw: int
    ) -> UpdateWeights | None: ...


class TooManyByzantine(ValueError):
    """Raised if a round has more invalid updates than its robust rule tolerates."""


@dataclass(frozen=True)
class ExchangeCost:
    """Mean bytes that a replica sends per round if every member sends to every other member of its group.

    Excludes message headers. If only the group's mean is needed, a ring sends 2(n − 1)/n of an update instead of n − 1,
    but then members do not see single updates.
    """

    critical: float
    """bytes that another member waits for"""
    total: float


def round_cost(groups: Sequence[tuple[int, ...]], blocking: float, prefetched: float = 0.0) -> ExchangeCost:
    """Return the mean cost per member of ``groups`` for an update of these sizes, in bytes."""
    peers = sum(len(group) * (len(group) - 1) for group in groups) / sum(map(len, groups))
    return ExchangeCost(peers * blocking, peers * (blocking + prefetched))


def one_group(members: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all ``members`` as one group."""
    return [tuple(sorted(members))] if members else []


class Exchange(Choice, ABC):
    """A method by which the replicas of a stage agree; its fields are its options.

    By default, all replicas form one group, there is no outer state, and members wait for whole updates.
    """

    former_members: ClassVar[Mapping[str, str]] = {
        "anew": "after_member_change", "apart": "spread", "lasting": "fixed_on_resume",
        "witnessed": "detects_equivocation", "objection": "why_unsupported", "equal": "bit_identical",
        "update_weights": "contribution_weights",
    }  # fmt: skip
    synchronised: ClassVar[bool] = False
    """whether all replicas share one outer state, so that a replica that missed a round must copy another's"""
    decoupled: ClassVar[bool] = False
    """whether a round begins once :meth:`quorum` other replicas are due, and all replicas take part between their
    steps; needs an overlap, and ``synchronised``"""
    fixed_on_resume: ClassVar[tuple[str, ...]] = ()
    """options that define the outer state; they cannot change when a run resumes"""

    @property
    @abstractmethod
    def interval(self) -> int | None:
        """Inner steps between rounds, or None if there are no rounds.

        With 0, each step has a round before its update, and ``fast`` is the step's gradient in every method.
        """

    @property
    def exchanges_gradients(self) -> bool:
        """Whether each step has a round, of gradients: the interval is 0."""
        return self.interval == 0

    @property
    def has_rounds(self) -> bool:
        """Whether a round takes place every few steps: the interval is 1 or more."""
        return bool(self.interval)

    @property
    def overlap(self) -> int:
        """Inner steps between ``update`` and ``settle`` while messages travel; fewer than the interval."""
        return 0

    @property
    def cycle(self) -> int:
        """Number of rounds after which the same weights have a round again."""
        return 1

    @property
    def prefetches(self) -> bool:
        """Whether a part of each update is known after the previous round."""
        return False

    @property
    def has_blocking_part(self) -> bool:
        """Whether updates have a part that depends on the inner steps; attacks corrupt that part."""
        return True

    @property
    def parts(self) -> Parts:
        """Parts of the outer state, by name."""
        return {}

    def codec(self, outer: StageOuterState) -> Compressor:
        """Return the codec for the blocking parts of the round after ``outer`` (``exchange.weight_message.pack``)."""
        return UNCOMPRESSED

    @property
    def tolerated(self) -> int:
        """f: the number of Byzantine members that the rule tolerates."""
        return 0

    @property
    def strikes(self) -> int:
        """Number of steps or rounds with equivocation or invalid updates after which a member is removed permanently;
        0: never.
        """
        return 0

    @property
    def weighing(self) -> UpdateWeigher | None:
        """Weigher of updates over all stages of a replica, or None if each stage weights its own updates."""
        return None

    def after_rejecting(self, rejected: int, on_weights: OnWeights, known_weights: UpdateWeights | None = None) -> Self:
        """Return the exchange for a round in which ``rejected`` members' updates were rejected; they count as
        Byzantine.

        :param on_weights: receives the weight of each remaining update, if the rule determines one.
        :param known_weights: these weights, if they were computed elsewhere.
        """
        return self

    def after_member_change(self, outer: StageOuterState) -> StageOuterState:
        """Return the outer state after members joined or left within a step."""
        return outer

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        """Partition ``members`` (distinct ids in any order) into groups; ids in each group ascend.

        Depends only on the arguments, so that peers with the same membership agree without messages. A seed that
        includes the stage gives each stage its own groups.
        """
        return one_group(members)

    def quorum(self, members: int) -> int:
        """Number of other members of a group that a member must receive before it may settle without the rest."""
        return members - 1

    def contribution_weights(self, steps: Mapping[int, int]) -> dict[int, float]:
        """Return the weight of each update in a decoupled round; empty: they are equal.

        :param steps: member → inner steps since it received the weights of this round.
        """
        return {}

    def detects_equivocation(self, members: int) -> bool:
        """Whether members report digests of what they received, which exposes equivocation.

        True for exchanges with one shared value and more than two members; in exchanges of gradients only with a robust
        rule.
        """
        return self.synchronised and members > 2 and (self.tolerated > 0 or self.has_rounds)

    @property
    def bit_identical(self) -> bool:
        """Whether all members' weights are bit-identical after every step; if so, saves compare them."""
        return False

    def why_unsupported(self, members: int) -> str:
        """Return why the exchange does not support this number of replicas, or an empty string if it does."""
        return ""

    def start(self, weights: Weights) -> StageOuterState:
        """Return the outer state of a replica that starts from ``weights``, equal at all replicas; a copy.

        A replica that joins later starts from a peer's slow weights.
        """
        return StageOuterState()

    def prefetched(self, outer: StageOuterState) -> Tensor | None:
        """Return the part of the next update that depends on ``outer`` alone, if any."""
        return None

    def for_sender(self, me: int) -> Self:
        """Return the exchange for the sender ``me``, if its messages depend on the sender."""
        return self

    @abstractmethod
    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        """Return a replica's update after its inner steps produced ``fast``.

        :param prefetched: the result of :meth:`prefetched` for the same state, if already computed.
        """

    @abstractmethod
    def settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        """Return replica ``me``'s new fast weights (dtypes and devices of ``fast``) and outer state.

        Unchanged tensors share memory with the arguments; arguments are not modified.

        :param updates: valid updates of the group by member (``Compressor.invalid_reason``), including its own unless
            that was rejected. They are summed in order of id, so that members with the same updates get bit-identical
            results. A single update is not rounded, unless its compressor has no error feedback.
        :raises ValueError: if a message has the wrong size or dtype.
        """

    def catch_up(self, outer: StageOuterState, fast: Weights, latest: StageOuterState) -> Settled:
        """Return the fast weights and outer state of a decoupled replica after the rounds that it missed.

        :param latest: another replica's shared state, at least as many rounds later
        """
        raise NotImplementedError

    def spread(self, outer: StageOuterState, updates: Updates) -> float:
        """Return the spread of these members' weights (``weight_message.rms_spread``), if updates determine it."""
        return 0.0

    @abstractmethod
    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        """Return the bytes of a round of all ``members`` replicas for one stage with these shapes."""
