"""Which end of an edge waits, and which calls it. Pure."""

from __future__ import annotations

from planaria.record import decisions as d
from planaria.runtime.transport.address import waits_best


def link(link_id: str, low: int, low_at: str, high: int, high_at: str, over: str = "") -> d.Link:
    """The edge between two nodes whose workers listen at these addresses; ``over``: the name of its relay."""
    if waits_best(low_at, high_at):
        return d.Link(low=low, high=high, id=link_id, at=low_at, over=over)
    return d.Link(low=low, high=high, id=link_id, at=high_at, calls="low", over=over)
