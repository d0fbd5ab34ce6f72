"""Edges within one process: frames arrive in order, whichever end opens first, and none after the end closes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.runtime.transport.edge import EdgeFailed, EdgeOpened, EdgeSpec, FrameArrived
from planaria.runtime.transport.local import LocalInbox, LocalTransport, Rendezvous
from planaria.runtime.transport.wire import Activation, FrameContent, GradientShare, State


class Pair:
    """Two transports with one rendezvous, and an edge between them."""

    def __init__(self) -> None:
        self.rendezvous = Rendezvous()
        self.one, self.other = (LocalTransport(self.rendezvous, LocalInbox()) for _ in range(2))

    def low(self) -> Any:
        return self.one.edge(EdgeSpec("g1:1-2", "", 2, 1 << 20, 1.0))

    def high(self) -> Any:
        return self.other.edge(EdgeSpec("g1:1-2", "", 1, 1 << 20, 1.0))

    def kinds(self) -> list[list[type]]:
        """Return the types of the items in both inboxes, and empty them."""
        return [[type(item) for item in taken(way.inbox)] for way in (self.one, self.other)]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def taken(inbox: LocalInbox) -> list[Any]:
    found = []
    while not inbox.empty():
        found.append(inbox.get())
    return found


@given(st.lists(st.sampled_from(["open", "send", "abandon"]), max_size=12))
def test_frames_sent_before_the_end_arrive_in_order_whenever_the_other_opens(acts: list[str]) -> None:
    pair = Pair()
    sender, sent, opened, over = pair.low(), 0, False, False
    for act in acts:
        if act == "open" and not opened:
            pair.high()
            opened = True
        elif act == "send":
            sender.send(GradientShare(1, 0, sent), torch.full((1,), float(sent)))
            sent += not over
        elif act == "abandon":
            sender.abandon()
            over = True
    if not opened:
        pair.high()
    came = [item for item in taken(pair.other.inbox) if isinstance(item, FrameArrived)]
    assert [item.payload.item() for item in came] == list(range(sent))
    labels = [item.header.label for item in came]
    assert [label.part for label in labels if isinstance(label, GradientShare)] == list(range(sent))


def test_an_abandoned_end_receives_nothing_more(pair: Pair) -> None:
    low, high = pair.low(), pair.high()
    assert pair.kinds() == [[EdgeOpened], [EdgeOpened]]
    high.abandon()
    low.send(State(1), torch.ones(3))
    assert taken(pair.other.inbox) == []
    assert low.sent_bytes == 12


@pytest.mark.parametrize(
    ("label", "copied"), [(GradientShare(1, 0), True), (Activation(1, 0, 0, 0, FrameContent.FORWARD), False)]
)
def test_all_but_activations_are_copied(pair: Pair, label: Any, copied: bool) -> None:
    low, _ = pair.low(), pair.high()
    payload = torch.ones(2)
    low.send(label, payload)
    (_, came) = taken(pair.other.inbox)
    assert (came.payload is not payload) is copied
    if copied:
        payload.zero_()
    assert came.payload.tolist() == [1.0, 1.0]


def test_an_end_that_opens_a_broken_edge_learns_of_it(pair: Pair) -> None:
    pair.low().reset()
    pair.high()
    assert pair.kinds()[1] == [EdgeFailed]


def test_the_ends_of_a_dead_worker_are_not_met(pair: Pair) -> None:
    pair.low().send(State(1), torch.ones(3))
    pair.rendezvous.leave(pair.one.inbox)
    pair.high()
    assert taken(pair.other.inbox) == []


def test_both_ends_learn_of_a_broken_edge_once(pair: Pair) -> None:
    low, high = pair.low(), pair.high()
    pair.kinds()
    low.reset()
    high.reset()
    assert pair.kinds() == [[EdgeFailed], [EdgeFailed]]
