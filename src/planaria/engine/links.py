"""The edges one worker has in the present generation: which are kept, opened and abandoned when a replica is formed."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from planaria.decisions import Form, Rebuild
from planaria.engine.itinerary import Itinerary
from planaria.engine.setup import Setup
from planaria.model.packing import HEADROOM
from planaria.model.stages import stage_parameters
from planaria.network.costs import FP32_BYTES, message_bytes
from planaria.recovery import recovery
from planaria.transport.edge import Edge, EdgeSpec


class Links:
    """A worker's edges by the node at the other end, and the short-lived ones that carry a lost stage's state."""

    def __init__(self, setup: Setup, itinerary: Itinerary, inbox: SimpleQueue[Any]) -> None:
        self._setup, self._itinerary, self._inbox = setup, itinerary, inbox
        self._slots = recovery(setup.config.recovery, setup.config.pipeline.stages).slots
        self.edges: dict[int, Edge] = {}
        self.transfers: dict[int, Edge] = {}
        self.opened: set[Edge] = set()

    def form(self, form: Form, node: int) -> None:
        """Have exactly the edges that ``form`` gives to ``node``; an edge whose id is unchanged stays open."""
        mine = [link for link in form.links if node in (link.low, link.high)]
        wanted = {link.high if link.low == node else link.low: link for link in mine}
        for peer, edge in list(self.edges.items()):
            if peer not in wanted or wanted[peer].id != edge.spec.link_id:
                self.edges.pop(peer).abandon()
        for peer, link in wanted.items():
            if peer not in self.edges:
                self.edges[peer] = self._open(link.id, node, peer, self._most_bytes(node, peer))
        self.end_transfers()
        for member in form.members:
            if isinstance(member.source, Rebuild):
                for donor in member.source.donors:
                    if node in (donor, member.node):
                        peer = member.node if node == donor else donor
                        link_id = f"g{form.generation}:state:{donor}>{member.node}"
                        self.transfers[peer] = self._open(link_id, node, peer, self._state_bytes(member.stage))

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
        """Nodes to which the edge is not up yet."""
        return [peer for peer, edge in self.edges.items() if edge not in self.opened]

    def _most_bytes(self, node: int, peer: int) -> int:
        """The largest frame between two nodes: an activation, a share of a gradient, or a copy that one keeps."""
        config, stage = self._setup.config, self._itinerary.arrangement.stage
        copied = {slot.copy.stage for slot in self._slots if {stage[node], stage[peer]} == set(slot.copy)}
        if stage[node] == stage[peer]:
            copied.add(stage[node])
        return max(message_bytes(config.model, config.pipeline), *(self._state_bytes(s) for s in copied), 0)

    def _state_bytes(self, stage: int) -> int:
        """The largest packed state of a stage: weights and both moments."""
        config = self._setup.config
        return 3 * FP32_BYTES * stage_parameters(config.model, config.pipeline.stages, stage) + HEADROOM

    def _open(self, link_id: str, node: int, peer: int, max_bytes: int) -> Edge:
        config = self._setup.config
        latency_s, bandwidth = self._itinerary.link(peer, node) if config.network.emulate else (0.0, None)
        spec = EdgeSpec(
            host=self._setup.host,
            port=self._setup.port,
            link_id=link_id,
            rank=0 if node < peer else 1,
            peer=peer,
            max_bytes=max_bytes,
            open_timeout_s=config.fleet.timeout_s,
            latency_s=latency_s,
            bandwidth=bandwidth,
        )
        return Edge(spec, self._inbox)
