"""What is to be done: the decisions of the controller, as plain data.

``control.decide`` makes them from the state of the run alone, so that a log can be replayed; workers receive
:class:`Form`, :class:`RunStep`, :class:`Commit`, :class:`Save` and :class:`Leave` as their orders.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter

from planaria.control.events import Fact, Mode
from planaria.control.feature_facts import Ordered
from planaria.control.gauges import SlowLink as SlowLink
from planaria.control.members import BEFORE as BEFORE
from planaria.control.members import PEER as PEER
from planaria.control.members import Adopt as Adopt
from planaria.control.members import DrawGroups as DrawGroups
from planaria.control.members import Fresh as Fresh
from planaria.control.members import Handover as Handover
from planaria.control.members import Introduce as Introduce
from planaria.control.members import Keep as Keep
from planaria.control.members import Link as Link
from planaria.control.members import Load as Load
from planaria.control.members import Meet as Meet
from planaria.control.members import Member as Member
from planaria.control.members import Rebuild as Rebuild
from planaria.control.members import Recall as Recall
from planaria.control.members import Settle as Settle
from planaria.control.members import Source as Source
from planaria.control.members import state_link as state_link
from planaria.control.started import Standing
from planaria.control.verdicts import Blamed as Blamed
from planaria.control.verdicts import Cleared as Cleared
from planaria.control.verdicts import Relieve as Relieve
from planaria.control.verdicts import Reroute as Reroute
from planaria.control.verdicts import Unequal as Unequal


class Save(Fact):
    """Write every stage into an unfinished checkpoint folder."""

    kind: Literal["save"] = "save"
    interrupts: ClassVar[bool] = True
    replica: int = 0
    generation: int
    step: int
    whole: list[int] = Field(default_factory=list)
    """nodes that write their stage, where its other nodes write their outer state; none: each that is asked"""
    compared: list[int] = Field(default_factory=list)
    """nodes, beside those that write their stage, that tell the digest of their weights: those of a stage are to be
    equal. They write nothing but what ``whole`` has them write"""
    background: bool = False
    """is training to go on as soon as all have a copy of what they write?"""


class Seal(Fact):
    """All stages are written: make the checkpoint appear under its name, at once and whole."""

    kind: Literal["seal"] = "seal"
    step: int
    folder: str
    stages: list[int]
    partial: bool = False
    standings: dict[int, Standing] = Field(default_factory=dict)
    """where each of several replicas was when it was saved"""
    first_block: int = 0
    """all blocks of samples before this one were used then"""
    blocks_ahead: list[int] = Field(default_factory=list)
    """and these beyond"""
    digests: dict[int, dict[str, str]] = Field(default_factory=dict)
    """replica → file → its SHA-256, as those say that wrote them"""
    unequal: list[Unequal] = Field(default_factory=list)
    """stages whose replicas are to be equal and were not"""


class Discard(Fact):
    """A checkpoint could not be saved: remove what has been written of it, which would only fill the disk."""

    kind: Literal["discard"] = "discard"
    step: int
    """its name"""


class Spawn(Fact):
    """Start a worker process."""

    kind: Literal["spawn"] = "spawn"
    worker: str
    incarnation: int
    host: str = ""
    """a machine that has joined; empty for the run's own"""


class Release(Fact):
    """A worker that was to leave is not needed any more: it exits."""

    kind: Literal["release"] = "release"
    worker: str


class TurnAway(Fact):
    """A machine that has joined is of no use; its workers go with it."""

    kind: Literal["turn_away"] = "turn_away"
    host: str
    reason: str


class Form(Fact):
    """The replica as it stands in a new generation. Everyone drops what is under way and goes on from ``step``.

    Nodes without a member are passed by.
    """

    kind: Literal["form"] = "form"
    interrupts: ClassVar[bool] = True
    replica: int = 0
    generation: int
    step: int
    outcome: Literal["started", "recovered", "relinked", "handed over", "rolled back", "recalled", "skipping"]
    members: list[Member]
    links: list[Link]
    routes: list[list[int]] = Field(default_factory=list)
    """by a schedule: the nodes that each microbatch of a step visits; otherwise the recipe's routing says"""
    rounds: int = 0
    """of the exchange, that are behind the replica"""
    inner: int = 0
    """steps since the last of them"""

    @property
    def goes_back(self) -> bool:
        """Are steps undone: to a state on disk, or in memory?"""
        return self.outcome in ("rolled back", "recalled")

    @property
    def holders(self) -> dict[int, str]:
        """Node → who stands there from now on."""
        return {member.node: member.worker for member in self.members}

    @property
    def handing(self) -> dict[int, str]:
        """Node → the worker that has stood there, and hands its state over as it is."""
        return {member.node: member.source.worker for member in self.members if isinstance(member.source, Handover)}


