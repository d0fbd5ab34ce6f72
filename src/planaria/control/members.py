"""Members of a generation and of a round: who holds which node, where its state comes from, and edges between nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planaria.config.names import FileName
from planaria.control.started import Fact, SnapshotLabel
from planaria.runtime.transport.address import waits_best


class Keep(Fact):
    """The member goes on with the state it has."""

    origin: Literal["keep"] = "keep"


class Fresh(Fact):
    """The member starts from the seed's initial weights."""

    origin: Literal["fresh"] = "fresh"


class Load(Fact):
    """The member reads its stage from a checkpoint folder."""

    origin: Literal["load"] = "load"
    folder: FileName


class Recall(Fact):
    """The member goes back to what it remembers of its own stage."""

    origin: Literal["recall"] = "recall"
    by: str
    """the strategy that had it remembered"""
    step: int
    """that it is of"""
    file: SnapshotLabel | None = None
    """the snapshot's label, for a worker that has to read it from the machine's memory; None: every worker that is
    asked for it still holds it"""


class Rebuild(Fact):
    """The member rebuilds its stage from what the donor nodes send it."""

    origin: Literal["rebuild"] = "rebuild"
    by: str
    """the strategy; PEER for a copy of another node of the same stage"""
    donors: list[int]


class Handover(Fact):
    """The member gets the state, as it is, from the worker that has stood at its node until now."""

    origin: Literal["handover"] = "handover"
    worker: str


PEER = "peer"

BEFORE = -1
"""in place of a node: who stood there before"""


Source = Annotated[Keep | Fresh | Load | Recall | Rebuild | Handover, Field(discriminator="origin")]


class Member(Fact):
    """Who stands at a node from now on, the stage that the node holds, and where its state comes from."""

    node: int
    stage: int
    worker: str
    source: Source
    at: str = ""
    """where donors call to give it a state"""


class Link(Fact):
    """An edge between two nodes. A link that keeps its id is kept open."""

    low: int
    high: int
    id: str
    at: str = ""
    """where the end that calls finds the other"""
    calls: Literal["low", "high"] = "high"
    over: str = ""
    """name of the relay where the ends meet; empty: they reach each other directly, or at the controller"""

    def at_for(self, node: int) -> str:
        """Where ``node``, one of the ends, is to call; empty: it waits to be called."""
        return self.at if node == (self.high if self.calls == "high" else self.low) else ""


def state_link(generation: int, donor: int, node: int) -> str:
    """Name of the short-lived link over which ``node`` gets a state in a generation of its replica."""
    return f"g{generation}:state:{donor}>{node}"


class DrawGroups(Fact):
    """Somebody has come to a round of the exchange: these are the groups in which replicas meet in it."""

    kind: Literal["draw_groups"] = "draw_groups"
    round: int
    groups: list[list[int]]


class Introduce(Fact):
    """The members of a group will meet in this round: what can be said ahead is said from now on."""

    kind: Literal["introduce"] = "introduce"
    round: int
    members: list[int]
    """replicas"""
    generations: list[int]
    """theirs"""
    links: list[Link]
    """between nodes of different members"""


class Meet(Fact):
    """A round of the exchange: each member makes its peers an offer and hears theirs, stage by stage."""

    kind: Literal["meet"] = "meet"
    round: int
    members: list[int]
    generations: list[int]
    links: list[Link]
    """between nodes of different members"""


class Settle(Fact):
    """The members make of a round what all offers come to."""

    kind: Literal["settle"] = "settle"
    round: int
    members: list[int]
    generations: list[int]
    left_out: dict[int, str] = Field(default_factory=dict)
    """replicas that have told others different things, or may have, or have said what is of no use too often, and why:
    the round is gone on without them"""
    liars: list[int] = Field(default_factory=list)
    """those of them of which that is proved"""
    counted: dict[int, dict[int, float]] = Field(default_factory=dict)
    """where offers are judged over all stages: member → what those of each count in what it makes of the round"""
    rivals: dict[str, dict[int, float]] = Field(default_factory=dict)
    """another rule → what it would have counted, for the first member, of those that count little"""


class Adopt(Fact):
    """A replica has missed what others agreed upon: it goes on with a copy of one of them."""

    kind: Literal["adopt"] = "adopt"
    replica: int
    reason: str


def link(link_id: str, low: int, low_at: str, high: int, high_at: str, over: str = "") -> Link:
    """The edge between two nodes whose workers listen at these addresses; ``over``: the name of its relay."""
    if waits_best(low_at, high_at):
        return Link(low=low, high=high, id=link_id, at=low_at, over=over)
    return Link(low=low, high=high, id=link_id, at=high_at, calls="low", over=over)
