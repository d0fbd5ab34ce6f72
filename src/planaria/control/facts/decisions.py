"""Decisions of the controller, as plain data.

``control.decide`` derives them from the run's state alone, so that a log can be replayed. Workers receive some of them
as orders (``control/facts/orders.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeGuard, get_args

from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

from planaria.control.facts.events import Fact, Mode
from planaria.control.facts.measurements import SlowLink as SlowLink
from planaria.control.facts.members import PEER as PEER
from planaria.control.facts.members import PREDECESSOR as PREDECESSOR
from planaria.control.facts.members import CatchUp as CatchUp
from planaria.control.facts.members import Fresh as Fresh
from planaria.control.facts.members import Handover as Handover
from planaria.control.facts.members import Keep as Keep
from planaria.control.facts.members import Load as Load
from planaria.control.facts.members import Member as Member
from planaria.control.facts.members import MemberLink as MemberLink
from planaria.control.facts.members import Rebuild as Rebuild
from planaria.control.facts.members import Recall as Recall
from planaria.control.facts.members import Source as Source
from planaria.control.facts.members import state_link as state_link
from planaria.control.facts.rounds import Adopt as Adopt
from planaria.control.facts.rounds import BeginRound as BeginRound
from planaria.control.facts.rounds import DrawGroups as DrawGroups
from planaria.control.facts.rounds import OpenPrefetchLinks as OpenPrefetchLinks
from planaria.control.facts.rounds import Settle as Settle
from planaria.control.facts.run_started import ReplicaPosition
from planaria.control.facts.slowness import Cleared as Cleared
from planaria.control.facts.slowness import HandOverSlowStage as HandOverSlowStage
from planaria.control.facts.slowness import Reroute as Reroute
from planaria.control.facts.slowness import SlowPartFound as SlowPartFound
from planaria.exchange.coded.coded_facts import CloseRound

Outcome = Literal["started", "recovered", "relinked", "handed over", "rolled back", "recalled", "skipping"]
"""how a generation continues: from new state, with rebuilt nodes, over new links, with nodes of leaving workers, from a
checkpoint, from a snapshot in memory, or without its vacant nodes"""


class Save(Fact):
    """Write every stage into an unfinished checkpoint folder."""

    kind: Literal["save"] = "save"
    interrupts: ClassVar[bool] = True
    replica: int = 0
    generation: int
    step: int
    whole: list[int] = Field(default_factory=list)
    """nodes that save their stage's weights, while its other nodes save only their outer state; empty: all nodes save
    weights"""
    compared: list[int] = Field(default_factory=list)
    """further nodes that report the digest of their weights, since the nodes of a stage must have equal weights; a node
    writes its weights only as ``whole`` specifies"""
    background: bool = False
    """whether training continues as soon as all workers hold a copy of the state to write"""


class UnequalReplicas(Fact):
    """Replicas whose weights of a stage must be bit-identical differed when they were saved.

    A machine computes incorrect results or, like another processor model, rounds differently.
    """

    stage: int
    replicas: list[int]
    """compared replicas"""
    differing: list[int]
    """those that differ from more than half of at least three; empty without such a majority"""


class Seal(Fact):
    """All stages are written: publish the checkpoint under its name, atomically."""

    kind: Literal["seal"] = "seal"
    step: int
    folder: str
    stages: list[int]
    partial: bool = False
    positions: dict[int, ReplicaPosition] = Field(default_factory=dict)
    """positions of several replicas when they were saved"""
    first_block: int = 0
    """all blocks of samples before this one were used"""
    blocks_ahead: list[int] = Field(default_factory=list)
    """further used blocks above these"""
    digests: dict[int, dict[str, str]] = Field(default_factory=dict)
    """replica → file → SHA-256 reported by its writer"""
    unequal: list[UnequalReplicas] = Field(default_factory=list)
    """stages whose replicas differ although they must be equal"""


class Discard(Fact):
    """A checkpoint could not be saved: remove its files to free disk space."""

    kind: Literal["discard"] = "discard"
    step: int
    """the checkpoint's name"""


class Spawn(Fact):
    """Start a worker process."""

    kind: Literal["spawn"] = "spawn"
    worker: str
    incarnation: int
    host: str = ""
    """a joined machine; empty for the run's own"""


class Release(Fact):
    """A leaving worker no longer holds a stage: it exits."""

    kind: Literal["release"] = "release"
    worker: str


class RemoveMachine(Fact):
    """A joined machine is unusable; its workers leave with it."""

    kind: Literal["remove_machine"] = "remove_machine"
    host: str
    reason: str


