"""A worker's post: what it sends to other nodes and what comes from them, over the edges of the present generation."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from planaria.control import events as e
from planaria.control.decisions import Donate, Form, Introduce, Meet
from planaria.pipeline.plan.actions import Action, Key, Kind
from planaria.recovery.base import Moment
from planaria.runtime.engine.copies import Keeping, Parcel
from planaria.runtime.engine.desk import Desk
from planaria.runtime.engine.exchange_round import RoundMember
from planaria.runtime.engine.links import Links
from planaria.runtime.engine.mail import Awaited, Mail
from planaria.runtime.engine.outer_state import Verdict
from planaria.runtime.engine.position import Position
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.runner import StageRunner
from planaria.runtime.engine.setup import Setup
from planaria.runtime.transport import wire
from planaria.runtime.transport.edge import Arrived, Broken, EdgeEnd, Opened, SocketTransport, Transport
from planaria.runtime.transport.staging import Staging, with_cuda
from planaria.runtime.transport.wire import Content, WireError

_TIMES = 3
"""how many times as long as a whole step one message of it may take"""
_REMEMBERED = 16
"""steps; a machine that was busy may be so no longer"""


class Patience:
    """Scaled by what steps have taken in this run, never less than the recipe's number of seconds.

    Before there was a step, by what the first pass of this worker has taken: on a busy machine that is long too.
    """

    def __init__(self, floor_s: float) -> None:
        self.warm_s = 0.0
        """seconds of one forward, backward and update at the worker's birth"""
        self._floor_s, self._actions = floor_s, 1
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)

    def expect(self, actions: int) -> None:
        """So many actions, of all workers together, make the step that begins."""
        self._actions = actions

    def learn(self, step_s: float) -> None:
        """A step is over; it took so many seconds."""
        self._steps.append(step_s)

    @property
    def seconds(self) -> float:
        """How long to wait now."""
        usual = max(self._steps) if self._steps else self.warm_s * self._actions / 2  # a pass each way is two actions
        return max(self._floor_s, _TIMES * usual)


_PASSES: dict[Kind, wire.Pass] = {"forward": Content.FORWARD, "backward": Content.BACKWARD}
_MOMENTS: dict[Moment, wire.Renewal] = {"before": Content.COPY_BEFORE, "after": Content.COPY_AFTER}


