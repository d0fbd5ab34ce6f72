"""Members of a generation: workers' nodes, the sources of their states, and the edges between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planaria.common.address import should_listen
from planaria.config.names import FileName
from planaria.control.facts.run_started import Fact, SnapshotLabel


class Keep(Fact):
    """The member keeps its state."""

    origin: Literal["keep"] = "keep"


class Fresh(Fact):
    """The member starts from the seed's initial weights."""

    origin: Literal["fresh"] = "fresh"


class Load(Fact):
    """The member reads its stage from a checkpoint folder."""

    origin: Literal["load"] = "load"
    folder: FileName


class Recall(Fact):
    """The member restores its stage from its own snapshot in memory."""

    origin: Literal["recall"] = "recall"
    by: str
    """the strategy that keeps the snapshot"""
    step: int
    """step of the snapshot"""
    file: SnapshotLabel | None = None
    """the snapshot's label, for a worker that must read it from the machine's memory; None: the worker still holds it
    """


class Rebuild(Fact):
    """The member rebuilds its stage from the donor nodes' states."""

    origin: Literal["rebuild"] = "rebuild"
    by: str
    """the strategy; PEER for a copy of another node of the same stage"""
    donors: list[int]


class CatchUp(Rebuild):
    """The member keeps its state, and receives the rounds of a decoupled exchange that it missed from a node of another
    replica."""

    origin: Literal["catch_up"] = "catch_up"  # type: ignore[assignment]


class Handover(Fact):
    """The member receives the state unchanged from the previous holder of its node."""

    origin: Literal["handover"] = "handover"
    worker: str


PEER = "peer"

PREDECESSOR = -1
"""stands for a node's previous holder where an edge expects a node"""


Source = Annotated[Keep | Fresh | Load | Recall | Rebuild | CatchUp | Handover, Field(discriminator="origin")]


class Member(Fact):
    """A node's holder from now on, its stage, and the source of its state."""

    node: int
    stage: int
    worker: str
    source: Source
    at: str = ""
    """address at which donors connect to it"""


class MemberLink(Fact):
    """An edge between two nodes. A link that keeps its id stays open."""

    low: int
    high: int
    id: str
    at: str = ""
    """address at which the connecting end finds the other"""
    calls: Literal["low", "high"] = "high"
    relay: str = ""
    """name of the relay between the ends; empty: a direct connection, or at the controller"""

    def address_for(self, node: int) -> str:
        """Return the address to which ``node``, one of the ends, connects; empty: it waits for the other end."""
        return self.at if node == (self.high if self.calls == "high" else self.low) else ""


def state_link(generation: int, donor: int, node: int) -> str:
    """Return the name of the short-lived link over which ``node`` receives a state in a generation of its replica."""
    return f"g{generation}:state:{donor}>{node}"


def link(link_id: str, low: int, low_at: str, high: int, high_at: str, over: str = "") -> MemberLink:
    """Return the edge between two nodes at these addresses of their workers, via the relay ``over``."""
    if should_listen(low_at, high_at):
        return MemberLink(low=low, high=high, id=link_id, at=low_at, relay=over)
    return MemberLink(low=low, high=high, id=link_id, at=high_at, calls="low", relay=over)
