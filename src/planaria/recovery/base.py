"""The protocol of recovery strategies: where copies are kept, which stages donate, and how a lost stage is rebuilt.

A strategy's results depend on its numbers and tensors only; it uses no process, socket or clock, although it may
compute in threads and cache results. Engines know only these protocols, never a strategy's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from planaria.config.registry import Choice
from planaria.models.state import StageShapes, StageState
from planaria.recovery.snapshot_schedule import SnapshotSchedule

ONLY_ENDS = "the ends worker (stage 0) holds the only embedding and head"
"""reason why strategies without copies cannot rebuild stage 0, as a clause for the user"""


class Copy(NamedTuple):
    """A copy of ``sources``, or a function of them, kept by the worker of stage ``host``.

    If the host is the only source, the worker keeps its own past state. Engines replace stages by nodes
    (``Chain.slots_on_nodes``).
    """

    sources: tuple[int, ...]
    host: int
    group: int = 0
    """members of its parity group; 0: none"""

    @property
    def is_self_copy(self) -> bool:
        """Whether a worker keeps its own past state."""
        return self.sources == (self.host,)

    @property
    def members(self) -> frozenset[int]:
        """All sources and the host."""
        return frozenset((*self.sources, self.host))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs between which its messages travel, smaller number first."""
        return tuple((min(source, self.host), max(source, self.host)) for source in self.sources if source != self.host)


@dataclass(frozen=True)
class DamagedReplica:
    """A replica of ``stages`` block stages after a loss.

    ``staleness`` maps each stage to the steps committed since the worker that keeps its copies took the stage; 0
    if there is none.
    """

    stages: int
    staleness: Mapping[int, int]
    with_snapshot: frozenset[int] = frozenset()
    """stages whose worker is alive and holds its part of a retained snapshot (:class:`SnapshotSchedule`)"""


RollbackTarget = Literal["disk", "memory"]
"""past state to which all stages roll back: the newest checkpoint or the start of the run ("disk"), or a retained
snapshot ("memory")"""


@dataclass(frozen=True)
class StrategyPlan:
    """One strategy's plan for lost stages: donors, a rollback, or refusals."""

    donors: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """lost stage → surviving stages whose workers send its data"""
    refused: Mapping[int, str] = field(default_factory=dict)
    """lost stage → why it cannot be rebuilt, as a clause for the user"""
    rollback: RollbackTarget | None = None
    """target of a rollback of all stages; with "memory", stages that have donors are rebuilt as of that snapshot"""


@dataclass(frozen=True)
class RebuildInputs:
    """Inputs available to the worker that rebuilds a stage."""

    draw: Callable[[], Mapping[str, Tensor]]
    """draw new initial weights for the stage; the random numbers differ from those at the start of the run"""
    decays: Mapping[str, float]
    """decay β of each optimizer tensor that is an exponential moving average
    (``models.optimizers.Optimizer.decays``)"""
    before: StageState | None = None
    """the stage's state when it was lost; only for simulated losses (controls)"""


@dataclass(frozen=True)
class CopyCost:
    """The cost of one copy while nothing fails, as declared by its strategy; tests compare it with measured traffic.

    Message headers are not counted. Memory is what is held between steps.
    """

    step_bytes: float
    """bytes that each source sends per step, on average"""
    host_memory: int
    """bytes at the host"""
    own_memory: int = 0
    """bytes at each source's worker"""
    forward: bool = False
    """whether the host also computes the stage's forward pass, and keeps its activations until the step ends"""
    module: bool = False
    """whether the host builds the stage, with its frozen weights"""
    in_background: bool = False
    """whether it is sent in the background, behind all other traffic"""


class MachineProperties(NamedTuple):
    """Properties of a run's machines that determine the best snapshot interval."""

    members: int
    """stages of a pipeline, stage 0 included"""
    step_s: float
    state_bytes: int
    """bytes of the largest stage's state"""
    bandwidth: float
    """bytes per second of a link; infinite if the recipe sets none"""
    memory_bandwidth: float | None
    """bytes per second at which a stage copies its own state, if known"""
    hourly: float
    """probability that one member fails within an hour"""


