"""Messages between a worker and other nodes over the edges of the current generation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from planaria.control.facts import events as e
from planaria.control.facts.decisions import BeginRound, Commit, Form, OpenPrefetchLinks, Settle
from planaria.control.facts.orders import Donate
from planaria.models.families import activation_shape
from planaria.pipeline.codecs import make_model_codec
from planaria.pipeline.plan.actions import Action, Key, PassKind
from planaria.recovery.base import Moment
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport import wire
from planaria.runtime.transport.edge import EdgeEnd, EdgeFailed, EdgeOpened, FrameArrived, SocketTransport, Transport
from planaria.runtime.transport.staging import Staging, with_cuda
from planaria.runtime.transport.wire import FrameContent, WireError
from planaria.runtime.worker.assignment import Assignment
from planaria.runtime.worker.control_link import ControlLink
from planaria.runtime.worker.exchange_round import RoundMember
from planaria.runtime.worker.outer_state import UpdateReport
from planaria.runtime.worker.received_frames import FrameId, ReceivedFrames, UnusualMagnitude
from planaria.runtime.worker.recovery_copies import CopyMessageId, StageCopies
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.setup import Setup
from planaria.runtime.worker.worker_edges import WorkerEdges

_TIMEOUT_IN_STEPS = 3
"""maximum wait for one message, in step durations"""
_STEP_HISTORY = 16
"""steps whose maximum duration sets the time-out; the load of a machine changes"""


class WaitTimeout:
    """Time-out that scales with the duration of steps, at least ``fleet.timeout_s``.

    Before the first step, it follows from the duration of this worker's first pass.
    """

    def __init__(self, floor_s: float) -> None:
        self.warm_s = 0.0
        """seconds of one forward, backward and update when the worker started"""
        self._floor_s = floor_s
        self._actions = 1
        self._steps: deque[float] = deque(maxlen=_STEP_HISTORY)

    def expect(self, actions: int) -> None:
        """Set the number of actions in the next step, over all workers."""
        self._actions = actions

    def learn(self, step_s: float) -> None:
        """Record the duration of a step."""
        self._steps.append(step_s)

    @property
    def seconds(self) -> float:
        """The current time-out."""
        # A forward and a backward pass are two actions.
        step_s = max(self._steps) if self._steps else self.warm_s * self._actions / 2
        return max(self._floor_s, _TIMEOUT_IN_STEPS * step_s)


_PASSES: dict[PassKind, wire.Pass] = {"forward": FrameContent.FORWARD, "backward": FrameContent.BACKWARD}
_MOMENTS: dict[Moment, wire.CopyMoment] = {"before": FrameContent.COPY_BEFORE, "after": FrameContent.COPY_AFTER}


class PeerMessages:
    """Messages of a worker to and from its neighbours."""

    def __init__(
        self,
        setup: Setup,
        resolved: ResolvedRun,
        assignment: Assignment,
        control_link: ControlLink,
        transport: Transport,
        follow: Callable[[Donate | BeginRound], None],
    ) -> None:
        """``follow``: called with orders that this worker follows immediately, even within a step."""
        self.assignment = assignment
        self.control_link = control_link
        self.follow = follow
        self.on_repeated: Callable[[Commit | Settle], None] = lambda order: None
        """called with an order that arrives during a step: one that another machine's controller repeats"""
        self.round_member = RoundMember(setup.config.exchange)
        self.edges = WorkerEdges(setup, resolved, transport)
        self.staging: Staging | None = None
        """copies between host and device, if stages compute on a device in several processes"""
        model, pipeline = setup.config.model, setup.config.pipeline
        codec, shape = make_model_codec(model, pipeline), activation_shape(model, pipeline)
        if setup.config.train.device == "cuda" and isinstance(transport, SocketTransport):
            self.staging, transport.rings = with_cuda(codec.bytes(shape))
        land = None if self.staging is None else self.staging.receive
        self.frames_in = ReceivedFrames(codec, shape, land, bounded=not setup.config.data.dialogues)
        self.wait_timeout = WaitTimeout(setup.config.fleet.timeout_s)
        self.first_pass = 0
        """number of the first activation; in a coded step, activations of cancelled rounds are never taken"""
        self.waited: dict[int, float] = {}
        """node → seconds spent waiting for its frames in this step"""
        self._resolved = resolved
        self._broken: dict[EdgeEnd, EdgeFailed] = {}
        self._step_began = time.monotonic()

    def assign(self, node: int, form: Form) -> None:
        """Take the assignment to ``node`` from ``form``, and drop the state of older generations."""
        self._drop_copies()
        self.assignment.move(node, form)
        self.edges.close_round_edges()
        self.round_member.drop()
        self.advance(form.step)
        self.edges.form(form, node)
        # An edge may have broken while the controller formed this generation, which has not seen that report.
        self._broken = {edge: broken for edge, broken in self._broken.items() if self.edges.is_current(edge)}
        for broken in self._broken.values():
            self._report_broken(broken)

    def advance(self, step: int) -> None:
        """Advance to ``step``."""
        self.assignment.step = step
        self.first_pass = 0
        self._step_began = time.monotonic()
        self.waited = {}
        self.frames_in.advance(self.assignment.generation, step)

    def unassign(self) -> None:
        """Clear the assignment."""
        self._drop_copies()
        self.edges.close()
        self.round_member.drop()
        self.assignment.node = self.assignment.stage = -1

    def _drop_copies(self) -> None:
        """Drop pending copies from a device; their edges are closing."""
        if self.staging is not None:
            self.staging.drop()

    @property
    def nodes_of_stage(self) -> Sequence[int]:
        """All nodes of this worker's stage, present or absent."""
        return self._resolved.arrangement.nodes(self.assignment.stage)

    def handle(self, item: Any) -> None:
        """Process an item from the inbox. Items of an older generation are ignored."""
        if isinstance(item, FrameArrived | EdgeOpened | EdgeFailed) and not self.edges.is_current(item.edge):
            return  # of an older generation
        match item:
            case Donate() | BeginRound():
                self.follow(item)
            case Commit() | Settle():
                self.on_repeated(item)
            case OpenPrefetchLinks() if self.assignment.is_ours(item):
                self.open_prefetch_links(item)
            case FrameArrived():
                self._on_frame(item)
            case EdgeOpened():
                self.edges.opened.add(item.edge)
            case EdgeFailed():
                self._on_edge_failed(item)

    def _on_frame(self, frame: FrameArrived) -> None:
        edge = frame.edge
        if edge in self.edges.round_edges.values():
            self._receive_update(edge, frame.header, frame.payload)
            return
        try:
            self.frames_in.put(edge.spec.peer, frame.header, frame.payload)
        except WireError as error:
            proof = not isinstance(error, UnusualMagnitude)
            self.assignment.report_broken(edge.spec.peer, str(error), invalid=proof)

    def _on_edge_failed(self, failure: EdgeFailed) -> None:
        """Report a broken edge; on an edge of a round, the wait for the peer's update ends by time-out instead."""
        if failure.edge not in self.edges.round_edges.values():
            self._broken[failure.edge] = failure
            self._report_broken(failure)
        elif failure.received_invalid_frame:
            self._reject(failure.edge, failure.detail)

    def _report_broken(self, broken: EdgeFailed) -> None:
        spec = broken.edge.spec
        relay = self.edges.relay_at(spec.relay_address) if broken.silent_relay else ""
        self.assignment.report_broken(spec.peer, broken.detail, relay=relay, invalid=broken.received_invalid_frame)

    def handle_pending(self) -> None:
        """Process all items in the inbox."""
        while not self.control_link.inbox.empty():
            self.handle(self.control_link.next())

    def wait_for(self, late: Callable[[], Sequence[int]], label: str) -> None:
        """Process the inbox until ``late`` returns no nodes.

        A wait longer than the time-out is reported once; ``label`` describes it, with {} for the first late node.
        """
        if not (nodes := late()):
            return
        patience_s, began = self.wait_timeout.seconds, time.monotonic()
        deadline: float | None = began + patience_s
        while nodes:
            since = time.monotonic()
            item = self.control_link.next(deadline)
            self.waited[nodes[0]] = self.waited.get(nodes[0], 0.0) + time.monotonic() - since
            if item is not None:
                self.handle(item)
            else:
                waited = f"waited {patience_s:g} s for {label.format(self.assignment.name_of(nodes[0]))}"
                self.assignment.report_broken(nodes[0], waited, patience_s, began - self._step_began)
                deadline = None
            nodes = late()

    def collect(self, frames: Sequence[FrameId], label: str) -> list[Tensor]:
        """Wait for these frames, and return them in this order."""
        self.wait_for(lambda: self.frames_in.missing(frames), label)
        return [self.frames_in.take(frame) for frame in frames]

    def open_prefetch_links(self, order: OpenPrefetchLinks) -> None:
        """Send the next round's prefetched part to the same stage of the other members."""
        prefetched = self.round_member.prefetch(order.round)
        for edge in self.edges.open_round_edges(order.links, self.assignment.node):
            self.round_member.forget(edge.spec.peer)
            self._send_part(edge, FrameContent.PREFETCHED, prefetched)

    def run_round(self, order: BeginRound, runner: StageRunner) -> None:
        """Send an update to the same stage of the other members of a round."""
        update = self.round_member.update(order.round, runner)
        me = self.assignment.replica
        replica_of = self._resolved.replica_of
        for edge in self.edges.open_round_edges(order.links, self.assignment.node):
            self.round_member.forget(edge.spec.peer)
            self._send_part(edge, FrameContent.PREFETCHED, update.prefetched)
        updates = self.round_member.updates_for(
            self.assignment.step, me, [member for member in order.members if member != me]
        )
        for peer, edge in self.edges.round_edges.items():
            self._send_part(edge, FrameContent.BLOCKING, updates[replica_of(peer)].blocking)
        digest, products = self.round_member.own_digest(me), self.round_member.products(me, me, None)
        if digest or products:
            self.assignment.report(e.UpdateReceived, round=order.round, replica=me, digest=digest, products=products)
        self._report_received()

    def _send_part(self, edge: EdgeEnd, content: wire.Part, part: Tensor | None) -> None:
        if part is not None:
            edge.send(wire.UpdatePart(self.round_member.round, content), part)

    def _receive_update(self, edge: EdgeEnd, header: wire.TensorHeader, payload: Tensor) -> None:
        """Process a frame of the current round."""
        label, round = header.label, self.round_member.round
        if not isinstance(label, wire.UpdatePart):
            self._reject(edge, f"sent {label}, which is not part of an update")
        elif label.round != round:
            self._reject(edge, f"its {label.content.name.lower()} part: of round {label.round}, not {round}")
        elif self.round_member.receive(edge.spec.peer, label.content, payload):
            self._report_received()
        else:
            self._reject(edge, f"its {label.content.name.lower()} part: sent twice")

    def _reject(self, edge: EdgeEnd, why: str) -> None:
        self.round_member.reject(edge.spec.peer, why)
        edge.reset()
        self._report_received()

    def _report_received(self) -> None:
        round, replica_of = self.round_member.round, self._resolved.replica_of
        for peer, reason in self.round_member.newly_rejected_peers().items():
            self.assignment.report(e.UpdateRejected, round=round, replica=replica_of(peer), reason=reason)
        for peer in self.round_member.newly_complete_peers():
            digest, replica = self.round_member.digest_of(peer), replica_of(peer)
            products = self.round_member.products(self.assignment.replica, replica, peer)
            self.assignment.report(e.UpdateReceived, round=round, replica=replica, digest=digest, products=products)

    def input_of(self, action: Action) -> FrameId | None:
        """Return the frame that an action waits for, or None if its input is local."""
        if action.source is None or action.input_key is None:
            return None
        return FrameId(action.source, self._activation(action.input_key))

    def send(self, action: Action, out: Tensor) -> None:
        """Send an action's output to the node that needs it, once it is on the host."""
        assert action.target is not None
        send = partial(self.edges.by_peer[action.target].send, self._activation(action.key))
        if self.staging is not None and out.is_cuda:
            self.staging.send(out, send)
        else:
            send(out)

    def take(self, frame: FrameId) -> Tensor:
        """Take an action's received input."""
        payload = self.frames_in.take(frame)
        return self.staging.join(payload) if self.staging is not None and payload.is_cuda else payload

    def _activation(self, key: Key) -> wire.Activation:
        microbatch = self.first_pass + key.microbatch
        return wire.Activation(self.assignment.generation, self.assignment.step, microbatch, key.hop, _PASSES[key.kind])

    def send_share(self, node: int, flat: Tensor, part: int = 0) -> None:
        """Send a share of the step's gradient, or a ``part`` of it, to another node of this stage."""
        self.edges.by_peer[node].send(wire.GradientShare(self.assignment.generation, self.assignment.step, part), flat)

    def take_shares(self, nodes: Sequence[int], like: Tensor | None, part: int = 0) -> list[Tensor]:
        """Wait for the shares of these ``nodes``, and return them in this order.

        A share whose shape or type differs from ``like`` is reported as a broken edge; the wait ends with the next
        generation.
        """
        label = wire.GradientShare(self.assignment.generation, self.assignment.step, part)
        taken: list[Tensor] = []
        while len(taken) < len(nodes):
            shares = self.collect([FrameId(node, label) for node in nodes], "the gradient of {}")
            if like is None:
                return shares
            invalid = {
                n for n, flat in zip(nodes, shares, strict=True) if (flat.shape, flat.dtype) != (like.shape, like.dtype)
            }
            for node in sorted(invalid):
                self.assignment.report_broken(node, f"its gradient is not {list(like.shape)} numbers")
            taken = [] if invalid else shares
        return taken

    def report(self, update: UpdateReport, round: int, first: bool) -> None:
        """Report this node's results on updates to the controller; ``first``: it is the first node of its stage."""
        for kind, fields in update.facts(first):
            self.assignment.report(kind, round=round, **fields)

    def send_copy(self, host: int, message_id: CopyMessageId, flat: Tensor) -> None:
        """Send a copy's message to its host; messages sent before the step have a lower priority."""
        self.edges.by_peer[host].send(self._copy_label(message_id), flat, later=message_id.moment == "before")

    def receive_copies(self, copies: StageCopies) -> None:
        """Wait for this step's messages to the copies kept here, and store them."""
        for edge in self.edges.by_peer.values():
            edge.flush_deferred()
        expected = copies.expects(self.assignment.step)
        frames = [FrameId(message_id.source, self._copy_label(message_id)) for message_id in expected]
        for message_id, flat in zip(expected, self.collect(frames, "the copy messages of {}"), strict=True):
            copies.take(self.assignment.step, message_id, flat)

    def _copy_label(self, message_id: CopyMessageId) -> wire.CopyMessage:
        return wire.CopyMessage(
            self.assignment.generation, self.assignment.step, message_id.slot, _MOMENTS[message_id.moment]
        )
