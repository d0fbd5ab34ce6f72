"""Three honest peers and a hostile one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from planaria.swarm.assemble import make_task
from planaria.swarm.board.attendance import RoundMessages
from planaria.swarm.board.board import Board
from planaria.swarm.board.claims import Proof
from planaria.swarm.board.envelope import seal
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.peer_board import PeerBoard
from planaria.swarm.config.rounds_config import RoundsConfig
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import run_rules
from support.swarm.boards import Clock
from support.swarm.swarm_messages import claim, closing, hello, rollouts
from support.swarm.swarms import rounds, tiny, together, until, weights

HONEST = ("p0", "p1", "p2")


class Hostile:
    """Someone who takes part, and has the board's folder to itself before the others come."""

    def __init__(self, config: SwarmConfig, folder: Path) -> None:
        self.who, self.place = PeerIdentity.generate(), folder / "board"
        self.board = Board(str(self.place), self.who)
        self.run = self.board.create_run(run_rules(config, make_task(config))).run
        self.board.join(hello(self.who, self.run))
        self.rounds = self.place / "peers" / self.who.peer / "rounds"
        self.rounds.mkdir(exist_ok=True)
        self.closings = self.place / "peers" / self.who.peer / "closings"
        self.closings.mkdir(exist_ok=True)

    def sealed(self, round: int, **changes: object) -> bytes:
        return seal(self.who, rollouts(self.who, self.run, round, **changes))

    def file(self, round: int) -> Path:
        return self.rounds / f"{round:06d}.json"


def forged(hostile: Hostile, round: int) -> bytes:
    other = PeerIdentity.generate()
    return seal(other, rollouts(other, hostile.run, round))


MALICE: list[tuple[str, Callable[[Hostile, int], object]]] = [
    ("oversized", lambda h, r: h.file(r).write_bytes(b" " * (5 << 20))),
    ("not JSON", lambda h, r: h.file(r).write_bytes(b"\xff{]" * 99)),
    ("not JSON", lambda h, r: h.file(r).write_bytes(h.sealed(r)[:-40])),
    ("replayed", lambda h, r: h.file(r).write_bytes(h.sealed(r - 1))),
    ("another run", lambda h, r: h.file(r).write_bytes(seal(h.who, rollouts(h.who, "ab" * 16, r)))),
    ("forged", lambda h, r: h.file(r).write_bytes(forged(h, r))),
    ("forged", lambda h, r: h.file(r).write_bytes(h.sealed(r).replace(b"3 + 4", b"3 + 5"))),
    ("malformed: key", lambda h, r: h.file(r).write_bytes(b'{"key": 7, "signature": [], "body": null}')),
    ("not JSON", lambda h, r: h.file(r).write_bytes(b"[" * 3_000_000)),
    ("not a file", lambda h, r: os.mkfifo(h.file(r))),
    ("not a file", lambda h, r: h.file(r).mkdir()),
    ("not a file", lambda h, r: h.file(r).symlink_to("/dev/zero")),
]


