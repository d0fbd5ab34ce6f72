"""Messages of an older generation or of a wrong shape have no effect: in peer messages, received frames and links."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from planaria.control.facts.decisions import Form, Keep, Member, MemberLink, Rebuild, Source
from planaria.control.facts.events import REPORT, EdgeBroken
from planaria.pipeline.plan.actions import Action
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport import edge as edges
from planaria.runtime.transport.edge import EdgeFailed, EdgeOpened, EdgeSpec, FrameArrived, SocketTransport
from planaria.runtime.transport.inbox import Inbox
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.ring import Rings
from planaria.runtime.transport.secure import new_key
from planaria.runtime.transport.staging import Staging
from planaria.runtime.transport.wire import Activation, FrameContent, GradientShare, Label, State, TensorHeader
from planaria.runtime.worker import peer_messages as peer_messages
from planaria.runtime.worker.assignment import Assignment
from planaria.runtime.worker.control_link import ControlLink
from planaria.runtime.worker.peer_messages import PeerMessages, WaitTimeout
from planaria.runtime.worker.received_frames import FrameId
from planaria.runtime.worker.setup import Setup
from support.fake_device import FakeCopier
from support.live.harness import tiny
from support.waiting import until

SHAPE = (2, 32, 32)


def first_visit(generation: int, step: int) -> Activation:
    """The activation of microbatch 0 from stage 1."""
    return Activation(generation, step, 0, 1, FrameContent.FORWARD)


def frame(
    label: Label, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32, value: float = 0.0
) -> tuple[TensorHeader, Tensor]:
    return TensorHeader(label, dtype, shape), torch.full(shape, value, dtype=dtype)


SECOND_VISIT = Action("forward", 0, 2, node=2, source=1, target=3)
"""waits for that"""


# ---- messages over edges that lead nowhere

Scene = tuple[PeerMessages, Connection]


@dataclass(eq=False)
class DeadEdge:
    """Records its frames, and whether it was abandoned."""

    spec: EdgeSpec
    port: Port
    inbox: Inbox
    abandoned: bool = False
    sent_bytes: int = 0
    sent: list[Label] = field(default_factory=list)

    def abandon(self) -> None:
        self.abandoned = True


def form(generation: int, links: dict[tuple[int, int], str], sources: dict[int, Source] | None = None) -> Form:
    held = {s: (sources or {}).get(s, Keep()) for s in range(5)}
    members = [Member(node=s, stage=s, worker=f"w{s}", source=source, at=f"w{s}'s:1") for s, source in held.items()]
    ordered = [MemberLink(low=low, high=high, id=name, at=f"w{low}'s:1") for (low, high), name in links.items()]
    return Form(generation=generation, step=7, outcome="recovered", members=members, links=ordered)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where stages compute."""
    return getattr(request, "param", "cpu")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[Scene]:
    """The messages of the worker at stage 2, and the controller's end of its connection."""
    monkeypatch.setattr(edges, "Edge", DeadEdge)
    monkeypatch.setattr(peer_messages, "with_cuda", lambda size: (Staging(FakeCopier()), Rings()))
    ours, theirs = Pipe()
    setup = Setup(tiny(tmp_path, train={"device": device}), tmp_path, tmp_path, "127.0.0.1", new_key())
    resolved, control_link = ResolvedRun(setup.config), ControlLink(theirs, heartbeat_s=1.0)
    assignment = Assignment("w2", resolved, control_link.report)
    transport = SocketTransport(control_link.inbox, "127.0.0.1", setup.key)
    messages = PeerMessages(
        setup,
        resolved,
        assignment,
        control_link,
        transport,
        lambda order: pytest.fail(f"a copy without an order: {order}"),
    )
    messages.assign(2, form(1, {(1, 2): "g1:1-2", (2, 3): "g1:2-3", (0, 1): "g1:0-1"}))
    yield messages, ours
    transport.close()


def test_links_keep_an_edge_while_its_id_stays(scene: Scene) -> None:
    messages, _ = scene
    before, replaced = messages.edges.by_peer[1], messages.edges.by_peer[3]
    assert set(messages.edges.by_peer) == {1, 3}, "stage 2 has no part in the edge 0-1"
    messages.handle(EdgeOpened(before, 0.0))
    messages.assign(2, form(2, {(1, 2): "g1:1-2", (2, 3): "g2:2-3"}))
    assert messages.edges.by_peer[1] is before and not before.abandoned
    assert messages.edges.by_peer[3] is not replaced and replaced.abandoned
    assert messages.edges.unopened == [3]
    called = {peer: edge.spec.at for peer, edge in messages.edges.by_peer.items()}
    assert called == {1: "w1's:1", 3: ""}, "the high end of an edge calls the low one"


def test_both_ends_of_a_rebuild_have_an_edge_until_it_ends(scene: Scene) -> None:
    messages, _ = scene
    messages.assign(2, form(2, {(1, 2): "g1:1-2"}, {3: Rebuild(by="checkfree", donors=[2, 4])}))
    (gift,) = messages.edges.transfers.values()
    assert (gift.spec.link_id, gift.spec.peer, gift.spec.at) == ("g2:state:2>3", 3, "w3's:1"), "donors call"
    messages.assign(2, form(3, {(1, 2): "g1:1-2"}, {2: Rebuild(by="checkfree", donors=[1, 3])}))
    assert gift.abandoned
    assert {edge.spec.link_id for edge in messages.edges.transfers.values()} == {"g3:state:1>2", "g3:state:3>2"}
    assert {edge.spec.at for edge in messages.edges.transfers.values()} == {""}
    messages.edges.end_transfers()
    assert not messages.edges.transfers


