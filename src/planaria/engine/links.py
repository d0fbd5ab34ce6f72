"""The edges one worker has in the present generation: which are kept, opened and abandoned when a replica is formed."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from planaria.decisions import Form, Rebuild
from planaria.engine.setup import Setup
from planaria.network.costs import message_bytes
from planaria.transport.edge import Edge, EdgeSpec

_STATE_HEADROOM = 4096


class Links:
    """A worker's edges by peer stage, and the short-lived ones that carry a lost stage's state."""

    def __init__(self, setup: Setup, inbox: SimpleQueue[Any]) -> None:
        self._setup, self._inbox = setup, inbox
        self.edges: dict[int, Edge] = {}
        self.transfers: dict[int, Edge] = {}
        self.opened: set[Edge] = set()

    def form(self, form: Form, stage: int, state_bytes: int) -> None:
        """Have exactly the edges that ``form`` gives to ``stage``; an edge whose id is unchanged stays open."""
        mine = [link for link in form.links if stage in (link.low, link.high)]
        wanted = {link.high if link.low == stage else link.low: link for link in mine}
        for peer, edge in list(self.edges.items()):
            if peer not in wanted or wanted[peer].id != edge.spec.link_id:
                self.edges.pop(peer).abandon()
        for peer, link in wanted.items():
            if peer not in self.edges:
                self.edges[peer] = self._open(link.id, stage, peer)
        self.end_transfers()
        for member in form.members:
            if isinstance(member.source, Rebuild):
                for donor in member.source.donors:
                    if stage in (donor, member.stage):
                        peer = member.stage if stage == donor else donor
                        link_id = f"g{form.generation}:state:{donor}>{member.stage}"
                        self.transfers[peer] = self._open(link_id, stage, peer, state_bytes + _STATE_HEADROOM)

    def end_transfers(self) -> None:
        """The lost stages are rebuilt; their edges go."""
        for edge in self.transfers.values():
            edge.abandon()
        self.transfers.clear()
        self.opened &= set(self.edges.values())

    def has(self, edge: Edge) -> bool:
        """Is this an edge of the present generation?"""
        return edge in self.edges.values() or edge in self.transfers.values()

    @property
    def unopened(self) -> list[int]:
        """Peer stages whose edge is not up yet."""
        return [peer for peer, edge in self.edges.items() if edge not in self.opened]

    def _open(self, link_id: str, stage: int, peer: int, state_bytes: int | None = None) -> Edge:
        config, network = self._setup.config, self._setup.config.network
        spec = EdgeSpec(
            host=self._setup.host,
            port=self._setup.port,
            link_id=link_id,
            rank=0 if stage < peer else 1,
            peer=peer,
            max_bytes=message_bytes(config.model, config.pipeline) if state_bytes is None else state_bytes,
            open_timeout_s=config.fleet.timeout_s,
            latency_s=network.latency_s if network.emulate else 0.0,
            bandwidth=network.bandwidth if network.emulate else None,
        )
        return Edge(spec, self._inbox)