def test_hostile_messages_neither_stop_nor_teach_honest_peers(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": len(MALICE)})
    together(config, tmp_path / "clean")
    hostile = Hostile(config, tmp_path / "raided")
    for number, (_, act) in enumerate(MALICE):
        act(hostile, number)
    (hostile.closings / "000002.json").mkdir()
    (hostile.closings / "000003.json").write_bytes(b"{")
    os.mkfifo(hostile.closings / "000004.json")
    os.mkfifo(hostile.place / "peers" / secrets.token_hex(16))
    (hostile.place / "peers" / secrets.token_hex(16)).write_text("no folder")
    (hostile.place / "peers" / secrets.token_hex(16)).symlink_to("/")
    for junk in range(1000):
        (hostile.place / "peers" / f"{junk:032x}").mkdir()
    together(config, tmp_path / "raided")
    assert len({*weights(tmp_path / "clean", "p0")}) > 3
    for name in HONEST:
        done = rounds(tmp_path / "raided", name)
        reasons = [done[number].rejected_messages.get(hostile.who.peer) for number in range(len(MALICE))]
        # Among a thousand folders a stranger is not found at once.
        assert all(found in (None, reason) for found, (reason, _) in zip(reasons, MALICE, strict=True))
        assert all(reasons[-4:])
        assert not any(hostile.who.peer in record.sent for record in done.values())
        assert weights(tmp_path / "raided", name) == weights(tmp_path / "clean", name)


@pytest.mark.slow
def test_a_peer_that_rushes_ahead_excludes_no_one(tmp_path: Path, pupil: Path) -> None:
    """It publishes all rounds at once, with closings that list only itself."""
    config = tiny(pupil, rounds={"count": 4})
    together(config, tmp_path / "clean")
    hostile = Hostile(config, tmp_path / "raided")
    for number in range(4):
        mine = rollouts(hostile.who, hostile.run, number, groups=())
        hostile.file(number).write_bytes(seal(hostile.who, mine))
        alone = closing(hostile.who, hostile.run, number, words=(claim(hostile.who, mine),))
        (hostile.closings / f"{number:06d}.json").write_bytes(seal(hostile.who, alone))
    together(config, tmp_path / "raided")
    for name in HONEST:
        assert weights(tmp_path / "raided", name) == weights(tmp_path / "clean", name)
        assert all(len(record.sent) == 3 for record in rounds(tmp_path / "raided", name).values())


@pytest.mark.slow
def test_late_hostile_messages_do_no_harm(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": 6})
    together(config, tmp_path / "clean")
    folder = tmp_path / "raided"

    def raid() -> None:
        until(lambda: len(rounds(folder, "p0")) >= 2)
        hostile = Hostile(config, folder)
        for number, (_, act) in enumerate(MALICE[3:], start=1):
            act(hostile, number)
        for victim in (hostile.place / "peers").iterdir():
            (victim / "rounds").mkdir(exist_ok=True)
            (victim / "rounds" / "junk").mkdir(exist_ok=True)
            (victim / "goodbye.json").write_bytes(hostile.sealed(1))

    (folder / "peers" / "p0").mkdir(parents=True)
    together(config, folder, beside=raid)
    for name in HONEST:
        assert weights(folder, name) == weights(tmp_path / "clean", name)


# ---- one peer's view of the others, with a clock that only sleeping moves


class Scene:
    """Peer 0's meeting, and boards for everybody."""

    def __init__(self, folder: Path, peers: int, **terms: float) -> None:
        self.clock = Clock()
        self.who = [PeerIdentity.generate() for _ in range(peers)]
        self.boards = [
            Board(str(folder), who, clock=self.clock, sleep=lambda seconds: self.clock.sleep(seconds + 1e-6))
            for who in self.who
        ]
        for who, board in zip(self.who, self.boards, strict=True):
            self.run = board.create_run({"task": "sums"}).run
            board.join(hello(who, self.run))
        config = RoundsConfig.model_validate({"timeout_s": 10.0, "patience_s": 100.0, **terms})
        self.meetings = [
            PeerBoard(board, who.peer, config, 3, is_local=True, clock=self.clock)
            for who, board in zip(self.who, self.boards, strict=True)
        ]

    def publish(self, number: int, *peers: int) -> None:
        for place in peers:
            self.boards[place].publish(rollouts(self.who[place], self.run, number))

    def received(self, number: int, peer: int = 0) -> set[int]:
        meeting = self.meetings[peer]
        found = meeting.gather(number, meeting.begin_round(number)).found
        return {place for place, who in enumerate(self.who) if who.peer in found}


def test_a_dead_peer_is_awaited_once_until_it_returns(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3)
    spent = []
    for number, present in enumerate([(0, 1, 2), (0, 1), (0, 1), (0, 1, 2), (0, 1)]):
        scene.publish(number, *present)
        before = scene.clock.now
        assert scene.received(number) == {*present}
        spent.append(scene.clock.now - before)
    assert [seconds >= 10 for seconds in spent] == [False, True, False, False, True]


def test_a_peer_with_an_invalid_hello_is_reported(tmp_path: Path) -> None:
    scene, stranger = Scene(tmp_path, 3), "e" * 32
    (tmp_path / "peers" / stranger).mkdir()
    (tmp_path / "peers" / stranger / "hello.json").write_bytes(b"{}")
    scene.publish(0, 0, 1, 2)
    scene.meetings[0].begin_round(0)
    assert scene.meetings[0].gather(0, False).rejected == {stranger: "malformed: key"}


def test_fake_peers_do_not_stop_a_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 40)
    scene.publish(0, 0, 1, 2)
    assert scene.received(0) == {0, 1, 2} and scene.clock.now < 11
    scene.publish(1, 0, 1, 2)
    assert scene.received(1) == {0, 1, 2} and scene.clock.now < 11


def test_an_unawaited_peer_is_received_by_all_or_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3)
    assert not scene.meetings[2].begin_round(0)
    scene.publish(0, 0, 1)
    assert scene.received(0, 0) == scene.received(0, 1) == {0, 1}
    assert scene.meetings[2].gather(0, False).found.keys() == {who.peer for who in scene.who[:2]}
    scene.publish(1, 0, 1)
    assert scene.received(1, 0) == {0, 1}
    scene.publish(1, 2)
    assert scene.received(1, 1) == scene.received(1, 2) == {0, 1}
    scene.publish(2, 0, 1, 2)
    assert scene.received(2, 1) == scene.received(2, 2) == scene.received(2, 0) == {0, 1, 2}


