"""A worker's post: its place in the present generation, and the edges and mail that belong to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from planaria.engine.copies import Keeping, Parcel
from planaria.engine.desk import Desk
from planaria.engine.exchange_round import RoundMember
from planaria.engine.itinerary import Itinerary
from planaria.engine.links import Links
from planaria.engine.mail import Mail
from planaria.engine.patience import Patience
from planaria.engine.runner import StageRunner
from planaria.engine.setup import Setup
from planaria.plan.actions import Action
from planaria.record import events as e
from planaria.record.decisions import BEFORE, Donate, Form, Introduce, Meet, Settle
from planaria.recovery.base import Moment
from planaria.transport.edge import Arrived, Broken, Edge, Opened
from planaria.transport.port import Port
from planaria.transport.wire import Content, Header, WireError

MOMENTS: tuple[Moment, ...] = ("before", "after")


class Post:
    """Where a worker stands (node, stage, generation, step), and all it hears from and says to its neighbours."""

    def __init__(self, setup: Setup, itinerary: Itinerary, worker: str, desk: Desk, port: Port) -> None:
        self.worker, self.node, self.stage, self.generation, self.step = worker, -1, -1, 0, 0
        self.replica = 0
        self.desk = desk
        self.circle = RoundMember(setup.config.exchange)
        self.lend: Callable[[Donate], None] = _nothing_to_lend
        """what to do when another replica wants a copy of this stage"""
        self.links = Links(setup, itinerary, port, desk.inbox)
        model, pipeline = setup.config.model, setup.config.pipeline
        self.mail = Mail((pipeline.microbatch_size, model.context, model.dim))
        self.absent: set[int] = set()
        """nodes that the present generation does without"""
        self.states: dict[int, Tensor] = {}
        """donor node → its packed state, while a lost stage is being rebuilt here"""
        self.shares: dict[tuple[int, int, int], Tensor] = {}
        """what other nodes of this stage have of the step's gradient, by generation, step and node"""
        self.parcels: dict[tuple[int, int, Parcel], Tensor] = {}
        """what has come for the copies kept here, by generation, step and parcel"""
        self._everywhere, self._itinerary = itinerary.arrangement, itinerary
        self.there = self._everywhere
        """the nodes of the present generation"""
        self.patience = Patience(setup.config.fleet.timeout_s)
        self._sent_before: dict[int, int] = {}
        self._broken: dict[Edge, str] = {}

    def move(self, node: int, form: Form) -> None:
        """Stand at ``node`` as ``form`` says; what belongs to older generations is dropped."""
        self.states.clear()
        self.node, self.stage, self.generation = node, self._everywhere.stage[node], form.generation
        self.replica = form.replica
        own = self._itinerary.column(form.replica)
        self.there = own.of([member.node for member in form.members])
        self.absent = own.stage.keys() - self.there.stage.keys()
        self.links.part()
        self.circle.drop()
        self.advance(form.step)
        self.links.form(form, node)
        # An edge may have broken while the controller was already forming this generation: it was told to the last one.
        self._broken = {edge: detail for edge, detail in self._broken.items() if self.links.has(edge)}
        for edge, detail in self._broken.items():
            self.report_broken(edge.spec.peer, detail)

    def advance(self, step: int) -> None:
        """Turn to ``step``."""
        self.step = step
        self.mail.turn(self.generation, step)
        self.parcels = {key: flat for key, flat in self.parcels.items() if key[:2] >= (self.generation, step)}
        self.shares = {key: flat for key, flat in self.shares.items() if key[:2] >= (self.generation, step)}

    def hear(self, item: Any) -> None:
        """Take in what the edges bring. Orders of an older generation may come too; nobody obeys them here."""
        match item:
            case Arrived(edge=edge) | Opened(edge=edge) | Broken(edge=edge) if not self.links.has(edge):
                return  # of an older generation: it was in the inbox when the edge was abandoned
            case Donate():
                self.lend(item)
            case Introduce() if self.is_ours(item):
                self.introduce(item)
            case Arrived(edge=edge, header=header, payload=payload) if header.content in (
                Content.PREFETCHED,
                Content.BLOCKING,
            ):
                self._hear_offer(edge.spec.peer, header, payload)
            case Broken(edge=edge) if edge in self.links.meeting.values():
                return  # whoever waits for its offer is told when that has been long enough
            case Arrived(edge=edge, header=header, payload=payload) if header.content is Content.STATE:
                self.states[edge.spec.peer] = payload
            case Arrived(edge=edge, header=header, payload=payload) if header.content is Content.PARCEL:
                parcel = Parcel(header.microbatch, edge.spec.peer, MOMENTS[header.hop & 1])
                self.parcels[header.generation, header.step, parcel] = payload
            case Arrived(edge=edge, header=header, payload=payload) if header.content is Content.SHARE:
                self.shares[header.generation, header.step, edge.spec.peer] = payload
            case Arrived(edge=edge, header=header, payload=payload):
                try:
                    self.mail.put(header, payload)
                except WireError as error:
                    self.report_broken(edge.spec.peer, str(error))
            case Opened(edge=edge):
                self.links.opened.add(edge)
            case Broken(edge=edge, detail=detail):
                self._broken[edge] = detail
                self.report_broken(edge.spec.peer, detail)

    def introduce(self, order: Introduce) -> None:
        """Tell the same stage of the others in a group ahead what is known already."""
        prefetched = self.circle.prefetch(order.round)
        for edge in self.links.meet(order.links, self.node):
            self._say(edge, Content.PREFETCHED, prefetched)

    def meet(self, order: Meet, runner: StageRunner) -> None:
        """Make an offer to the same stage of the other members of a round."""
        offer = self.circle.offer(order.round, runner)
        for edge in self.links.meet(order.links, self.node):
            self._say(edge, Content.PREFETCHED, offer.prefetched)
        for edge in self.links.meeting.values():
            self._say(edge, Content.BLOCKING, offer.blocking)
        self._tell_heard()

    def _say(self, edge: Edge, content: Content, part: Tensor | None) -> None:
        if part is not None:
            edge.send(replace(self._header(content, part, 0, 0), step=self.circle.round), part)

    def _hear_offer(self, peer: int, header: Header, payload: Tensor) -> None:
        if peer in self.links.meeting and header.step == self.circle.round:
            self.circle.hear(peer, header.content, payload)
            self._tell_heard()

    def _tell_heard(self) -> None:
        place = {"worker": self.worker, "node": self.node, "generation": self.generation, "round": self.circle.round}
        for peer, reason in self.circle.refused().items():
            said = {"replica": self._itinerary.replica_of(peer), "reason": reason}
            self.desk.report(e.OfferRefused.model_validate(place | said))
        for peer in self.circle.whole():
            self.desk.report(e.OfferHeard.model_validate(place | {"replica": self._itinerary.replica_of(peer)}))

    def hear_all(self) -> None:
        """Take in everything that is there already."""
        while not self.desk.inbox.empty():
            self.hear(self.desk.next())

    def wait_for(self, condition: Callable[[], bool], what: str, peers: Callable[[], Sequence[int]]) -> None:
        """Take in what comes until ``condition``.

        A wait longer than the time-out is reported once, as for ``what``, whose {} names the first of the ``peers``.
        """
        patience_s = self.patience.seconds
        deadline: float | None = time.monotonic() + patience_s
        while not condition():
            item = self.desk.next(deadline)
            if item is not None:
                self.hear(item)
            elif late := peers():
                self.report_broken(late[0], f"waited {patience_s:g} s for {what.format(self._named(late[0]))}")
                deadline = None

    def send(self, action: Action, out: Tensor) -> None:
        """Hand an action's output to the node that needs it."""
        assert action.target is not None
        content = Content.FORWARD if action.kind == "forward" else Content.BACKWARD
        header = self._header(content, out, action.microbatch, action.hop)
        self.links.edges[action.target].send(header, out)

    def send_share(self, node: int, flat: Tensor) -> None:
        """Send to another node of this stage what there is of the step's gradient."""
        self.links.edges[node].send(self._header(Content.SHARE, flat, 0, 0), flat)

    def take_shares(self, nodes: Sequence[int], like: Tensor) -> list[Tensor]:
        """Wait for the shares of these ``nodes``, each of the shape of ``like``, and take them in this order.

        One of another shape is a broken edge; the wait then ends with the next generation.
        """

        def missing() -> list[int]:
            return [node for node in nodes if (self.generation, self.step, node) not in self.shares]

        taken: list[Tensor] = []
        while len(taken) < len(nodes):
            self.wait_for(lambda: not missing(), "the gradient of {}", missing)
            found = [self.shares.pop((self.generation, self.step, node)) for node in nodes]
            wrong = {
                n for n, flat in zip(nodes, found, strict=True) if (flat.shape, flat.dtype) != (like.shape, like.dtype)
            }
            for node in sorted(wrong):
                self.report_broken(node, f"its gradient is not {list(like.shape)} numbers")
            taken = [] if wrong else found
        return taken

    def send_parcel(self, host: int, parcel: Parcel, flat: Tensor) -> None:
        """Send a copy's message to the node that hosts it."""
        header = self._header(Content.PARCEL, flat, parcel.slot, MOMENTS.index(parcel.moment))
        self.links.edges[host].send(header, flat)

    def take_parcels(self, keeping: Keeping) -> None:
        """Wait for all that this step brings to the copies kept here, and put it there."""
        expected = keeping.expects(self.step)

        def missing() -> list[int]:
            here = self.parcels.keys()
            return [parcel.source for parcel in expected if (self.generation, self.step, parcel) not in here]

        self.wait_for(lambda: not missing(), "what is kept here of {}", missing)
        for parcel in expected:
            keeping.take(self.step, parcel, self.parcels.pop((self.generation, self.step, parcel)))

    def send_state(self, node: int, flat: Tensor) -> None:
        """Give a packed state to the worker that rebuilds the stage of ``node``."""
        self.links.transfers[node].send(self._header(Content.STATE, flat, 0, 0), flat)

    def is_ours(self, order: Introduce | Meet | Settle) -> bool:
        """Is the order for the present generation of this worker's replica?"""
        return dict(zip(order.members, order.generations, strict=True)).get(self.replica) == self.generation

    def lend_state(self, order: Donate, flat: Tensor) -> None:
        """Give a packed state to a node of another replica, or to who stands here from now on."""
        self.links.lend(order, self._header(Content.STATE, flat, 0, 0), flat)

    def stage_at(self, node: int) -> int:
        """The stage that a node of the run holds."""
        return self._everywhere.stage[node]

    @property
    def place(self) -> int:
        """Which of the nodes of its stage this one is, over all replicas."""
        return self._everywhere.peers(self.node).index(self.node)

    def leave(self) -> None:
        """Stand nowhere any more."""
        self.links.close()
        self.circle.drop()
        self.node = self.stage = -1

    def report_broken(self, peer: int, detail: str) -> None:
        """Tell the controller that the edge to node ``peer`` is of no use, and why."""
        place = f"at step {self.step}, generation {self.generation}"
        here, there = self._named(self.node), self._named(peer)
        self.desk.report(
            e.EdgeBroken(
                worker=self.worker,
                node=self.node,
                peer=peer,
                generation=self.generation,
                detail=f"worker {self.worker} ({here}) and {there}: {detail} {place}",
            )
        )

    def _named(self, node: int) -> str:
        if node == BEFORE:
            return f"{self._named(self.node)} before"
        stage = self._everywhere.stage.get(node, node)
        if self._itinerary.replicas > 1:
            return f"stage {stage} of replica {self._itinerary.replica_of(node)}"
        return f"stage {stage}" if stage == node else f"node {node} of stage {stage}"

    def report_work(self, spans: list[e.Span], dropped: bool = False) -> None:
        """Tell what was done since the last such report, and the bytes sent to each neighbour meanwhile."""
        total = {peer: edge.sent_bytes for peer, edge in self.links.edges.items()}
        sent = {peer: size - self._sent_before.get(peer, 0) for peer, size in total.items()}
        self._sent_before = total
        self.desk.report(
            e.Worked(
                worker=self.worker,
                node=self.node,
                stage=self.stage,
                generation=self.generation,
                step=self.step,
                dropped=dropped,
                spans=spans,
                sent_bytes={peer: max(0, size) for peer, size in sent.items()},
            )
        )

    def _header(self, content: Content, tensor: Tensor, microbatch: int, hop: int) -> Header:
        return Header(
            content=content,
            generation=self.generation,
            step=self.step,
            microbatch=microbatch,
            hop=hop,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            sent_at=time.monotonic(),
        )


def _nothing_to_lend(order: Donate) -> None:
    raise AssertionError(f"asked for stage {order.stage} before there was any")
