"""What every recovery strategy answers: what it keeps where before anything fails, who helps to rebuild, and how.

A strategy is pure: numbers and tensors in, numbers and tensors out. It never touches a process, a socket or a clock.
The engine knows these protocols and never a strategy's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from planaria.config.registry import Choice
from planaria.models.state import Shapes, StageState
from planaria.recovery.retention import Retention


class Copy(NamedTuple):
    """What the worker of stage ``host`` keeps beside its own stage, and of which stages: of one, or a function of many.

    Where the host is the only source, it is what a worker remembers of its own past. Engines put nodes in place of
    stages (``Chain.placed``).
    """

    sources: tuple[int, ...]
    host: int
    group: int = 0
    """members of the parity group to which it belongs; 0: none"""

    @property
    def own(self) -> bool:
        """Is it what a worker remembers itself?"""
        return self.sources == (self.host,)

    @property
    def members(self) -> frozenset[int]:
        """All that have a part in it."""
        return frozenset((*self.sources, self.host))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Those between which its messages travel, the smaller number first."""
        return tuple((min(source, self.host), max(source, self.host)) for source in self.sources if source != self.host)


@dataclass(frozen=True)
class Replica:
    """How a replica of ``stages`` block stages stands when some are lost.

    ``ages`` counts, for every stage, the steps committed since the worker that keeps its copies got the stage; 0 where
    there is none.
    """

    stages: int
    ages: Mapping[int, int]
    remember: frozenset[int] = frozenset()
    """stages whose worker lives and has its part of what a strategy with a :class:`Retention` retains"""


RollbackTo = Literal["disk", "memory"]
"""where a state of the past lies that all stages can go back to; on disk: the newest checkpoint, or the beginning; in
memory: what all remember"""


@dataclass(frozen=True)
class Answer:
    """What one strategy can do about lost stages."""

    donors: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """lost stage → the surviving stages whose workers give what it is rebuilt from"""
    refused: Mapping[int, str] = field(default_factory=dict)
    """lost stage → why it is out of reach, as a clause for the user"""
    rollback: RollbackTo | None = None
    """all stages go back to the newest state of this kind; to one in memory, those with donors as rebuilt from them"""


@dataclass(frozen=True)
class Workshop:
    """What the worker that rebuilds a stage has at hand."""

    draw: Callable[[], Mapping[str, Tensor]]
    """new weights for the stage, drawn as at the beginning of a run but with other random numbers"""
    decays: Mapping[str, float]
    """β of the optimizer's tensors that are exponential means (``models.optimizers.Optimizer.decays``)"""
    before: StageState | None = None
    """the stage's state as it was lost, for controls: only where the loss was simulated"""


@dataclass(frozen=True)
class CopyCost:
    """What one copy costs while nothing fails, as its strategy states it; held against what engines really move.

    Message headers are not counted. Memory is what is held between steps.
    """

    step_bytes: float
    """sent in one step by each source, as the mean over many"""
    host_memory: int
    """bytes at the host"""
    own_memory: int = 0
    """bytes at the worker of each source"""
    forward: bool = False
    """the host computes the stage's forward pass too"""
    beside: bool = False
    """is it sent while the step computes, and lets everything else pass?"""


class Machines(NamedTuple):
    """What a run's machines are like, as far as the best interval of something depends on it."""

    members: int
    """of a pipeline, the ends among them"""
    step_s: float
    state_bytes: int
    """of the largest stage"""
    bandwidth: float
    """bytes per second of a link; infinite where the recipe gives none"""
    memory_bandwidth: float | None
    """bytes per second at which a stage copies its own state, where it is known"""
    hourly: float
    """probability that one member fails within an hour"""


class Needs(NamedTuple):
    """What a strategy needs of the rest of a recipe."""

    routing: str = ""
    """the only kind of routing with which it works; any, unless said"""
    why: str = ""
    """as a clause for the user"""
    meanwhile: str = ""
    """the only ``recovery.meanwhile`` with which it works; any, unless said"""
    alike: bool = False
    """does it make one block stage of others, which must be of as many layers?"""


