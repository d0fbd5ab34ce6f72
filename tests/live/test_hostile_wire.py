"""Frames on a round's edge that are no valid update: each is rejected with one line and has no other effect."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planaria.control.facts.decisions import BeginRound, Form, Keep, Member, MemberLink, Settle
from planaria.control.facts.events import REPORT, StageReady, UpdateReceived, UpdateRejected, WorkerFailed
from planaria.control.log.run_record import RunRecord
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.edge import SocketTransport
from planaria.runtime.transport.port import Port
from planaria.runtime.transport.secure import new_key
from planaria.runtime.transport.wire import (
    HEADER_BYTES,
    Activation,
    FrameContent,
    GradientShare,
    Label,
    Ping,
    State,
    TensorHeader,
    UpdatePart,
    as_bytes,
    pack,
)
from planaria.runtime.worker.assignment import Assignment
from planaria.runtime.worker.control_link import ControlLink
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.setup import Setup
from support.live.harness import ending, facts, tiny, train
from support.live.hostile_kinds import BYZANTINE, FRAMES

SOON_S = 20.0
Frames = list[tuple[bytes, bytes]]
"""headers and payloads"""


class Victim:
    """The node of stage 1 of replica 0, and a stranger in place of that of replica 1."""

    def __init__(self, folder: Path, controller: Connection, line: Connection) -> None:
        config = tiny(folder, stages=1, exchange={"replicas": 2, "kind": "noloco", "options": {"every": 2}})
        setup = Setup(config, folder, folder, "127.0.0.1", new_key())
        self.stranger = Port("127.0.0.1", setup.key)
        resolved, self.control_link = ResolvedRun(config), ControlLink(line, heartbeat_s=1.0)
        assignment = Assignment("w1", resolved, self.control_link.report)
        self.transport = SocketTransport(self.control_link.inbox, "127.0.0.1", setup.key)
        self.messages = PeerMessages(setup, resolved, assignment, self.control_link, self.transport, lambda order: None)
        nodes = resolved.arrangement.nodes(1)
        self.low, self.high = nodes[0], nodes[1]
        column = resolved.column(0)
        members = [Member(node=n, stage=column.stage[n], worker=f"w{n}", source=Keep()) for n in column.stage]
        self.messages.assign(self.low, Form(generation=1, step=7, outcome="started", members=members, links=[]))
        self.runner, self.controller, self.round = StageRunner(config, 1), controller, 0
        self.messages.round_member.begin({}, self.runner, 0)

    def begin_round(self) -> UpdatePart:
        """Begin the next round; return the label of its valid frames."""
        self.round += 1
        link = MemberLink(low=self.low, high=self.high, id=f"r{self.round}", at="")
        self.messages.run_round(
            BeginRound(round=self.round, members=[0, 1], generations=[1, 1], links=[link]), self.runner
        )
        return UpdatePart(self.round, FrameContent.BLOCKING)

    def reports_of(self, frames: Frames) -> list[UpdateReceived | UpdateRejected]:
        """Return the node's reports of these frames, until their sender has disconnected."""
        channel = self.stranger.call(self.transport.address, f"r{self.round}", SOON_S, lambda: False)
        edge, reported = self.messages.edges.round_edges[self.high], list[UpdateReceived | UpdateRejected]()
        left = memoryview(b"".join(part for frame in frames for part in frame))
        while left:
            left = left[channel.write_some(left, left[:0]) :]
        # What is closed with something unread is reset, which would take back what was sent.
        with socket.socket(fileno=os.dup(channel.fileno())) as same, contextlib.suppress(OSError):
            same.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + SOON_S
        while not edge._over:
            assert time.monotonic() < deadline, "stands still"
            if (item := self.control_link.next(time.monotonic() + 0.01)) is not None:
                self.messages.handle(item)
        channel.close()
        while (item := self.control_link.next(time.monotonic())) is not None:  # waits for a thread that serves the edge
            self.messages.handle(item)
        while self.controller.poll():
            fact = REPORT.validate_json(self.controller.recv_bytes())
            assert isinstance(fact, UpdateReceived | UpdateRejected), fact
            reported.append(fact)
        return reported


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    controller, line = Pipe()
    created = Victim(tmp_path, controller, line)
    yield created
    created.messages.edges.close()
    created.transport.close()
    created.stranger.close()


