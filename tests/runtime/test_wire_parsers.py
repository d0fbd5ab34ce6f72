"""Every parser of messages from other machines, given numbers out of range and worse.

Each returns a valid message or raises the one error that the calling code handles.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import ORDER, InjectFault
from planaria.faults.trace import Fault
from planaria.runtime.engine import link_survey_node
from planaria.runtime.engine.machine_service import setup_of
from planaria.runtime.fleet import files, joined_machine, joining
from planaria.runtime.fleet.control_connections import ControlListener, call
from planaria.runtime.fleet.files import FileServer
from planaria.runtime.fleet.joining import RunAddress, read_run_address
from planaria.runtime.preparation.requirements import device_needs
from planaria.runtime.transport.edge import Edge, EdgeSpec
from planaria.runtime.transport.emulated_link import EmulatedLink
from planaria.runtime.transport.listener import (
    CALLED_FOR,
    FILES,
    MACHINE,
    ConnectingPeer,
    connect,
    greeting,
    no_answer,
    parse_greeting,
)
from planaria.runtime.transport.relay import relay_at
from planaria.runtime.transport.secure import new_key
from planaria.runtime.transport.wire import (
    FrameContent,
    Ping,
    TensorHeader,
    pack,
    unpack,
)
from planaria.runtime.worker.setup import SETUP, Setup
from support.hostile_json import NUMBERS, hostile

KEY = new_key()
GREETINGS = [["w1", 1, 7], ["g1:0-1", MACHINE, 7], ["waits e", CALLED_FOR, 7], ["files", FILES, 7]]
FROM_MACHINE = [
    joining.JoinRequest(called="x", version="1", workers=2, at="127.0.0.1:1"),
    joining.Started(worker="w1", incarnation=1),
    joining.Failed(worker="w1", incarnation=1, detail="no"),
    joining.Departing(detail="x"),
    joining.Beat(),
    joining.InjectFaultRequest(fault=Fault(step=1, stage=2, signal="slow", strength=2.0, resume_after_s=1.0)),
]
TO_MACHINE = [
    joining.Welcome(host="g1", setup="{}", cwd="/"),
    joining.Start(worker="w1", incarnation=1),
    joining.Signal(worker="w1", incarnation=1, number=9),
    joining.ConnectionClosing(reason="over"),
]
ASKED = [files.Get(name="run/schedule.json"), files.ListRequest(name="data/x"), files.Put(name="x", size=1)]
ANSWERS = [
    files.FileContent(size=1),
    files.Listed(names=["x"]),
    files.Digest(sha256="0" * 64),
    files.Refused(reason="x"),
]
ORDERS = [
    d.Form(generation=1, step=0, outcome="started", members=[], links=[d.MemberLink(low=0, high=1, id="x")]),
    d.RunStep(generation=1, step=0, left_out={1: "x"}),
    d.Commit(generation=1, step=0, progress=0),
    InjectFault(number=1, signal="slow", moment="any", offset=0.5, seconds=1.0, strength=2.0),
]
REPORTS: list[e.Fact] = [
    e.WorkerJoined(worker="w1", incarnation=1, pid=1, at="127.0.0.1:1", memory=1, layer_s=0.1),
    e.Linked(worker="w1", node=1, stage=1, generation=1, link_s=0.1),
    e.EdgeBroken(worker="w1", node=1, peer=2, generation=1, detail="x", waited_s=1.0),
    e.StageReady(worker="w1", stage=1, generation=1, step=0, loss=1.0, grad_norm=1.0, received={1: "x"}),
    e.StageSaved(worker="w1", stage=1, generation=1, step=0, bytes=1, file="stage-0001.safetensors", node=1),
    e.UpdateReceived(worker="w1", node=1, generation=1, round=0, replica=0, products={1: 1.0}),
    e.WorkerMeasurements(
        worker="w1", node=1, stage=1, generation=1, step=1, steps=2, seconds=1.0, passes={}, waited={}, flows={}
    ),
    e.WorkReport(worker="w1", node=1, stage=1, generation=1, step=0, spans=[], sent_bytes={1: 2}, peak_bytes=3),
    e.Heartbeat(step=1, action_s=1.0),
]


def plain(messages: Any) -> list[Any]:
    return [message.model_dump(mode="json") for message in messages]


PARSERS: dict[str, tuple[Callable[[bytes], object], type[Exception], list[Any]]] = {
    "greeting": (parse_greeting, ValueError, GREETINGS),
    "from a machine": (joining.FROM_MACHINE.validate_json, ValidationError, plain(FROM_MACHINE)),
    "to a machine": (joining.TO_MACHINE.validate_json, ValidationError, plain(TO_MACHINE)),
    "files, asked": (files._REQUEST.validate_json, ValidationError, plain(ASKED)),
    "files, answered": (files._ANSWER.validate_json, ValidationError, plain(ANSWERS)),
    "order": (ORDER.validate_json, ValidationError, plain(ORDERS)),
    "report": (e.REPORT.validate_json, ValidationError, plain(REPORTS)),
    "survey, order": (link_survey_node.ORDER.validate_json, ValidationError, plain([link_survey_node.Probe()])),
    "survey, report": (
        link_survey_node.REPORT.validate_json,
        ValidationError,
        plain([link_survey_node.LinkFailed(link="x", detail="y")]),
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_returns_or_raises_its_one_error(name: str) -> None:
    parse, error, valid = PARSERS[name]
    for document in valid:
        parse(json.dumps(document).encode())

    @settings(max_examples=150)
    @given(hostile(*valid))
    def whatever(raw: bytes) -> None:
        with contextlib.suppress(error):
            parse(raw)

    whatever()


BOUNDED = {
    '["w1",%s,1]': (parse_greeting, {"0", "-1", "64", "65"}),
    '["w1",1,%s]': (parse_greeting, {"0", "64", "65"}),
    '{"kind":"signal","worker":"w1","incarnation":1,"number":%s}': (joining.TO_MACHINE.validate_json, {"64"}),
    '{"kind":"start","worker":"w1","incarnation":%s}': (joining.TO_MACHINE.validate_json, {"0", "64", "65"}),
}


@pytest.mark.parametrize("text", BOUNDED)
def test_numbers_for_the_system_are_in_its_range(text: str) -> None:
    """Signals, process ids, incarnations."""
    parse, fit = BOUNDED[text]
    for number in NUMBERS:
        with contextlib.nullcontext() if number in fit else pytest.raises(ValueError):  # pydantic's error is one
            parse((text % number).encode())


# ---- those who read them


@pytest.fixture
def uncaught(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Uncaught exceptions of threads."""
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_value))
    return died