class Replan(Fact):
    """Find routes for the nodes that are left."""

    kind: Literal["replan"] = "replan"
    replica: int = 0
    nodes: list[int]
    ways: list[SlowLink] = Field(default_factory=list)
    """links that are slow, to be reckoned with"""


class RunStep(Fact):
    """Carry out the plan of one step (or of one validation)."""

    kind: Literal["run_step"] = "run_step"
    replica: int = 0
    generation: int
    step: int
    """that the replica has committed before"""
    mode: Mode = "train"
    block: int = 0
    """training: the number of the step's block of samples"""
    left_out: dict[int, str] = Field(default_factory=dict)
    """replicas whose gradients nobody goes by, and why"""


class LeaveOut(Fact):
    """Replicas have told others different things in a step: it is dropped, and made again without what they say."""

    kind: Literal["leave_out"] = "leave_out"
    replica: int = 0
    generation: int
    step: int
    liars: list[int]
    """replicas that equivocate"""
    disputes: list[tuple[int, int]]
    """pairs of replicas of which one lies at least: what the first says, and what the second has heard from it"""


class Commit(Fact):
    """Every stage has its gradient: apply the update, at the learning rate of ``progress``."""

    kind: Literal["commit"] = "commit"
    replica: int = 0
    generation: int
    step: int
    progress: int
    """the run's step to which the block of samples belongs"""


class Disband(Fact):
    """A replica cannot go on; others can. Its workers are spares from now on."""

    kind: Literal["disband"] = "disband"
    interrupts: ClassVar[bool] = True
    replica: int
    workers: list[str]
    reason: str


class SendAway(Fact):
    """What a replica says has been of no use again and again: its workers leave, and others stand in their place."""

    kind: Literal["send_away"] = "send_away"
    member: int
    """the replica, by its number among those that agree"""
    workers: list[str]
    strikes: int
    """steps or rounds in which that is proved"""
    reason: str


class Found(Fact):
    """There are workers for a replica that was disbanded: it begins anew, as a copy of another."""

    kind: Literal["found"] = "found"
    replica: int


class Donate(Fact):
    """Give a copy of this stage, as it is now, to a node of another replica that has lost it, or to one's successor."""

    kind: Literal["donate"] = "donate"
    donor: int
    to: int
    stage: int
    link: str
    at: str = ""
    """where to call"""


class Blow(Fact):
    """Suffer a fault of a trace, at the next place that is its moment (see ``chaos.trace.Fault``)."""

    kind: Literal["blow"] = "blow"
    number: int
    """of the fault in its trace"""
    signal: str
    moment: str
    offset: float
    seconds: float | None
    strength: float | None
    attack: str | None = None
    until: int | None = None
    peer: int | None = None


class Cannot(Fact):
    """The recovery strategy cannot rebuild what was lost: save what is left, then stop."""

    kind: Literal["cannot"] = "cannot"
    replica: int = 0
    lost: list[int]
    reason: str


class Finish(Fact):
    """The run is over; every worker leaves."""

    kind: Literal["finish"] = "finish"
    outcome: Literal["finished", "stopped", "cannot", "failed"]
    reason: str = ""
    detail: str = ""
    """what prevented progress when the run was stopped"""


class Leave(Fact):
    """Exit (sent to workers at the end, and to those that come back from the dead)."""

    kind: Literal["leave"] = "leave"
    interrupts: ClassVar[bool] = True


Decision = Annotated[
    Spawn
    | Release
    | TurnAway
    | Form
    | Replan
    | RunStep
    | LeaveOut
    | Commit
    | Ordered
    | Blamed
    | Cleared
    | Relieve
    | Reroute
    | DrawGroups
    | Introduce
    | Meet
    | Settle
    | Adopt
    | Disband
    | SendAway
    | Found
    | Save
    | Seal
    | Discard
    | Cannot
    | Finish,
    Field(discriminator="kind"),
]
Order = Annotated[
    Form | RunStep | LeaveOut | Ordered | Commit | Introduce | Meet | Settle | Donate | Disband | Save | Blow | Leave,
    Field(discriminator="kind"),
]

DECISION: TypeAdapter[Decision] = TypeAdapter(Decision)
ORDER: TypeAdapter[Order] = TypeAdapter(Order)