class Post:
    """All that a worker says to its neighbours and hears from them."""

    def __init__(
        self,
        setup: Setup,
        resolved: ResolvedRun,
        here: Position,
        desk: Desk,
        transport: Transport,
        lend: Callable[[Donate], None],
    ) -> None:
        """``lend`` is called when another replica, or a successor, wants a copy of this stage."""
        self.here, self.desk, self.lend = here, desk, lend
        self.circle = RoundMember(setup.config.exchange)
        self.links = Links(setup, resolved, transport)
        model, pipeline = setup.config.model, setup.config.pipeline
        self.staging: Staging | None = None
        """where stages compute on a device, in processes of their own"""
        shape = pipeline.microbatch_size, model.context, model.dim
        if setup.config.train.device == "cuda" and isinstance(transport, SocketTransport):
            self.staging, transport.port.rings = with_cuda(math.prod(shape) * wire.ACTIVATIONS[pipeline.wire].itemsize)
        land = None if self.staging is None else self.staging.receive
        self.mail = Mail(shape, wire.ACTIVATIONS[pipeline.wire], land)
        self.patience = Patience(setup.config.fleet.timeout_s)
        self.first_pass = 0
        """what activations are numbered from: in a coded step, those of rounds that were broken off are never taken"""
        self.waited: dict[int, float] = {}
        """node → seconds that its frames have been waited for in this step"""
        self._resolved = resolved
        self._broken: dict[EdgeEnd, Broken] = {}
        self._step_began = time.monotonic()

    def move(self, node: int, form: Form) -> None:
        """Stand at ``node`` as ``form`` says; what belongs to older generations is dropped."""
        self._drop_copies()
        self.here.move(node, form)
        self.links.part()
        self.circle.drop()
        self.advance(form.step)
        self.links.form(form, node)
        # An edge may have broken while the controller was already forming this generation: it was told to the last one.
        self._broken = {edge: broken for edge, broken in self._broken.items() if self.links.has(edge)}
        for broken in self._broken.values():
            self._report_broken(broken)

    def advance(self, step: int) -> None:
        """Turn to ``step``."""
        self.here.step, self.first_pass, self._step_began = step, 0, time.monotonic()
        self.waited = {}
        self.mail.turn(self.here.generation, step)

    def leave(self) -> None:
        """Stand nowhere any more."""
        self._drop_copies()
        self.links.close()
        self.circle.drop()
        self.here.node = self.here.stage = -1

    def _drop_copies(self) -> None:
        """What is being copied from a device is for edges that go."""
        if self.staging is not None:
            self.staging.drop()

    @property
    def nodes_of_stage(self) -> Sequence[int]:
        """All nodes of this worker's stage, whether anybody stands there or not."""
        return self._resolved.arrangement.nodes(self.here.stage)

    def hear(self, item: Any) -> None:
        """Take in what the edges bring. Orders of an older generation may come too; nobody obeys them here."""
        match item:
            case Arrived(edge=edge) | Opened(edge=edge) | Broken(edge=edge) if not self.links.has(edge):
                return  # of an older generation: it was in the inbox when the edge was abandoned
            case Donate():
                self.lend(item)
            case Introduce() if self.here.is_ours(item):
                self.introduce(item)
            case Arrived(edge=edge, header=header, payload=payload) if edge in self.links.meeting.values():
                self._hear_offer(edge, header, payload)
            case Arrived(edge=edge, header=header, payload=payload):
                try:
                    self.mail.put(edge.spec.peer, header, payload)
                except WireError as error:
                    self.here.report_broken(edge.spec.peer, str(error))
            case Opened(edge=edge):
                self.links.opened.add(edge)
            case Broken(edge=edge, detail=detail, strange=strange) if edge in self.links.meeting.values():
                if strange:
                    self._refuse(edge, detail)
                return  # whoever waits for its offer is told when that has been long enough
            case Broken(edge=edge):
                self._broken[edge] = item
                self._report_broken(item)

    def _report_broken(self, broken: Broken) -> None:
        spec = broken.edge.spec
        relay = self.links.relay_at(spec.over) if broken.silent_relay else ""
        self.here.report_broken(spec.peer, broken.detail, relay=relay)

    def hear_all(self) -> None:
        """Take in everything that is there already."""
        while not self.desk.inbox.empty():
            self.hear(self.desk.next())

    def wait_for(self, late: Callable[[], Sequence[int]], what: str) -> None:
        """Take in what comes until no node is ``late``.

        A wait longer than the time-out is reported once, as for ``what``, whose {} names the first of these nodes.
        """
        if not (nodes := late()):
            return
        patience_s, began = self.patience.seconds, time.monotonic()
        deadline: float | None = began + patience_s
        while nodes:
            since = time.monotonic()
            item = self.desk.next(deadline)
            self.waited[nodes[0]] = self.waited.get(nodes[0], 0.0) + time.monotonic() - since
            if item is not None:
                self.hear(item)
            else:
                waited = f"waited {patience_s:g} s for {what.format(self.here.name_of(nodes[0]))}"
                self.here.report_broken(nodes[0], waited, patience_s, began - self._step_began)
                deadline = None
            nodes = late()

    def collect(self, frames: Sequence[Awaited], what: str) -> list[Tensor]:
        """Wait for these frames, as :meth:`wait_for` does, and take them in this order."""
        self.wait_for(lambda: self.mail.missing(frames), what)
        return [self.mail.take(frame) for frame in frames]

    def introduce(self, order: Introduce) -> None:
        """Tell the same stage of the others in a group ahead what is known already."""
        prefetched = self.circle.prefetch(order.round)
        for edge in self.links.meet(order.links, self.here.node):
            self.circle.forget(edge.spec.peer)
            self._say(edge, Content.PREFETCHED, prefetched)

    def meet(self, order: Meet, runner: StageRunner) -> None:
        """Make an offer to the same stage of the other members of a round."""
        offer, me, replica_of = self.circle.offer(order.round, runner), self.here.replica, self._resolved.replica_of
        for edge in self.links.meet(order.links, self.here.node):
            self.circle.forget(edge.spec.peer)
            self._say(edge, Content.PREFETCHED, offer.prefetched)
        said = self.circle.tell(self.here.step, me, [member for member in order.members if member != me])
        for peer, edge in self.links.meeting.items():
            self._say(edge, Content.BLOCKING, said[replica_of(peer)].blocking)
        digest, products = self.circle.own_digest(me), self.circle.products(me, me, None)
        if digest or products:
            self.here.report(e.OfferHeard, round=order.round, replica=me, digest=digest, products=products)
        self._tell_heard()

    def _say(self, edge: EdgeEnd, content: wire.Part, part: Tensor | None) -> None:
        if part is not None:
            edge.send(wire.OfferPart(self.circle.round, content), part)

    def _hear_offer(self, edge: EdgeEnd, header: wire.Header, payload: Tensor) -> None:
        """Take in what comes over an edge of the round under way."""
        label, round = header.label, self.circle.round
        if not isinstance(label, wire.OfferPart):
            self._refuse(edge, f"sent {label}, which is no part of an offer")
        elif label.round != round:
            self._refuse(edge, f"its {label.content.name.lower()} part: of round {label.round}, not {round}")
        elif self.circle.hear(edge.spec.peer, label.content, payload):
            self._tell_heard()
        else:
            self._refuse(edge, f"its {label.content.name.lower()} part: said twice")

    def _refuse(self, edge: EdgeEnd, why: str) -> None:
        """What has come over an edge of a round can be no offer: nothing more is read there, whatever comes."""
        self.circle.refuse(edge.spec.peer, why)
        edge.reset()
        self._tell_heard()

    def _tell_heard(self) -> None:
        round, replica_of = self.circle.round, self._resolved.replica_of
        for peer, reason in self.circle.refused().items():
            self.here.report(e.OfferRefused, round=round, replica=replica_of(peer), reason=reason)
        for peer in self.circle.whole():
            digest, replica = self.circle.digest_of(peer), replica_of(peer)
            products = self.circle.products(self.here.replica, replica, peer)
            self.here.report(e.OfferHeard, round=round, replica=replica, digest=digest, products=products)

    def input_of(self, action: Action) -> Awaited | None:
        """The frame that an action waits for; None if its input is local."""
        if action.source is None or action.needs is None:
            return None
        return Awaited(action.source, self._activation(action.needs))

    def send(self, action: Action, out: Tensor) -> None:
        """Hand an action's output to the node that needs it, from a device once it is on the host."""
        assert action.target is not None
        send = partial(self.links.edges[action.target].send, self._activation(action.key))
        if self.staging is not None and out.is_cuda:
            self.staging.send(out, send)
        else:
            send(out)

    def take(self, frame: Awaited) -> Tensor:
        """An action's input, which is here."""
        payload = self.mail.take(frame)
        return self.staging.join(payload) if self.staging is not None and payload.is_cuda else payload

    def _activation(self, key: Key) -> wire.Activation:
        microbatch = self.first_pass + key.microbatch
        return wire.Activation(self.here.generation, self.here.step, microbatch, key.hop, _PASSES[key.kind])

    def send_share(self, node: int, flat: Tensor, part: int = 0) -> None:
        """Send to another node of this stage what there is of the step's gradient, or a ``part`` of that."""
        self.links.edges[node].send(wire.GradientShare(self.here.generation, self.here.step, part), flat)

    def take_shares(self, nodes: Sequence[int], like: Tensor | None, part: int = 0) -> list[Tensor]:
        """Wait for the shares of these ``nodes``, each of the shape of ``like`` if there is one, and take them in this
        order.

        One of another shape is a broken edge; the wait then ends with the next generation.
        """
        label = wire.GradientShare(self.here.generation, self.here.step, part)
        taken: list[Tensor] = []
        while len(taken) < len(nodes):
            found = self.collect([Awaited(node, label) for node in nodes], "the gradient of {}")
            if like is None:
                return found
            wrong = {
                n for n, flat in zip(nodes, found, strict=True) if (flat.shape, flat.dtype) != (like.shape, like.dtype)
            }
            for node in sorted(wrong):
                self.here.report_broken(node, f"its gradient is not {list(like.shape)} numbers")
            taken = [] if wrong else found
        return taken

    def report(self, verdict: Verdict, round: int, first: bool) -> None:
        """Tell the controller, if this is the ``first`` node of its stage for all of them."""
        for kind, said in verdict.told(first):
            self.here.report(kind, round=round, **said)

    def send_parcel(self, host: int, parcel: Parcel, flat: Tensor) -> None:
        """Send a copy's message to the node that hosts it; what has the whole step's time lets the others pass."""
        self.links.edges[host].send(self._copy_message(parcel), flat, later=parcel.moment == "before")

    def take_parcels(self, keeping: Keeping) -> None:
        """Wait for all that this step brings to the copies kept here, and put it there."""
        for edge in self.links.edges.values():
            edge.hurry()
        expected = keeping.expects(self.here.step)
        frames = [Awaited(parcel.source, self._copy_message(parcel)) for parcel in expected]
        for parcel, flat in zip(expected, self.collect(frames, "what is kept here of {}"), strict=True):
            keeping.take(self.here.step, parcel, flat)

    def _copy_message(self, parcel: Parcel) -> wire.CopyMessage:
        return wire.CopyMessage(self.here.generation, self.here.step, parcel.slot, _MOMENTS[parcel.moment])
