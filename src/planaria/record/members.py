"""Members of a generation: who stands at which node, where its state comes from, and the edges between nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planaria.config.names import FileName
from planaria.record.started import Fact, SnapshotLabel


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