class StrategyRequirements(NamedTuple):
    """Requirements of a strategy on the rest of a recipe."""

    routing: str = ""
    """required ``routing.kind``; empty: any"""
    why: str = ""
    """reason, as a clause for the user"""
    meanwhile: str = ""
    """required ``recovery.meanwhile``; empty: any"""
    alike: bool = False
    """whether it combines block stages, which must then have equal sequences of layers"""
    unshared: bool = False
    """whether it changes single matrices, which layers must then not share (``model.share``)"""
    one_array: bool = False
    """whether every stage must have all weights (``model.share_over = 'model'``)"""


class Recovery(Choice, ABC):
    """Base class of recovery strategies. Its fields are its options; by default it keeps no copies."""

    former_members: ClassVar[Mapping[str, str]] = {
        "open": "has_best_options", "settled": "resolve_best", "variety": "quality_key", "concerns": "helps_rebuild",
        "needs": "requirements", "give": "donate", "unfit": "pretrained_warning", "control": "control_description",
        "restored": "rebuild_copy", "retention": "snapshot_schedule",
    }  # fmt: skip
    requirements: ClassVar[StrategyRequirements] = StrategyRequirements()
    exact: ClassVar[bool] = False
    """whether rebuilt stages equal the lost ones, so that a loss costs time only"""
    pretrained_warning: ClassVar[str] = ""
    """how a lost stage of pretrained weights is rebuilt, as a clause of a warning; empty: no warning"""
    caption: ClassVar[str] = "{donors} send the weights to rebuild {stage} ({strategy})"
    """the live page's description of a rebuild; braces stand for the donors, the lost stage and the strategy's name"""
    advised_variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """variants that ``planaria advise`` weighs: suffix of the strategy's name → options; empty: the strategy only if
    the recipe selects it"""

    control_description: ClassVar[str] = ""
    """effect of a control, as a clause with a verb; impossible after a real failure. Empty for strategies"""

    @property
    def quality_key(self) -> str:
        """Options that affect the quality of rebuilt stages, as a key for records of past runs."""
        return ""

    @property
    def has_best_options(self) -> bool:
        """Whether an option is 'best' and needs :meth:`resolve_best`."""
        return False

    def resolve_best(self, machines: MachineProperties) -> Mapping[str, object]:
        """Return numbers for the options that are 'best'.

        :raises UserError: if no best value exists.
        """
        return {}

    @property
    def snapshot_schedule(self) -> SnapshotSchedule | None:
        """Schedule of the snapshots that all stages retain of the same step, or None if there are none."""
        return None

    def copies(self, stages: int) -> tuple[Copy, ...]:
        """Return the copies kept while nothing fails, for block stages 1..``stages`` and stage 0."""
        return ()

    def sender(self, copy: Copy, stage: int) -> Sender:
        """Return the sender of one of the :meth:`copies` at ``stage``, one of its sources."""
        raise LookupError(f"nothing is kept of stage {stage}")

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        """Return the holder of one of the :meth:`copies` at its host. ``originals``: its sources by stage."""
        raise LookupError(f"nothing is kept of stages {copy.sources}")

    def cost(self, copy: Copy, shapes: Mapping[int, StageShapes]) -> CopyCost:
        """Return the cost of one of the :meth:`copies`, from the parameters of its sources by stage."""
        raise LookupError(f"nothing is kept of stages {copy.sources}")

    @abstractmethod
    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        """Choose donors for the ``lost`` stages. Each is in donors or refused, unless all stages roll back."""

    def helps_rebuild(self, copy: Copy, lost: int) -> bool:
        """Return whether one of the :meth:`copies` is needed to rebuild the ``lost`` stage."""
        return lost in copy.sources

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        """Return a donor's message, made of its ``own`` stage (the default) or of its ``kept`` copies.

        ``kept`` has the copies that :meth:`helps_rebuild` selects.
        """
        return own

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        """Return the lost stage's new state from its donors' messages; by default, the only message."""
        (state,) = donated.values()
        return state

    def rebuild_copy(self, copy: Copy, donated: Mapping[int, StageState]) -> StageState | None:
        """Return the copy that the lost stage ``copy.host`` held, rebuilt from ``donated``, or None to start
        empty."""
        return None


