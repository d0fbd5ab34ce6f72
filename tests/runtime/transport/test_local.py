"""Edges within a process deliver frames in order, whichever end opens first, and none after the end."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.runtime.transport.edge import Arrived, Broken, EdgeSpec, Opened
from planaria.runtime.transport.local import LocalInbox, LocalTransport, Rendezvous
from planaria.runtime.transport.wire import Activation, Content, GradientShare, State


def transport(rendezvous: Rendezvous) -> LocalTransport:
    return LocalTransport(rendezvous, LocalInbox())


def spec(peer: int) -> EdgeSpec:
    return EdgeSpec("g1:1-2", "", peer, 1 << 20, 1.0)


def taken(inbox: LocalInbox) -> list[Any]:
    found = []
    while not inbox.empty():
        found.append(inbox.get())
    return found


@given(st.lists(st.sampled_from(["open", "send", "abandon"]), max_size=12))
def test_what_is_sent_before_the_end_arrives_in_order_whenever_the_other_comes(acts: list[str]) -> None:
    rendezvous = Rendezvous()
    one, other = transport(rendezvous), transport(rendezvous)
    sender, sent, opened, over = one.edge(spec(2)), 0, False, False
    for act in acts:
        if act == "open" and not opened:
            other.edge(spec(1))
            opened = True
        elif act == "send":
            sender.send(GradientShare(1, 0, sent), torch.full((1,), float(sent)))
            sent += not over
        elif act == "abandon":
            sender.abandon()
            over = True
    if not opened:
        other.edge(spec(1))
    came = [item for item in taken(other.inbox) if isinstance(item, Arrived)]
    assert [item.payload.item() for item in came] == list(range(sent))
    assert [item.header.label.part for item in came if isinstance(item.header.label, GradientShare)] == list(
        range(sent)
    )


def test_an_end_that_was_given_up_hears_nothing_more() -> None:
    rendezvous = Rendezvous()
    one, other = transport(rendezvous), transport(rendezvous)
    low, high = one.edge(spec(2)), other.edge(spec(1))
    assert [type(item) for way in (one, other) for item in taken(way.inbox)] == [Opened, Opened]
    high.abandon()
    low.send(State(1), torch.ones(3))
    assert taken(other.inbox) == []
    assert low.sent_bytes == 12


def test_what_was_sent_does_not_change_with_the_senders_tensor() -> None:
    rendezvous = Rendezvous()
    one, other = transport(rendezvous), transport(rendezvous)
    low, _ = one.edge(spec(2)), other.edge(spec(1))
    share = torch.ones(2)
    low.send(GradientShare(1, 0), share)
    share.zero_()
    (_, came) = taken(other.inbox)
    assert came.payload.tolist() == [1.0, 1.0]


def test_an_activation_is_handed_over_as_it_is() -> None:
    rendezvous = Rendezvous()
    one, other = transport(rendezvous), transport(rendezvous)
    low, _ = one.edge(spec(2)), other.edge(spec(1))
    out = torch.ones(2)
    low.send(Activation(1, 0, 0, 0, Content.FORWARD), out)
    (_, came) = taken(other.inbox)
    assert came.payload is out


def test_who_comes_to_an_edge_that_is_broken_already_is_told() -> None:
    rendezvous = Rendezvous()
    one, other = transport(rendezvous), transport(rendezvous)
    one.edge(spec(2)).reset()
    other.edge(spec(1))
    assert [type(item) for item in taken(other.inbox)] == [Broken]


def test_nobody_meets_the_ends_of_a_dead_worker() -> None:
    rendezvous = Rendezvous()
    one, other = transport(rendezvous), transport(rendezvous)
    one.edge(spec(2)).send(State(1), torch.ones(3))
    rendezvous.leave(one.inbox)
    other.edge(spec(1))
    assert taken(other.inbox) == []


def test_a_broken_edge_is_told_to_both_ends_once() -> None:
    rendezvous = Rendezvous()
    one, other = transport(rendezvous), transport(rendezvous)
    low, high = one.edge(spec(2)), other.edge(spec(1))
    taken(one.inbox), taken(other.inbox)
    low.reset()
    high.reset()
    assert [[type(item) for item in taken(way.inbox)] for way in (one, other)] == [[Broken], [Broken]]