def test_a_peer_that_missed_a_newcomer_follows_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer publishes after peer 0 has read the round's messages; peers 1 and 2 close the round first."""
    scene = Scene(tmp_path, 4)
    scene.publish(0, 0, 1, 2)
    assert all(scene.received(0, peer) == {0, 1, 2} for peer in range(3))
    scene.publish(1, 0, 1, 2)
    read, others = scene.boards[0].gather, list[set[int]]()

    def read_early(number: int, peers: Iterable[str]) -> RoundMessages:
        found = read(number, peers)
        if scene.who[3].peer in peers and not others:
            scene.publish(1, 3)
            others.extend(scene.received(1, peer) for peer in (1, 2))
        return found

    monkeypatch.setattr(scene.boards[0], "gather", read_early)
    assert scene.received(1, 0) == {0, 1, 2, 3} and others == [{0, 1, 2, 3}] * 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_peer_that_joins_while_others_begin_is_received_by_all_or_none(number: int, tmp_path: Path) -> None:
    """Peer 0 begins the round before the newcomer's hello, peers 1 and 2 after it."""
    scene = Scene(tmp_path, 3)
    for before in range(number):
        scene.publish(before, 0, 1, 2)
        assert all(scene.received(before, peer) == {0, 1, 2} for peer in range(3))
    closed = [scene.meetings[0].begin_round(number)]
    newcomer = PeerIdentity.generate()
    board = Board(str(tmp_path), newcomer, clock=scene.clock, sleep=scene.clock.sleep)
    board.join(hello(newcomer, scene.run, joined=number))
    closed += [scene.meetings[peer].begin_round(number) for peer in (1, 2)]
    scene.publish(number, 0, 1, 2)
    board.publish(rollouts(newcomer, scene.run, number))
    found = [scene.meetings[peer].gather(number, closed[peer]).found.keys() for peer in (1, 2, 0)]
    assert found[0] == found[1] == found[2] and len(found[0]) == 4


def test_two_colluding_peers_cannot_exclude_a_timely_third(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3)
    scene.publish(0, 0, 1, 2)
    scene.boards[1].publish(closing(scene.who[1], scene.run, 0, [scene.who[1], scene.who[2]]))
    assert scene.received(0) == {0, 1, 2}


def test_an_early_closing_excludes_no_timely_peer(tmp_path: Path) -> None:
    """Its early word leaves out peer 2, and it withholds its own message until the round's time is over."""
    scene = Scene(tmp_path, 4)
    scene.boards[3].publish(closing(scene.who[3], scene.run, 0, [scene.who[0], scene.who[1]]))
    scene.publish(0, 0, 1, 2)
    assert scene.received(0) == {0, 1, 2} and scene.clock.now >= 10


def test_a_closing_cannot_be_squatted(tmp_path: Path) -> None:
    """An unknown peer occupies a shared place; the peers agree as if it were not there."""
    scene = Scene(tmp_path, 4)
    (tmp_path / "closings").mkdir()
    (tmp_path / "closings" / "000000.json").write_bytes(b"{")
    assert not scene.meetings[1].begin_round(0) and not scene.meetings[3].begin_round(0)  # both began in time
    scene.publish(0, 0, 1, 2)
    assert scene.received(0, 0) == {0, 1, 2}
    scene.publish(0, 3)
    for late in (1, 3):
        assert {who.peer for who in scene.who[:3]} == scene.meetings[late].gather(0, False).found.keys()


