"""A worker's post: its place in the present generation, and the edges and mail that belong to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from planaria import events as e
from planaria.decisions import Form
from planaria.engine.desk import Desk
from planaria.engine.keeping import Keeping, Parcel
from planaria.engine.links import Links
from planaria.engine.mail import Mail
from planaria.engine.setup import Setup
from planaria.plan.actions import Action
from planaria.recovery.base import Moment
from planaria.transport.edge import Arrived, Broken, Edge, Opened
from planaria.transport.wire import Content, Header, WireError

MOMENTS: tuple[Moment, ...] = ("before", "after")


class Post:
    """Where a worker stands (stage, generation, step), and all it hears from and says to its neighbours."""

    def __init__(self, setup: Setup, worker: str, desk: Desk) -> None:
        self.worker, self.stage, self.generation, self.step = worker, -1, 0, 0
        self.desk = desk
        self.links = Links(setup, desk.inbox)
        model, pipeline = setup.config.model, setup.config.pipeline
        self.mail = Mail((pipeline.microbatch_size, model.context, model.dim))
        self.absent: set[int] = set()
        """stages that the present generation skips"""
        self.states: dict[int, Tensor] = {}
        """donor stage → its packed state, while a lost stage is being rebuilt here"""
        self.parcels: dict[tuple[int, int, Parcel], Tensor] = {}
        """what has come for the copies kept here, by generation, step and parcel"""
        self._stages = pipeline.stages
        self._timeout_s = setup.config.fleet.timeout_s
        self._sent_before: dict[int, int] = {}
        self._broken: dict[Edge, str] = {}

    def move(self, stage: int, form: Form) -> None:
        """Take the place that ``form`` gives to ``stage``; what belongs to older generations is dropped."""
        self.states.clear()
        self.stage, self.generation = stage, form.generation
        self.absent = set(range(self._stages + 1)) - {member.stage for member in form.members}
        self.advance(form.step)
        self.links.form(form, stage)
        # An edge may have broken while the controller was already forming this generation: it was told to the last one.
        self._broken = {edge: detail for edge, detail in self._broken.items() if self.links.has(edge)}
        for edge, detail in self._broken.items():
            self.report_broken(edge.spec.peer, detail)

    def advance(self, step: int) -> None:
        """Turn to ``step``."""
        self.step = step
        self.mail.turn(self.generation, step)
        self.parcels = {key: flat for key, flat in self.parcels.items() if key[:2] >= (self.generation, step)}

    def hear(self, item: Any) -> None:
        """Take in what the edges bring. Orders of an older generation may come too; nobody obeys them here."""
        match item:
            case Arrived(edge=edge) | Opened(edge=edge) | Broken(edge=edge) if not self.links.has(edge):
                return  # of an older generation: it was in the inbox when the edge was abandoned
            case Arrived(edge=edge, header=header, payload=payload) if header.content is Content.STATE:
                self.states[edge.spec.peer] = payload
            case Arrived(header=header, payload=payload) if header.content is Content.PARCEL:
                parcel = Parcel(header.microbatch, MOMENTS[header.hop & 1])
                self.parcels[header.generation, header.step, parcel] = payload
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

    def hear_all(self) -> None:
        """Take in everything that is there already."""
        while not self.desk.inbox.empty():
            self.hear(self.desk.next())

    def wait_for(self, condition: Callable[[], bool], what: str, peers: Callable[[], Sequence[int]]) -> None:
        """Take in what comes until ``condition``.

        A wait longer than the time-out is reported once, as for ``what``, with the first of the ``peers`` in its {}.
        """
        deadline: float | None = time.monotonic() + self._timeout_s
        while not condition():
            item = self.desk.next(deadline)
            if item is not None:
                self.hear(item)
            elif late := peers():
                self.report_broken(late[0], f"waited {self._timeout_s:g} s for {what.format(late[0])}")
                deadline = None

    def send(self, action: Action, out: Tensor) -> None:
        """Hand an action's output to the stage that needs it."""
        assert action.target is not None
        content = Content.FORWARD if action.kind == "forward" else Content.BACKWARD
        header = self._header(content, out, action.microbatch, action.hop)
        self.links.edges[action.target].send(header, out)

    def send_parcel(self, host: int, parcel: Parcel, flat: Tensor) -> int:
        """Send a copy's message to the stage that hosts it; bytes sent."""
        header = self._header(Content.PARCEL, flat, parcel.slot, MOMENTS.index(parcel.moment))
        self.links.edges[host].send(header, flat)
        return flat.nbytes

    def take_parcels(self, keeping: Keeping) -> None:
        """Wait for all that this step brings to the copies kept here, and put it there."""
        expected = keeping.expects(self.step)

        def missing() -> list[int]:
            here = self.parcels.keys()
            return [stage for parcel, stage in expected.items() if (self.generation, self.step, parcel) not in here]

        self.wait_for(lambda: not missing(), "what is kept here of stage {}", missing)
        for parcel in expected:
            keeping.take(self.step, parcel, self.parcels.pop((self.generation, self.step, parcel)))

    def send_state(self, to_stage: int, flat: Tensor) -> None:
        """Give a packed state to the worker that rebuilds ``to_stage``."""
        self.links.transfers[to_stage].send(self._header(Content.STATE, flat, 0, 0), flat)

    def report_broken(self, peer: int, detail: str) -> None:
        """Tell the controller that the edge to stage ``peer`` is of no use, and why."""
        place = f"at step {self.step}, generation {self.generation}"
        self.desk.report(
            e.EdgeBroken(
                worker=self.worker,
                stage=self.stage,
                peer_stage=peer,
                generation=self.generation,
                detail=f"worker {self.worker} (stage {self.stage}) and stage {peer}: {detail} {place}",
            )
        )

    def report_work(self, spans: list[e.Span], dropped: bool = False) -> None:
        """Tell what was done since the last such report, and the bytes sent to each neighbour meanwhile."""
        total = {peer: edge.sent_bytes for peer, edge in self.links.edges.items()}
        sent = {peer: size - self._sent_before.get(peer, 0) for peer, size in total.items()}
        self._sent_before = total
        self.desk.report(
            e.Worked(
                worker=self.worker,
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