def framed(label: Label, payload: Tensor) -> tuple[bytes, bytes]:
    return pack(TensorHeader(label, payload.dtype, payload.shape)), bytes(as_bytes(payload.contiguous()))


def first_pass() -> Activation:
    return Activation(1, 7, 0, 1, FrameContent.FORWARD)


def valid_frame(victim: Victim, label: UpdatePart) -> tuple[bytes, bytes]:
    """Return a valid frame of an honest peer."""
    own = victim.messages.round_member._own
    assert own is not None and own.blocking is not None
    return framed(label, own.blocking + 0.25)


def prefetched(label: UpdatePart) -> UpdatePart:
    return label._replace(content=FrameContent.PREFETCHED)


def invalid_frames(count: int) -> list[tuple[str, Callable[[UpdatePart], tuple[bytes, bytes]]]]:
    """Return reasons and frames for the label of a round, where ``count`` numbers are right."""
    return [
        ("not all of its numbers are finite", lambda label: framed(label, torch.full((count,), torch.nan))),
        ("not all of its numbers are finite", lambda label: framed(label, torch.full((count,), torch.inf))),
        (f"torch.float32 [{count + 1}], not", lambda label: framed(label, torch.zeros(count + 1))),
        ("torch.float16", lambda label: framed(label, torch.zeros(count, dtype=torch.float16))),
        ("its blocking part: of round", lambda label: framed(label._replace(round=99), torch.zeros(count))),
        ("prefetched part: not expected", lambda label: framed(prefetched(label), torch.ones(3))),
        ("which is not part of an update", lambda label: framed(State(1), torch.zeros(3))),
        ("which is not part of an update", lambda label: framed(first_pass(), torch.zeros(3))),
        ("this edge carries at most", lambda label: (pack(TensorHeader(label, torch.float32, (1 << 28,))), b"")),
        ("not a planaria frame", lambda label: (bytes(HEADER_BYTES), b"")),
    ]