@pytest.mark.parametrize("kind", ["frame", "state", "broken", "opened"])
def test_items_of_an_edge_of_an_older_generation_are_ignored(scene: Scene, kind: str) -> None:
    messages, controller = scene
    old: Any = messages.edges.by_peer[3]
    messages.assign(2, form(2, {(1, 2): "g1:1-2", (2, 3): "g2:2-3"}))
    item = {
        "frame": FrameArrived(old, *frame(first_visit(2, 7))),
        "state": FrameArrived(old, *frame(State(3))),
        "broken": EdgeFailed(old, "connection reset"),
        "opened": EdgeOpened(old, 0.1),
    }[kind]
    messages.handle(item)
    waiting = [FrameId(old.spec.peer, label) for label in (first_visit(2, 7), State(3))]
    assert not [frame for frame in waiting if frame in messages.frames_in] and old not in messages.edges.opened
    assert not controller.poll(), "a false alarm would cost a generation"


def test_a_frame_of_a_wrong_shape_is_reported(scene: Scene) -> None:
    messages, controller = scene
    messages.handle(FrameArrived(messages.edges.by_peer[1], *frame(first_visit(1, 7), shape=(2, 32, 31))))
    report = REPORT.validate_json(controller.recv_bytes())
    assert isinstance(report, EdgeBroken)
    assert (report.node, report.peer, report.generation) == (2, 1, 1)
    for part in ("worker w2 (stage 2) and stage 1", "[2, 32, 31]", "step 7", "generation 1"):
        assert part in report.detail
    assert FrameId(1, first_visit(1, 7)) not in messages.frames_in


def test_a_frame_of_the_present_generation_is_accepted(scene: Scene) -> None:
    messages, _ = scene
    messages.handle(FrameArrived(messages.edges.by_peer[1], *frame(first_visit(1, 7))))
    assert messages.input_of(SECOND_VISIT) == FrameId(1, first_visit(1, 7))
    assert messages.input_of(SECOND_VISIT) in messages.frames_in
    own_data = Action("forward", 4, 0, node=0, source=None, target=1)
    assert messages.input_of(own_data) is None, "it waits for no message"


def test_a_wait_beyond_the_timeout_is_reported_once_and_continues(scene: Scene) -> None:
    messages, controller = scene
    messages.wait_timeout = WaitTimeout(0.01)
    gradient = FrameArrived(messages.edges.by_peer[3], *frame(GradientShare(1, 7), shape=(4,), value=2.0))
    threading.Timer(0.2, lambda: messages.control_link.inbox.put(gradient)).start()
    (taken,) = messages.take_shares([3], torch.zeros(4))
    assert torch.equal(taken, torch.full((4,), 2.0))
    report = REPORT.validate_json(controller.recv_bytes())
    assert isinstance(report, EdgeBroken) and report.peer == 3
    assert "waited 0.01 s for the gradient of stage 3" in report.detail
    assert not controller.poll()


def test_a_gradient_of_a_wrong_shape_is_rejected_and_waited_for_again(scene: Scene) -> None:
    messages, controller = scene
    messages.handle(FrameArrived(messages.edges.by_peer[3], *frame(GradientShare(1, 7), shape=(3,))))
    gradient = FrameArrived(messages.edges.by_peer[3], *frame(GradientShare(1, 7), shape=(4,)))
    threading.Timer(0.2, lambda: messages.control_link.inbox.put(gradient)).start()
    (taken,) = messages.take_shares([3], torch.zeros(4))
    assert taken.shape == (4,)
    report = REPORT.validate_json(controller.recv_bytes())
    assert isinstance(report, EdgeBroken) and "its gradient is not [4] numbers" in report.detail


# ---- stages that compute on a device


class OnDevice(Tensor):
    """Claims to be on a device."""

    is_cuda = property(lambda self: True)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_results_are_sent_once_on_the_host_unless_a_generation_has_begun(scene: Scene) -> None:
    messages, _ = scene
    copier, sent = cast(FakeCopier, messages.staging._copier), list[tuple[Label, float]]()
    edge: Any = messages.edges.by_peer[3]
    edge.send = lambda label, payload: sent.append((label, payload.sum().item()))
    first = Action("forward", 0, 2, node=2, source=1, target=3)
    for number, generation in ((1.0, 1), (2.0, 2)):
        messages.send(first, torch.full((3,), number).as_subclass(OnDevice))
        assert not sent, "it is being copied"
        if generation == 1:  # a neighbour is killed; this edge stays
            messages.assign(2, form(2, {(1, 2): "g1:1-2", (2, 3): "g1:2-3"}))
    for event in copier.events:
        event.happen()
    until(lambda: not messages.staging.under_way)
    assert sent == [(first_visit(2, 7)._replace(hop=2), 6.0)]


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_arrivals_are_copied_to_the_device_at_once_and_joined_when_taken(scene: Scene) -> None:
    messages, _ = scene
    copier, (header, payload) = cast(FakeCopier, messages.staging._copier), frame(first_visit(1, 7))
    messages.handle(FrameArrived(messages.edges.by_peer[1], header, payload.as_subclass(OnDevice)))
    (event,) = copier.events
    assert not copier.joined
    taken = messages.take(FrameId(1, first_visit(1, 7)))
    assert len(copier.joined) == 1 and copier.joined[0] is taken
    event.happen()
    assert torch.equal(taken.as_subclass(Tensor), payload)