class ScaledLearningRate(Recovery, ABC):
    """Base of strategies that rebuild a stage inexactly and then scale its learning rate."""

    lr_scale: Annotated[float, Field(gt=0)] = 1.1
    """factor on the learning rate of a rebuilt stage from then on; further rebuilds do not compound it"""


Moment = Literal["before", "after"]
""""before": made from committed state; "after": made from the step's gradient"""


class Sender:
    """Sends one copy from its stage. Both sides act in steps; nothing counts until the step is committed.

    The base class sends and keeps nothing; subclasses override the methods that they need.
    """

    restarted = True
    """whether the copy has restarted since the last committed step"""

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps."""
        return 0

    def restart(self) -> None:
        """Restart with an empty copy: the stage or its host has a new worker."""
        self.restarted = True

    def message_before_step(self, step: int, state: StageState) -> Tensor | None:
        """Return the message to send at the beginning of ``step``, if any."""
        return None

    def needs_applied_update(self, step: int) -> bool:
        """Whether :meth:`message_after_gradient` needs the state after a revocable update of ``step``."""
        return False

    def message_after_gradient(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        """Return the message to send once the clipped ``gradients`` of ``step`` (as weights, with norms) exist."""
        return None

    def commit(self, step: int) -> None:
        """Commit ``step``: its messages count."""
        self.restarted = False

    def drop(self) -> None:
        """Drop the step: its messages do not count. By default there is nothing to undo."""


class Holder(ABC):
    """Holds one copy at its host; receives the messages of the senders."""

    restarted = True
    """as of the senders"""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes kept between steps."""

    def restart(self) -> None:
        """Restart like the senders; keep the copy until a newer one is complete."""
        self.restarted = True

    @abstractmethod
    def expects(self, step: int) -> tuple[Moment, ...]:
        """Return the messages that each source sends in ``step``."""

    @abstractmethod
    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        """Take one message from the stage ``source``.

        :raises ValueError: if the message is malformed.
        """

    def on_forward_output(self, microbatch: int, x: Tensor) -> None:
        """Process the host's forward output ``x`` for a copied stage; ignore it by default."""
        return

    @abstractmethod
    def commit(self, step: int) -> None:
        """Commit ``step``: its messages count."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the step: its messages do not count."""

    @abstractmethod
    def state(self) -> StageState:
        """Return the part of the copy that the host can send; shares memory."""


class RestoredHolder(Holder):
    """The holder of a strategy with :class:`SnapshotSchedule`; :meth:`Recovery.rebuild_copy` rebuilds its copy."""

    @property
    @abstractmethod
    def retained(self) -> int:
        """The step of :meth:`state`; -1: none."""

    @abstractmethod
    def intact(self) -> bool:
        """Whether the bytes of :meth:`state` are unchanged since they were kept."""

    @abstractmethod
    def load(self, state: StageState, step: int) -> None:
        """Hold ``state``, as of ``step``."""


def numel(shapes: Mapping[str, torch.Size]) -> int:
    """Return the number of elements in tensors of these shapes."""
    return sum(shape.numel() for shape in shapes.values())


class Original(Protocol):
    """A holder's access to the stage that it copies."""

    @property
    def shapes(self) -> StageShapes:
        """The stage's parameters by local name."""
        ...

    @property
    def device(self) -> str:
        """The device that trains, 'cpu' or 'cuda'."""
        ...

    def twin(self) -> Twin:
        """Return a second runner of the stage; its state must be loaded before use."""
        ...


class Twin(Protocol):
    """A second runner of a stage, with weights and optimizer, at another worker."""

    @property
    def nbytes(self) -> int: ...

    def load(self, state: StageState) -> None: ...

    def state(self) -> StageState: ...

    def forward_copy(self, microbatch: int, x: Tensor) -> None:
        """Compute the stage's forward pass on ``x`` and keep its activations until :meth:`drop`."""
        ...

    def apply(self, step: int, gradients: StageState) -> None:
        """Apply ``gradients`` (as weights, with norms) as the stage does in ``step``."""
        ...

    def drop(self) -> None: ...
