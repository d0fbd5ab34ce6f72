"""Hostile content on a board is refused with a reason."""

from __future__ import annotations

import os
import random
import shutil
import socket
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.swarm.board.attendance import RoundTerms
from planaria.swarm.board.board import AlreadyPublished, Board
from planaria.swarm.board.envelope import seal
from planaria.swarm.board.identity import PeerIdentity
from support.swarm import stores
from support.swarm.boards import RULES, Clock, lower_limits, member, place
from support.swarm.swarm_messages import goodbye, hello, rollouts


def at(root: Path, who: PeerIdentity, round: int) -> Path:
    path = root / "peers" / who.peer / "rounds" / f"{round:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def why(board: Board, who: PeerIdentity, round: int = 0) -> str:
    return board.gather(round, [who.peer]).rejected[who.peer]


def test_a_message_is_valid_only_at_its_own_place(tmp_path: Path) -> None:
    board, one = member(str(tmp_path / "here"))
    other, two = member(str(tmp_path / "there"), one)[0], PeerIdentity.generate()
    board.publish(rollouts(one, board.rules.run, 3))
    sent = at(tmp_path / "here", one, 3)
    shutil.copy(sent, at(tmp_path / "here", one, 4))
    assert why(board, one, 4) == "replayed"
    shutil.copy(sent, at(tmp_path / "here", two, 3))
    assert why(board, two, 3) == "forged"
    shutil.copy(sent, at(tmp_path / "there", one, 3))
    assert why(other, one, 3) == "another run"
    shutil.copy(sent.parents[1] / "hello.json", at(tmp_path / "here", one, 5))
    assert why(board, one, 5) == "malformed: kind"


def test_hellos_and_goodbyes_of_other_runs_or_peers_are_ignored(tmp_path: Path) -> None:
    (board, one), (_, two) = member(str(tmp_path / "here")), member(str(tmp_path / "there"))
    ghost = tmp_path / "here" / "peers" / two.peer
    shutil.copytree(tmp_path / "there" / "peers" / two.peer, ghost)
    (tmp_path / "here" / "peers" / one.peer / "goodbye.json").write_bytes(seal(two, goodbye(two, board.rules.run)))
    census = board.peers()
    assert set(census.hellos) == {one.peer} and not census.goodbyes
    assert census.rejected == {two.peer: "another run", one.peer: "forged"}


