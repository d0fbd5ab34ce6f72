"""What the controller makes of machines that call: the fit, the leaving, the silent, and those that talk nonsense."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import planaria
from planaria.common.errors import UserError
from planaria.runtime.fleet import joining
from planaria.runtime.fleet.base import Gone, Joined, Leaving, Left, Notice
from planaria.runtime.fleet.guest import Visit
from planaria.runtime.fleet.guests import Guests
from planaria.runtime.fleet.joining import Door
from planaria.runtime.fleet.remote import RemoteFleet
from planaria.runtime.fleet.switchboard import WorkerLine, call
from planaria.runtime.transport.listener import VISITOR
from planaria.runtime.transport.secure import new_key
from waiting import until

SILENCE_S = 3.0
"""long enough for a test that beats on a busy machine"""


class Scene:
    """A fleet of guests, and the other ends of their lines."""

    def __init__(self) -> None:
        made: list[Guests] = []

        def guests(ears: Any, board: Any) -> Guests:
            made.append(Guests(ears, board, '{"setup": 1}', SILENCE_S))
            return made[0]

        self.fleet = RemoteFleet("127.0.0.1", 0, new_key(), 5.0, 4, guests)
        self.guests, self.heard = made[0], list[Notice]()

    def ask_to_join(self, workers: int = 2, version: str = planaria.__version__) -> WorkerLine:
        line = call(self.guests.address, self.guests.key, "a machine", VISITOR)
        say(line, joining.JoinRequest(called="a\x1b[31m machine", version=version, workers=workers))
        return line

    def door(self) -> Door:
        return Door(at=self.guests.address, key=self.guests.key.hex())

    def join(self, workers: int = 2) -> WorkerLine:
        line = self.ask_to_join(workers)
        assert isinstance(hear(line), joining.Welcome)
        say(line, joining.Settled())
        count = len([n for n in self.heard if isinstance(n, Joined)])
        self.until(lambda: len([n for n in self.heard if isinstance(n, Joined)]) > count)
        return line

    def spawn(self, worker: str, host: str, incarnation: int = 1) -> None:
        self.guests.expect(worker, host)
        self.fleet.spawn(worker, incarnation)

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, 20.0, lambda: self.heard.extend(self.fleet.poll(0.05)), self.heard)

    def told(self, kind: type[Any]) -> list[Any]:
        return [notice for notice in self.heard if isinstance(notice, kind)]


def say(line: WorkerLine, word: Any) -> None:
    line.send_bytes(word.model_dump_json().encode())


def hear(line: WorkerLine) -> Any:
    assert line.poll(20)
    return joining.TO_GUEST.validate_json(line.recv_bytes())


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.fleet.close(patience_s=0.0)


def test_a_machine_is_told_the_setup_and_starts_what_it_is_told_to(scene: Scene) -> None:
    line = scene.ask_to_join(workers=3)
    assert hear(line) == joining.Welcome(host="g1", setup='{"setup": 1}', cwd=str(Path.cwd()))
    scene.heard += scene.fleet.poll(0.1)
    assert not scene.heard, "its workers are not wanted before it has looked at the folders"
    say(line, joining.Settled())
    scene.until(lambda: bool(scene.told(Joined)))
    assert scene.told(Joined) == [Joined("g1", 3, "a [31m machine")], "and it moves nobody's cursor"
    scene.spawn("w7", "g1")
    assert hear(line) == joining.Start(worker="w7", incarnation=1)
    say(line, joining.Started(worker="w7", incarnation=1))
    worker = call(scene.guests.address, scene.guests.key, "w7", 1)
    worker.send_bytes(b"here")
    scene.until(lambda: len(scene.heard) == 2)
    scene.fleet.signal("w7", 1, 19)  # type: ignore[arg-type]
    assert hear(line) == joining.Signal(worker="w7", incarnation=1, number=19)


def test_one_that_leaves_takes_no_more_and_each_of_its_workers_is_told_of(scene: Scene) -> None:
    line = scene.join()
    scene.spawn("w1", "g1")
    scene.spawn("w2", "g1")
    say(line, joining.Departing(detail="SIGTERM"))
    scene.until(lambda: len(scene.told(Leaving)) == 2)
    assert scene.told(Left) == [Left("g1", "leaves (SIGTERM)")]
    assert scene.told(Leaving) == [Leaving("w1", 1, "SIGTERM"), Leaving("w2", 1, "SIGTERM")]
    scene.spawn("w3", "g1")
    scene.until(lambda: bool(scene.told(Gone)))
    assert scene.told(Gone) == [Gone("w3", 1, "exit", "its machine has left")]


def test_a_birth_that_fails_is_a_death_and_one_of_anybody_else_is_none(scene: Scene) -> None:
    line = scene.join()
    scene.spawn("w1", "g1")
    for worker in ("w2", "w1"):
        say(line, joining.Failed(worker=worker, incarnation=1, detail="no memory"))
    scene.until(lambda: bool(scene.told(Gone)))
    assert scene.told(Gone) == [Gone("w1", 1, "exit", "no memory")]


def test_one_that_leaves_before_it_has_settled_was_never_there(scene: Scene) -> None:
    line = scene.ask_to_join()
    assert isinstance(hear(line), joining.Welcome)
    say(line, joining.Departing(detail="SIGTERM"))
    with pytest.raises((EOFError, OSError)):
        line.recv_bytes()
    scene.heard += scene.fleet.poll(0.1)
    assert not scene.heard


def test_one_that_vanishes_takes_its_workers_with_it(scene: Scene) -> None:
    line = scene.join()
    scene.spawn("w1", "g1")
    line.close()
    scene.until(lambda: bool(scene.told(Gone)))
    assert scene.told(Left) == [Left("g1", "its connection closed")]
    assert scene.told(Gone) == [Gone("w1", 1, "exit", "machine g1: its connection closed")]


@pytest.mark.slow
def test_one_that_falls_silent_is_gone_and_one_that_beats_is_not(scene: Scene) -> None:
    silent, beating = scene.join(), scene.join()
    until = time.monotonic() + 1.5 * SILENCE_S
    while time.monotonic() < until:
        say(beating, joining.Beat())
        scene.heard += scene.fleet.poll(SILENCE_S / 20)
    assert [left.host for left in scene.told(Left)] == ["g1"]
    assert scene.told(Left)[0].detail.startswith(f"silent for {SILENCE_S:g}.")
    with pytest.raises((EOFError, OSError)):
        silent.recv_bytes()


@pytest.mark.parametrize(
    "words",
    [[b"{"], [b'{"kind": "root"}'], [b'{"kind": "join", "called": "x", "version": "1", "workers": 100000}'],
     [joining.Settled().model_dump_json().encode()], [b"[" * 100_000],
     [b'{"kind":"departing","detail":"' + b"x" * 300 + b'"}']],
)  # fmt: skip
def test_nonsense_ends_a_line_and_nothing_else(scene: Scene, words: list[bytes]) -> None:
    good, line = scene.join(), call(scene.guests.address, scene.guests.key, "a machine", VISITOR)
    for word in words:
        line.send_bytes(word)
    with pytest.raises((EOFError, OSError)):
        line.recv_bytes()
    say(good, joining.Beat())
    scene.heard += scene.fleet.poll(0.1)
    assert scene.told(Left) == [], "the others do not notice"


def test_another_version_is_told_so(scene: Scene) -> None:
    goodbye = hear(scene.ask_to_join(version="0.0.1"))
    assert isinstance(goodbye, joining.Goodbye) and not goodbye.welcome
    assert "has planaria 0.0.1, the run " in goodbye.reason


def test_one_that_is_turned_away_is_told_why_and_its_workers_count_as_dead(scene: Scene) -> None:
    line = scene.join()
    scene.spawn("w1", "g1")
    assert isinstance(hear(line), joining.Start)
    scene.guests.turn_away("g1", "its disk is full")
    assert hear(line) == joining.Goodbye(reason="its disk is full", welcome=False)
    scene.until(lambda: bool(scene.told(Gone)))
    assert scene.told(Gone) == [Gone("w1", 1, "exit", "machine g1: its disk is full")]


def test_at_the_end_all_are_told(scene: Scene) -> None:
    line = scene.join()
    scene.fleet.close(patience_s=0.0)
    assert hear(line) == joining.Goodbye(reason="the run is over")


def test_one_that_calls_while_the_port_is_being_closed_is_let_in_by_nobody(scene: Scene) -> None:
    scene.guests.close()  # the port is closed after that
    assert hear(scene.ask_to_join()) == joining.Goodbye(reason="the run is over")
    with pytest.raises(UserError, match="not let in: the run is over"):
        Visit(scene.door(), 2)
    scene.guests.goodbye = joining.Goodbye(reason="the run is about to begin", again=True)
    with pytest.raises(OSError, match="the run is about to begin"):
        Visit(scene.door(), 2)