HOSTILE_GREETINGS = [
    *(f'["x",{number},1]' for number in NUMBERS), *(f'["waits e",{number},{number}]' for number in NUMBERS),
    '["x",1e999,1]', "[1e999]", "{}", "", '["\\ud800",1,1]', "[" * 900,
]  # fmt: skip


def test_an_invalid_greeting_ends_its_connection_alone(uncaught: list[object]) -> None:
    accepted: list[ConnectingPeer] = []
    board = ControlListener("127.0.0.1", 0, KEY, 1000, lambda peer, line: (accepted.append(peer), line.close()))
    listener, relay = relay_at("127.0.0.1", 0, KEY)
    try:
        for at in (board.address, listener.address):
            for words in HOSTILE_GREETINGS:
                with connect(at, KEY, words.encode()[:1024], 10.0) as tls, contextlib.suppress(OSError):
                    tls.settimeout(0.0 if words.startswith('["waits') else 10.0)
                    assert tls.recv(1) == b""
        call(board.address, KEY, "w1", 1).close()
        assert parse_greeting(greeting("w1", 1))[:2] == ("w1", 1)
    finally:
        board.close()
        listener.close()
        relay.close()
    assert not uncaught
    assert all(0 < peer.incarnation < 1 << 31 and 0 <= peer.pid < 1 << 31 for peer in accepted)


@pytest.mark.parametrize("port", ["1e999", "99999999999", "-1", "x", "", "9" * 5000, "65536"])
def test_an_invalid_address_is_refused(port: str) -> None:
    for host in ("127.0.0.1", "a\x00b", "x" * 300, "é" * 70, "[::1", ""):
        assert no_answer(f"{host}:{port}", KEY, 0.2)
        with pytest.raises(OSError):
            connect(f"{host}:{port}", KEY, b"", 0.2)