def test_a_late_closing_is_one_vote_among_others(tmp_path: Path) -> None:
    """Peer 3 publishes a late, false closing; a peer that catches up follows the majority."""
    scene = Scene(tmp_path, 4)
    scene.publish(0, 0, 1)
    assert scene.received(0, 0) == scene.received(0, 1) == {0, 1}
    scene.publish(0, 2, 3)
    scene.boards[3].publish(closing(scene.who[3], scene.run, 0, scene.who))
    assert scene.received(0, 2) == {0, 1}


def two_stories(scene: Scene, place: int, number: int, reader: int) -> None:
    """Give a reader another signed message of a peer than the board has."""
    other = rollouts(scene.who[place], scene.run, number, weights="ab" * 8)
    scene.boards[reader].ledger.record(claim(scene.who[place], other), checked=True)
    words = tuple(claim(who, rollouts(who, scene.run, number)) for at, who in enumerate(scene.who) if at != place)
    forged = closing(scene.who[reader], scene.run, number, words=(*words, claim(scene.who[place], other)))
    scene.boards[reader].publish(forged)


def test_an_equivocator_is_excluded_by_all_in_the_same_round(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4)
    scene.publish(0, 0, 1, 2, 3)
    two_stories(scene, 3, 0, reader=1)
    assert scene.received(0, 0) >= {0, 1, 2}
    scene.received(0, 2)
    scene.publish(1, 0, 1, 2, 3)
    assert scene.received(1, 0) == scene.received(1, 1) == scene.received(1, 2) == {0, 1, 2}
    found = scene.meetings[0].gather(1, False)
    assert found.rejected[scene.who[3].peer] == "equivocated in rounds/000000.json"
    kept = scene.boards[2].closings(1, [scene.who[0].peer]).get(scene.who[0].peer)
    assert kept is not None and [proof.peer for proof in kept.proofs] == [scene.who[3].peer]
    before = scene.clock.now
    scene.publish(2, 0, 1, 2)
    assert scene.received(2, 0) == {0, 1, 2} and scene.clock.now - before < 1  # and it is not awaited


def test_two_closings_of_one_peer_are_a_proof(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4)
    byzantine_member = scene.who[3]
    scene.publish(0, 0, 1, 2, 3)
    for place in (0, 1, 2):
        scene.received(0, place)
    scene.boards[3].publish(one := closing(byzantine_member, scene.run, 0, scene.who))
    other = closing(byzantine_member, scene.run, 0, scene.who[:3])
    scene.publish(1, 0, 1, 2, 3)
    forged = closing(scene.who[1], scene.run, 1, scene.who)
    scene.boards[1].publish(forged.model_copy(update={"words": (*forged.words, claim(byzantine_member, other))}))
    assert scene.received(1, 0) == {0, 1, 2, 3}
    assert one != other
    scene.publish(2, 0, 1, 2, 3)
    assert scene.received(2, 0) == scene.received(2, 2) == {0, 1, 2}


def test_a_false_claim_about_another_peer_proves_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4)
    scene.publish(0, 0, 1, 2, 3)
    for place in (0, 1, 2):
        scene.received(0, place)
    real = claim(scene.who[1], rollouts(scene.who[1], scene.run, 0))
    lie = real.model_copy(update={"digest": "0" * 64})
    framing = closing(scene.who[3], scene.run, 0, words=(lie,), proofs=(Proof(one=real, other=lie),))
    scene.boards[3].publish(framing)
    scene.publish(1, 0, 1, 2, 3)
    assert scene.received(1, 0) == scene.received(1, 2) == {0, 1, 2, 3}


def test_a_closing_about_missing_messages_is_not_followed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4)
    for place in (1, 2, 3):
        scene.boards[place].publish(closing(scene.who[place], scene.run, 0, scene.who))
    scene.publish(0, 0, 1, 2)
    assert scene.received(0) == {0, 1, 2}