class Recovery(Choice, ABC):
    """One way of coping with lost stages; its fields are its options. Nothing is kept unless it says so."""

    needs: ClassVar[Needs] = Needs()
    exact: ClassVar[bool] = False
    """is what is rebuilt what was lost, so that losses cost time and no learning?"""
    unfit: ClassVar[str] = ""
    """what it makes of a lost stage of weights that were trained without it, as a clause; empty: nothing to warn of"""

    control: ClassVar[str] = ""
    """what it does that nothing can after a real death, as a clause; empty: it copes with real ones"""

    @property
    def variety(self) -> str:
        """What of its options makes its rebuilt stages better or worse, for those who remember past races."""
        return ""

    @property
    def open(self) -> bool:
        """Does an option say 'best', for which :meth:`settled` has a number?"""
        return False

    def settled(self, at: Machines) -> Mapping[str, object]:
        """Options as numbers that say 'best'.

        :raises UserError: when nothing is best there.
        """
        return {}

    @property
    def retention(self) -> Retention | None:
        """How often all stages together remember their state, if they do; what is kept is of that state then."""
        return None

    def copies(self, stages: int) -> tuple[Copy, ...]:
        """What is kept where while nothing fails, for block stages 1..``stages`` and the ends (0)."""
        return ()

    def sender(self, copy: Copy, stage: int) -> Sender:
        """What sends of ``stage``, one of the sources of one of the :meth:`copies`."""
        raise LookupError(f"nothing is kept of stage {stage}")

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        """What keeps one of the :meth:`copies` at its host; ``originals`` are its sources by stage."""
        raise LookupError(f"nothing is kept of stages {copy.sources}")

    def cost(self, copy: Copy, shapes: Mapping[int, Shapes]) -> CopyCost:
        """What one of the :meth:`copies` costs, given the parameters of its sources by stage."""
        raise LookupError(f"nothing is kept of stages {copy.sources}")

    @abstractmethod
    def donors(self, lost: frozenset[int], replica: Replica) -> Answer:
        """Who gives what the ``lost`` stages are rebuilt from; each is in donors or refused, unless all roll back."""

    def concerns(self, copy: Copy, lost: int) -> bool:
        """Is one of the :meth:`copies` of use to the ``lost`` stage?"""
        return lost in copy.sources

    @abstractmethod
    def give(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        """What a donor sends: of its ``own`` stage, or of the copies that it ``kept`` which :meth:`concerns`."""

    @abstractmethod
    def rebuild(self, stage: int, given: Mapping[int, StageState], at: Workshop) -> StageState:
        """The lost stage's new state from what its donors gave."""

    def restored(self, copy: Copy, given: Mapping[int, StageState]) -> StageState | None:
        """What the lost stage ``copy.host`` kept there, from the same; None: nothing, its copies begin anew."""
        return None


Moment = Literal["before", "after"]
"""of a step's computation: a message of ``before`` is made from committed state, one of ``after`` from the gradient"""


class Sender(Protocol):
    """Lives beside a stage that is copied. Both sides act in steps: nothing counts until the step is committed.

    A subclass sends nothing and holds nothing, except where it overrides a method.
    """

    @property
    def nbytes(self) -> int:
        """Memory that it holds between steps."""
        return 0

    def restart(self) -> None:
        """The stage or its host has a new holder: nothing that was sent so far may be built upon."""
        ...

    def before(self, step: int, state: StageState) -> Tensor | None:
        """What to send at the beginning of ``step``."""
        return None

    def updates_first(self, step: int) -> bool:
        """Must the update of ``step`` be applied, revocably, before :meth:`after` is asked?"""
        return False

    def after(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        """What to send once the clipped ``gradients`` of ``step`` (as weights, with their norms) are whole."""
        return None

    def commit(self, step: int) -> None:
        """``step`` is committed: what was sent counts."""
        ...

    def drop(self) -> None:
        """The step is dropped: what was sent never was. By default there is nothing to take back."""
        return


class Holder(Protocol):
    """Lives at the host. Takes exactly what the senders' rules make them send."""

    @property
    def nbytes(self) -> int:
        """Memory that it holds between steps."""
        ...

    def restart(self) -> None:
        """As for the senders; what is held stays until something newer is whole."""
        ...

    def expects(self, step: int) -> tuple[Moment, ...]:
        """The messages of ``step`` from each source."""
        ...

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        """One of them, from the stage ``source``.

        :raises ValueError: when it is not what the sender's rules make.
        """
        ...

    def passes(self, microbatch: int, x: Tensor) -> None:
        """The host has just computed ``x``, which it sends to a copied stage. By default it is not used."""
        return

    def commit(self, step: int) -> None: ...

    def drop(self) -> None: ...

    def state(self) -> StageState:
        """What the host can give of what it keeps; shares memory."""
        ...


@runtime_checkable
class RestoredHolder(Holder, Protocol):
    """The holder of a strategy with a :class:`Retention`, which brings back what was kept, too
    (:meth:`Recovery.restored`)."""

    @property
    def retained(self) -> int:
        """The step of which :meth:`state` is; -1: none yet."""
        ...

    def intact(self) -> bool:
        """Is what :meth:`state` is to give what it was when it was kept?"""
        ...

    def load(self, state: StageState, step: int) -> None:
        """Keep what :meth:`state` is to give, as of ``step``."""
        ...


def numel(shapes: Mapping[str, torch.Size]) -> int:
    """Numbers in tensors of these shapes."""
    return sum(shape.numel() for shape in shapes.values())


class Original(Protocol):
    """What a keeper may know of the stage that it copies."""

    @property
    def shapes(self) -> Shapes:
        """Its parameters by local name."""
        ...

    def twin(self) -> Twin:
        """A second runner of it; whatever its state is, it is about to be loaded."""
        ...


class Twin(Protocol):
    """A second runner of a stage: its weights and optimizer, at another worker."""

    @property
    def nbytes(self) -> int: ...

    def load(self, state: StageState) -> None: ...

    def state(self) -> StageState: ...

    def shadow(self, microbatch: int, x: Tensor) -> None:
        """Compute the stage's forward of ``x`` and keep what its backward would need, until :meth:`drop`."""
        ...

    def apply(self, step: int, gradients: StageState) -> None:
        """Update with these gradients (as weights, with their norms) as the stage itself does in ``step``."""
        ...

    def drop(self) -> None: ...
