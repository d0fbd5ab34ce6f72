"""The edges of one worker: which stay open, open or close when the controller forms a new generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from planaria.control.facts.decisions import PREDECESSOR, Form, Handover, MemberLink, Rebuild, Source, state_link
from planaria.control.facts.orders import Donate
from planaria.exchange.registry import make_exchange
from planaria.models.families import stage_parameters
from planaria.models.optimizers import make_optimizer
from planaria.models.packing import HEADROOM
from planaria.pipeline.network.costs import FP32_BYTES, message_bytes
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.edge import EdgeEnd, EdgeSpec, Transport
from planaria.runtime.transport.emulated_link import EmulatedLink
from planaria.runtime.transport.wire import State
from planaria.runtime.worker.setup import Setup


class WorkerEdges:
    """A worker's edges by peer node, and the short-lived edges that carry a lost stage's state."""

    def __init__(self, setup: Setup, resolved: ResolvedRun, transport: Transport) -> None:
        self._setup = setup
        self._resolved = resolved
        self.transport = transport
        self._slots = resolved.recovery.slots
        self.by_peer: dict[int, EdgeEnd] = {}
        self.transfers: dict[int, EdgeEnd] = {}
        self.round_edges: dict[int, EdgeEnd] = {}
        """connections to the same stage of other replicas, in the current round"""
        self.opened: set[EdgeEnd] = set()
        self._inbound: EmulatedLink | None = None
        self._sent: dict[int, int] = {}
        self.watch: Callable[[EdgeEnd], None] | None = None
        """called with each new edge; set by an injected fault"""

    def form(self, form: Form, node: int) -> None:
        """Open and close edges until ``node`` has those of ``form``; an edge with an unchanged id stays open."""
        wanted = _links_of(node, form.links)
        for peer, edge in list(self.by_peer.items()):
            if peer not in wanted or wanted[peer].id != edge.spec.link_id:
                self.by_peer.pop(peer).abandon()
                self._sent.pop(peer, None)  # its successor counts from zero
        for peer, link in wanted.items():
            if peer not in self.by_peer:
                most, over = self._most_bytes(node, peer), self._setup.config.fleet.relays.get(link.relay)
                self.by_peer[peer] = self._open(
                    link.id, link.address_for(node), node, peer, most, over.at if over else ""
                )
        self.end_transfers()
        for member in form.members:
            for donor in _donors(member.source):
                if node in (donor, member.node):
                    peer = member.node if node == donor else donor
                    link_id = state_link(form.generation, donor, member.node)
                    at = member.at if node == donor else ""
                    self.transfers[peer] = self._open(link_id, at, node, peer, self._state_bytes(member.stage))

    def end_transfers(self) -> None:
        """Close the edges that carried the state of lost stages."""
        for edge in self.transfers.values():
            edge.abandon()
        self.transfers.clear()
        self.opened &= {*self.by_peer.values(), *self.round_edges.values()}

    def open_round_edges(self, links: Sequence[MemberLink], node: int) -> list[EdgeEnd]:
        """Open and close edges to the same stage of other replicas; return the new ones."""
        wanted = _links_of(node, links)
        for peer, edge in list(self.round_edges.items()):
            if peer not in wanted or wanted[peer].id != edge.spec.link_id:
                self.round_edges.pop(peer).abandon()
        most = self._state_bytes(self._resolved.arrangement.stage[node])
        new = {
            peer: self._open(link.id, link.address_for(node), node, peer, most)
            for peer, link in wanted.items()
            if peer not in self.round_edges
        }
        self.round_edges |= new
        return list(new.values())

    def close_round_edges(self) -> None:
        """Close the edges of the current round."""
        for edge in self.round_edges.values():
            edge.abandon()
        self.round_edges.clear()
        self.opened &= {*self.by_peer.values(), *self.transfers.values()}

    def transfer(self, order: Donate, flat: Tensor) -> None:
        """Send a state to another replica, or a successor, over a separate edge."""
        edge = self._open(order.link, order.at, order.donor, order.to, self._state_bytes(order.stage))
        edge.send(State(order.stage), flat)
        edge.abandon()  # after the state was sent

    def close(self) -> None:
        """Close all edges."""
        self.close_round_edges()
        self.end_transfers()
        for edge in self.by_peer.values():
            edge.abandon()
        self.by_peer.clear()
        self.opened.clear()
        self._sent.clear()

    def newly_arrived(self) -> dict[int, list[float]]:
        """Return the transit times (s) of activations since the last call, by neighbour."""
        return {
            peer: [edge.transits.popleft() for _ in range(len(edge.transits))] for peer, edge in self.by_peer.items()
        }

    def newly_sent(self) -> dict[int, int]:
        """Return the bytes sent since the last call, by neighbour."""
        before, self._sent = self._sent, {peer: edge.sent_bytes for peer, edge in self.by_peer.items()}
        return {peer: max(0, size - before.get(peer, 0)) for peer, size in self._sent.items()}

    def is_current(self, edge: EdgeEnd) -> bool:
        """Return whether this is an edge of the current generation."""
        return self.by_peer.get(edge.spec.peer) is edge or any(
            edge in edges.values() for edges in (self.transfers, self.round_edges)
        )

    def relay_at(self, at: str) -> str:
        """Return the name of the relay at this HOST:PORT."""
        return next(name for name, relay in self._setup.config.fleet.relays.items() if relay.at == at)

    @property
    def unopened(self) -> list[int]:
        """Nodes whose edge is not open yet."""
        return [peer for peer, edge in self.by_peer.items() if edge not in self.opened]

    def _most_bytes(self, node: int, peer: int) -> int:
        """Return the bytes of the largest frame between two nodes: an activation, a gradient share or a copy."""
        config, stage = self._setup.config, self._resolved.arrangement.stage
        pair = min(stage[node], stage[peer]), max(stage[node], stage[peer])
        copied = {source for slot in self._slots if pair in slot.copy.pairs for source in slot.copy.sources}
        if stage[node] == stage[peer] or config.model.one_array:
            copied.add(stage[node])
        return max(message_bytes(config.model, config.pipeline).larger, *(self._state_bytes(s) for s in copied), 0)

    def _state_bytes(self, stage: int) -> int:
        """Return the bytes of the largest packed state of a stage: weights, moments and outer state."""
        config = self._setup.config
        outer = len(make_exchange(config.exchange).parts) if config.exchange.has_several_replicas else 0
        copies = 1 + len(make_optimizer(config.optim).keys) + outer
        return copies * FP32_BYTES * stage_parameters(config.model, config.pipeline.stages, stage) + HEADROOM

    def _open(self, link_id: str, at: str, node: int, peer: int, max_bytes: int, over: str = "") -> EdgeEnd:
        config = self._setup.config
        emulated = config.network.emulate and PREDECESSOR not in (node, peer)
        spec = EdgeSpec(
            link_id=link_id,
            at=at,
            peer=peer,
            max_bytes=max_bytes,
            open_timeout_s=config.fleet.timeout_s,
            link=self._link(peer, node) if emulated else None,
            relay_address=over,
        )
        edge = self.transport.edge(spec)
        if self.watch is not None:
            self.watch(edge)
        return edge

    def _link(self, peer: int, node: int) -> EmulatedLink | None:
        """Return the emulated link from ``peer``; one for all peers if they share it."""
        network, (latency_s, bandwidth) = self._setup.config.network, self._resolved.link(peer, node)
        if not latency_s and bandwidth is None:
            return None
        link = EmulatedLink(latency_s, bandwidth, network.latency_queued)
        if network.inbound == "each":
            return link
        self._inbound = self._inbound or link
        return self._inbound


def _links_of(node: int, links: Sequence[MemberLink]) -> dict[int, MemberLink]:
    return {link.high if link.low == node else link.low: link for link in links if node in (link.low, link.high)}


def _donors(source: Source) -> list[int]:
    """Return the nodes that send a member its state; ``PREDECESSOR`` stands for its previous holder."""
    if isinstance(source, Handover):
        return [PREDECESSOR]
    return source.donors if isinstance(source, Rebuild) else []
