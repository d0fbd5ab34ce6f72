"""What is to be done: the decisions of the controller, as plain data.

``control.decide`` makes them from the state of the run alone, so that a log can be replayed; workers receive
:class:`Form`, :class:`RunStep`, :class:`Commit`, :class:`Save` and :class:`Leave` as their orders.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from planaria.events import Fact


class Keep(Fact):
    """The member goes on with the state it has."""

    origin: Literal["keep"] = "keep"


class Fresh(Fact):
    """The member starts from the seed's initial weights."""

    origin: Literal["fresh"] = "fresh"


class Load(Fact):
    """The member reads its stage from a checkpoint folder."""

    origin: Literal["load"] = "load"
    folder: str


class Rebuild(Fact):
    """The member rebuilds its stage from what the donor nodes send it."""

    origin: Literal["rebuild"] = "rebuild"
    by: str
    """the strategy; PEER for a copy of another node of the same stage"""
    donors: list[int]


PEER = "peer"


Source = Annotated[Keep | Fresh | Load | Rebuild, Field(discriminator="origin")]


class Member(Fact):
    """Who stands at a node from now on, the stage that the node holds, and where its state comes from."""

    node: int
    stage: int
    worker: str
    source: Source


class Link(Fact):
    """A two-worker group between two nodes. A link that keeps its id is kept open."""

    low: int
    high: int
    id: str


class Spawn(Fact):
    """Start a worker process."""

    kind: Literal["spawn"] = "spawn"
    worker: str
    incarnation: int


class Form(Fact):
    """The replica as it stands in a new generation. Everyone drops what is under way and goes on from ``step``.

    Nodes without a member are passed by.
    """

    kind: Literal["form"] = "form"
    generation: int
    step: int
    outcome: Literal["started", "recovered", "relinked", "rolled back", "skipping"]
    members: list[Member]
    links: list[Link]
    routes: list[list[int]] = Field(default_factory=list)
    """by a schedule: the nodes that each microbatch of a step visits; otherwise the recipe's routing says"""


class Replan(Fact):
    """Find routes for the nodes that are left."""

    kind: Literal["replan"] = "replan"
    nodes: list[int]


class RunStep(Fact):
    """Carry out the plan of one step (or of one validation)."""

    kind: Literal["run_step"] = "run_step"
    generation: int
    step: int
    mode: Literal["train", "evaluate"] = "train"


class Commit(Fact):
    """Every stage has its gradient: apply the update."""

    kind: Literal["commit"] = "commit"
    generation: int
    step: int


class Save(Fact):
    """Write every member's stage into an unfinished checkpoint folder."""

    kind: Literal["save"] = "save"
    generation: int
    step: int


class Seal(Fact):
    """All stages are written: make the checkpoint appear under its name, at once and whole."""

    kind: Literal["seal"] = "seal"
    step: int
    folder: str
    stages: list[int]
    partial: bool = False


class Cannot(Fact):
    """The recovery strategy cannot rebuild what was lost: save what is left, then stop."""

    kind: Literal["cannot"] = "cannot"
    lost: list[int]
    reason: str


class Finish(Fact):
    """The run is over; every worker leaves."""

    kind: Literal["finish"] = "finish"
    outcome: Literal["finished", "stopped", "cannot", "failed"]
    reason: str = ""


class Leave(Fact):
    """Exit (sent to workers at the end, and to those that come back from the dead)."""

    kind: Literal["leave"] = "leave"


Decision = Annotated[
    Spawn | Form | Replan | RunStep | Commit | Save | Seal | Cannot | Finish, Field(discriminator="kind")
]
Order = Annotated[Form | RunStep | Commit | Save | Leave, Field(discriminator="kind")]

DECISION: TypeAdapter[Decision] = TypeAdapter(Decision)
ORDER: TypeAdapter[Order] = TypeAdapter(Order)