def test_each_invalid_frame_is_rejected_with_one_line_that_names_it(victim: Victim) -> None:
    for reported, created in invalid_frames(len(valid_frame(victim, victim.begin_round())[1]) // 4):
        (refused,) = victim.reports_of([created(victim.begin_round())])
        assert isinstance(refused, UpdateRejected) and reported in refused.reason and "\n" not in refused.reason
        assert (refused.replica, refused.round) == (1, victim.round)
    label = victim.begin_round()
    received, refused = victim.reports_of([valid_frame(victim, label), valid_frame(victim, label)])
    assert (
        isinstance(received, UpdateReceived) and isinstance(refused, UpdateRejected) and "sent twice" in refused.reason
    )
    victim.begin_round()
    assert victim.reports_of([]) == [], "a disconnected peer is not accused"
    (received,) = victim.reports_of([valid_frame(victim, victim.begin_round())])
    assert isinstance(received, UpdateReceived), "an invalid frame has no effect on the next round"
    assert victim.messages.round_member.settle(victim.round, 0, {1: victim.high}, victim.runner).spread > 0


def fuzzed(rng: random.Random, label: UpdatePart, good: tuple[bytes, bytes]) -> Frames:
    """Return frames that are mostly invalid: noise, a valid one with flipped bits, or another kind of message."""
    header, payload = good
    match rng.randrange(6):
        case 0:
            return [(rng.randbytes(HEADER_BYTES), rng.randbytes(rng.randrange(64)))]
        case 1:
            changed = bytearray(header)
            for _ in range(rng.randint(1, 6)):
                changed[rng.randrange(73)] ^= 1 << rng.randrange(8)
            return [(bytes(changed), payload)]
        case 2:
            older = label._replace(round=label.round + rng.choice([-1, 1, 1000]))
            other: Label = rng.choice([first_pass(), GradientShare(1, 7), State(1), Ping(3, FrameContent.PING), older])
            return [framed(other, torch.zeros(rng.randrange(40)))]
        case 3:
            dtype = rng.choice([torch.uint8, torch.float16, torch.bfloat16, torch.int64])
            return [framed(label, torch.zeros(rng.randrange(4000)).to(dtype))]
        case 4:
            numbers = torch.frombuffer(bytearray(payload), dtype=torch.float32).clone()
            numbers[rng.randrange(len(numbers))] = rng.choice([torch.nan, torch.inf, -torch.inf])
            return [framed(label, numbers)]
        case _:
            return [good, rng.choice([good, framed(label, torch.zeros(5))])]


@pytest.mark.parametrize("cases", [120, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_fuzzed_frames_are_rejected_with_one_line_or_ignored(victim: Victim, cases: int) -> None:
    rng, outcomes = random.Random(cases), Counter[str]()
    for case in range(cases):
        label = victim.begin_round()
        good = valid_frame(victim, label)
        frames = fuzzed(rng, label, good)
        reported = victim.reports_of(frames)
        refused = [fact for fact in reported if isinstance(fact, UpdateRejected)]
        received = [fact for fact in reported if isinstance(fact, UpdateReceived)]
        assert len(refused) <= 1 and len(received) <= 1 and all("\n" not in fact.reason for fact in refused), case
        if len(frames) == 2:
            assert len(received) == 1, "the first update counts; the second may be lost as its sender disconnects"
        outcomes["refused" if refused else "received" if received else "silent"] += 1
        if received:  # it uses an honest update, except for meaningless bits of a header
            (update,) = victim.messages.round_member._received[victim.high].values()
            assert bytes(as_bytes(update)) == good[1]
    assert outcomes["refused"] > 0.8 * cases, outcomes


def honest_losses(record: RunRecord) -> dict[tuple[int, int], float | None]:
    """(replica, step) → loss, of all but the Byzantine member."""
    ready = [fact for fact in facts(record, StageReady) if fact.loss is not None and fact.replica != BYZANTINE]
    return {(fact.replica, fact.step): fact.loss for fact in ready}


@pytest.mark.slow
def test_a_hostile_wire_leaves_the_fleet_as_it_is_without_it(tmp_path: Path) -> None:
    """Five replicas; in each round one of them sends another kind of invalid frame, or none in all."""
    records = {}
    for name in ("all", "nothing"):
        options = {"every": 2, "frames": name}
        exchange = {"kind": "support.live.hostile_kinds:Wire", "replicas": 5, "options": options, "strikes": 0}
        (tmp_path / name).mkdir()
        records[name] = train(tiny(tmp_path / name, stages=1, steps=2 * len(FRAMES) + 2, exchange=exchange))
        assert ending(records[name]).outcome == "finished" and not facts(records[name], WorkerFailed)
        assert len(facts(records[name], Form)) == 5, "no replica forms again"
    assert honest_losses(records["all"]) == honest_losses(records["nothing"]), "to the last bit"
    assert not facts(records["nothing"], UpdateRejected)
    reported = Counter((fact.round, fact.node) for fact in facts(records["all"], UpdateRejected))
    assert {fact.replica for fact in facts(records["all"], UpdateRejected)} == {BYZANTINE}
    silent = [*FRAMES].index("nothing")
    nonsense = {round for round in range(len(FRAMES) + 1) if round % len(FRAMES) != silent}
    assert {round for round, _ in reported} == nonsense and set(reported.values()) == {1}, "one line a round and node"
    for settle in facts(records["nothing"], Settle):
        assert sorted(settle.members) in ([0, 2, 3, 4], [BYZANTINE])