def test_special_files_and_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    lower_limits(monkeypatch, message_bytes=5000)
    board, me = member(str(tmp_path))
    bad = [PeerIdentity.generate() for _ in range(8)]
    at(tmp_path, bad[0], 0).mkdir()
    at(tmp_path, bad[1], 0).symlink_to("/dev/zero")
    os.mkfifo(at(tmp_path, bad[2], 0))
    at(tmp_path, bad[3], 0).symlink_to(at(tmp_path, bad[3], 0))
    at(tmp_path, bad[4], 0).parent.rmdir()
    (tmp_path / "peers" / bad[4].peer / "rounds").write_text("no folder")
    (tmp_path / "peers" / bad[5].peer).symlink_to(tmp_path / "peers" / bad[5].peer)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(at(tmp_path, bad[6], 0).relative_to(tmp_path)))
    at(tmp_path, bad[7], 0).write_bytes(b"x" * 5001)
    reasons = board.gather(0, [who.peer for who in bad]).rejected
    assert [reasons[who.peer] for who in bad] == ["not a file"] * 7 + ["oversized"]
    board.publish(rollouts(me, board.rules.run, 0))
    closed = board.wait(0, [me.peer, *(who.peer for who in bad)], RoundTerms(quorum=1, timeout_s=50, patience_s=90))
    assert set(closed.found) == {me.peer} and len(closed.rejected) == 8  # and at once: its clock never moved


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, one = member(str(tmp_path))
    board.publish(rollouts(one, board.rules.run, 0))

    def denied(*_: object) -> int:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(os, "open", denied)  # root, who may run this, is denied nothing
    assert why(board, one) == "not readable"


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither links of an unknown peer to a whole peer nor links at the paths of messages."""
    board, one = member(str(tmp_path / "board"))
    real, who = member(str(tmp_path / "elsewhere"))
    (tmp_path / "board" / "peers" / who.peer).symlink_to(tmp_path / "elsewhere" / "peers" / who.peer)
    census = board.peers()
    assert set(census.hellos) == {one.peer} and not census.rejected
    real.publish(rollouts(who, real.rules.run, 0))
    assert why(board, who) == "not a file"
    (tmp_path / "board" / "peers" / one.peer / "rounds").symlink_to(tmp_path)
    with pytest.raises(UserError, match="remove the obstacle"):
        board.publish(rollouts(one, board.rules.run, 0))
    assert not (tmp_path / "000000.json").exists()


def test_the_board_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    board, one = member(str(tmp_path / "link"))
    assert set(board.peers().hellos) == {one.peer}


def test_thousands_of_foreign_files_are_ignored(tmp_path: Path) -> None:
    board, one = member(str(tmp_path))
    rng = random.Random(3)
    for n in range(3000):
        match n % 4:
            case 0:
                (tmp_path / "peers" / rng.randbytes(16).hex()).mkdir()
            case 1:
                (tmp_path / "peers" / rng.randbytes(16).hex()).touch()
            case 2:
                (tmp_path / "peers" / rng.randbytes(20).hex()).mkdir()
            case _:
                (tmp_path / "peers" / f"{n} ‮\n\x1b[31m é").mkdir()
    os.mkdir(os.fsencode(tmp_path / "peers") + b"/\xff\xfe")  # noqa: PTH102
    census = board.peers()
    assert set(census.hellos) == {one.peer} and not census.rejected


@pytest.mark.parametrize("junk", [b"", b"{", b"\x00" * 500, b"nonsense"])
def test_partial_messages_are_awaited_until_the_round_closes(tmp_path: Path, junk: bytes) -> None:
    _, two = member(str(tmp_path))
    clock = Clock()
    board, one = member(str(tmp_path), clock=clock)
    board.publish(rollouts(one, board.rules.run, 0))
    at(tmp_path, two, 0).write_bytes(junk)
    terms = RoundTerms(quorum=1, timeout_s=5, patience_s=9)
    closed = board.wait(0, [one.peer, two.peer], terms)
    assert set(closed.found) == {one.peer} and closed.rejected == {two.peer: "not JSON"} and clock.now == 5


def test_garbage_in_a_peers_own_place_is_reported_on_write(tmp_path: Path) -> None:
    board, one = member(str(tmp_path))
    at(tmp_path, one, 0).write_bytes(b"rubbish")
    with pytest.raises(AlreadyPublished):
        board.publish(rollouts(one, board.rules.run, 0))
    new = PeerIdentity.generate()
    (tmp_path / "peers" / new.peer).mkdir()
    (tmp_path / "peers" / new.peer / "hello.json").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="not JSON; use another identity"):
        Board(str(tmp_path), new).join(hello(new, board.rules.run))


def test_invalid_rules_are_reported(tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text("{}")
    for act in (lambda b: b.rules, lambda b: b.create_run(RULES)):
        with pytest.raises(UserError, match=r"rules\.json: malformed: key"):
            act(Board(str(tmp_path), PeerIdentity.generate()))


def test_foreign_rules_are_shown_as_short_ascii(tmp_path: Path) -> None:
    Board(str(tmp_path), PeerIdentity.generate()).create_run({"a": "\x1b[31m" + "‮" * 500})
    with pytest.raises(UserError) as error:
        Board(str(tmp_path), PeerIdentity.generate()).create_run({"a": "b"})
    assert str(error.value).isascii() and str(error.value).isprintable() and len(str(error.value)) < 400


def test_oversized_objects_are_not_fetched_without_range_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stores.Scratch.clear()
    url = place("scratch", tmp_path)
    lower_limits(monkeypatch, message_bytes=3000)
    _, one = member(url)
    stores.Scratch().pipe_file(f"{url}/peers/{one.peer}/rounds/000000.json", b"x" * 3001)
    monkeypatch.setattr(stores.Scratch, "async_impl", False)
    late = Board(url)
    late.rules  # noqa: B018 (read before calls are counted)
    stores.Scratch.calls.clear()
    assert why(late, one) == "oversized"
    assert {call for call, _ in stores.Scratch.calls} == {"info"}


def test_an_oversized_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, message_bytes=3000)
    board, one = member(str(tmp_path))
    at(tmp_path, one, 0).write_bytes(b"x" * 3001)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    assert why(board, one) == "oversized"


def test_object_reads_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stores.Scratch.clear()
    lower_limits(monkeypatch, message_bytes=3000)
    board, one = member(place("scratch", tmp_path))
    ranges = []
    monkeypatch.setattr(
        stores.Scratch,
        "cat_file",
        lambda _, path, start, end, **__: ranges.append((start, end)) or b"x" * (end - start),
    )
    assert why(board, one) == "oversized"
    assert set(ranges) == {(0, 3001)}