class Form(Fact):
    """Start a new generation of a replica. All workers drop work in progress and continue from ``step``.

    Nodes without a member are skipped.
    """

    kind: Literal["form"] = "form"
    interrupts: ClassVar[bool] = True
    replica: int = 0
    generation: int
    step: int
    outcome: Outcome
    members: list[Member]
    links: list[MemberLink]
    routes: list[list[int]] = Field(default_factory=list)
    """nodes that each microbatch of a step visits, with a schedule; otherwise the recipe's routing applies"""
    rounds: int = 0
    """rounds of the exchange that the replica has completed"""
    inner: int = 0
    """steps since the last round"""

    @property
    def is_rollback(self) -> bool:
        """Whether it undoes steps: all stages return to a checkpoint or a snapshot."""
        return self.outcome in ("rolled back", "recalled")

    @property
    def holders(self) -> dict[int, str]:
        """Node → its holder from now on."""
        return {member.node: member.worker for member in self.members}

    @property
    def handover_from(self) -> dict[int, str]:
        """Node → the worker that hands its state over unchanged."""
        return {member.node: member.source.worker for member in self.members if isinstance(member.source, Handover)}


class Replan(Fact):
    """Find routes for the remaining nodes."""

    kind: Literal["replan"] = "replan"
    replica: int = 0
    nodes: list[int]
    links: list[SlowLink] = Field(default_factory=list)
    """slow links to take into account"""


class RunStep(Fact):
    """Run the plan of one training step or validation."""

    kind: Literal["run_step"] = "run_step"
    replica: int = 0
    generation: int
    step: int
    """steps that the replica has committed before"""
    mode: Mode = "train"
    block: int = 0
    """training: the number of the step's block of samples"""
    left_out: dict[int, str] = Field(default_factory=dict)
    """replicas whose gradients are excluded, with the reason"""


class LeaveOut(Fact):
    """Replicas equivocated in a step: drop it and repeat it without their gradients."""

    kind: Literal["leave_out"] = "leave_out"
    replica: int = 0
    generation: int
    step: int
    byzantine: list[int]
    """Byzantine replicas"""
    disputes: list[tuple[int, int]]
    """pairs of replicas of which at least one is Byzantine: sender and receiver whose digests differ"""


class Commit(Fact):
    """Every stage has its gradient: apply the update, at the learning rate of ``progress``."""

    kind: Literal["commit"] = "commit"
    replica: int = 0
    generation: int
    step: int
    progress: int
    """the run's step to which the block of samples belongs"""
    next_block: int | None = None
    """block of the next step, if nothing else comes first (``reserve_blocks``)"""

    @model_serializer(mode="wrap")
    def _without_none(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialise(self).items() if value is not None}


class Disband(Fact):
    """A replica cannot continue while others can: its workers become spares."""

    kind: Literal["disband"] = "disband"
    interrupts: ClassVar[bool] = True
    replica: int
    workers: list[str]
    reason: str


class ExcludeMember(Fact):
    """A replica's updates, or one worker's messages, were invalid too often: the workers leave and are replaced."""

    kind: Literal["exclude_member"] = "exclude_member"
    member: int
    """its number among the members of the exchange, or that of the worker's replica"""
    workers: list[str]
    strikes: int
    """steps, rounds or repetitions with proof"""
    reason: str
    accuser: str = ""
    """worker that rejected another's messages; empty: updates were invalid"""

    @property
    def subject(self) -> str:
        """Name of what is excluded."""
        return f"worker {self.workers[0]}" if self.accuser else f"replica {self.member}"


class ReplicaRestarted(Fact):
    """There are workers for a disbanded replica: it restarts as a copy of another one."""

    kind: Literal["replica_restarted"] = "replica_restarted"
    replica: int


class Unrecoverable(Fact):
    """The recovery strategy cannot rebuild the lost stages: save the others, then stop."""

    kind: Literal["unrecoverable"] = "unrecoverable"
    replica: int = 0
    lost: list[int]
    reason: str


class Finish(Fact):
    """The run is over; every worker leaves."""

    kind: Literal["finish"] = "finish"
    outcome: Literal["finished", "stopped", "cannot", "failed"]
    reason: str = ""
    detail: str = ""
    """cause that prevented progress when the run was stopped"""


Decision = Annotated[
    Spawn
    | Release
    | RemoveMachine
    | Form
    | Replan
    | RunStep
    | LeaveOut
    | Commit
    | CloseRound
    | SlowPartFound
    | Cleared
    | HandOverSlowStage
    | Reroute
    | DrawGroups
    | OpenPrefetchLinks
    | BeginRound
    | Settle
    | Adopt
    | Disband
    | ExcludeMember
    | ReplicaRestarted
    | Save
    | Seal
    | Discard
    | Unrecoverable
    | Finish,
    Field(discriminator="kind"),
]
_DECISIONS: tuple[type[Fact], ...] = get_args(get_args(Decision)[0])
DECISION: TypeAdapter[Decision] = TypeAdapter(Decision)


def is_decision(fact: Fact) -> TypeGuard[Decision]:
    """Return whether a fact of a log is a decision; the others are events."""
    return isinstance(fact, _DECISIONS)