class Recorded:
    """A connection that receives these messages."""

    closed = False
    own_address = "127.0.0.1"

    def __init__(self, *messages: bytes) -> None:
        self._messages, self.sent = [*messages], list[bytes]()

    def send_bytes(self, text: bytes) -> None:
        self.sent.append(text)

    def poll(self, _: float | None = None) -> bool:
        if not self._messages:
            raise EOFError
        return True

    def recv_bytes(self, _: int = 0) -> bytes:
        return self._messages.pop(0)

    def close(self) -> None:
        self.closed = True


@given(messages=st.lists(hostile(*plain(ASKED), *plain(ANSWERS)), min_size=1, max_size=3))
def test_a_file_server_closes_the_line_whatever_comes(messages: list[bytes]) -> None:
    line: Any = Recorded(*messages)
    FileServer({}).serve(line)
    assert line.closed


@contextlib.contextmanager
def visiting(line: Recorded) -> Iterator[None]:
    """Machines that join call this line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined_machine, "call", lambda *_: line)
        yield


@given(answer=hostile(*plain(TO_MACHINE)))
def test_a_machine_that_joins_reports_unreadable_answers_in_one_line(answer: bytes) -> None:
    line = Recorded(answer)
    with visiting(line):
        try:
            joined_machine.RunMembership(RunAddress(at="127.0.0.1:1", key="00" * 32), 1)
        except (UserError, OSError) as error:
            assert "\n" not in str(error)


class Pool:
    """Takes what a process pool would give to the system."""

    empty = False

    def start(self, worker: str, incarnation: int) -> int:
        assert Path(worker).name == worker and 0 <= incarnation < 1 << 31
        return 1

    def signal(self, worker: str, incarnation: int, number: int) -> None:
        assert 1 <= number <= 64


@settings(max_examples=60)
@given(messages=st.lists(hostile(*plain(TO_MACHINE)), min_size=1, max_size=3))
def test_a_joined_machine_leaves_at_an_unreadable_message(messages: list[bytes]) -> None:
    line = Recorded(TO_MACHINE[0].model_dump_json().encode(), *messages)
    with visiting(line):
        membership = joined_machine.RunMembership(RunAddress(at="127.0.0.1:1", key="00" * 32), 1)
        line.closed = True  # no beats
        pool: Any = Pool()
        assert membership.serve_until_end(pool, 60.0, lambda: "", lambda _: None).how in (
            "lost",
            "over",
            "dismissed",
            "restarting",
        )


SETTINGS = json.loads(SETUP.dump_json(Setup(RunConfig(), Path("/run"), Path("/data"), "127.0.0.1")))


@pytest.mark.slow
@settings(max_examples=300)
@given(raw=hostile(SETTINGS))
def test_a_setup_is_read_or_refused_in_a_line(raw: bytes) -> None:
    class Found:
        key = KEY
        welcome = joining.Welcome(host="g1", setup=raw.decode(errors="replace"), cwd="/")

    visited: Any = Found()
    try:
        device_needs(setup_of(visited).config)
    except UserError as error:
        assert "\n" not in str(error)


@given(raw=hostile({"at": "127.0.0.1:1", "key": "00" * 32, "folder_id": "x"}))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_address_is_read_or_refused_in_a_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "address.json").write_bytes(raw)
    with contextlib.suppress(UserError):
        address = read_run_address(tmp_path)
        assert no_answer(address.at, KEY, 0.05)


# ---- frames


def test_a_claimed_send_time_delays_frames_at_most_by_the_link() -> None:
    """A frame from the future is not held until then, and neither are later ones."""
    edge: Any = object.__new__(Edge)
    edge._due = edge.hold_s = edge.hold_until = 0.0
    edge.spec = EdgeSpec("x", "", 1, 1 << 20, 1.0, link=EmulatedLink(0.01, 1e6))
    header = unpack(pack(TensorHeader(Ping(1, FrameContent.PING), torch.float32, (10,), 9e8)), 1 << 20)
    assert edge._emulate_link(header) < time.monotonic() + 60.0
