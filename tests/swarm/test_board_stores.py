"""Boards on failing, delayed and partial stores, on S3, and among killed processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from planaria.common.errors import UserError
from planaria.common.object_store import Retry, Store, StoreUnreachable
from planaria.swarm.board.attendance import RoundTerms
from planaria.swarm.board.board import AlreadyPublished, Board
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.records.lines import LOG, PEERS, RoundDone, read_log
from planaria.swarm.swarm_processes import LiveSwarm
from support import s3_server
from support.swarm import stores
from support.swarm.boards import RULES, Clock, exchange, member, place, read
from support.swarm.swarm_messages import goodbye, rollouts
from support.swarm.swarms import tiny


def test_occasional_store_failures_lose_nothing(tmp_path: Path) -> None:
    """Six peers, thirty rounds; a tenth of the calls fail, and half of those have happened nevertheless."""
    stores.Flaky.clear()
    url = place("flaky", tmp_path)
    boards = [member(url, retry=Retry(tries=12)) for _ in range(6)]
    exchange(boards, 30)
    boards[0][0].publish(goodbye(boards[0][1], boards[0][0].rules.run))
    assert set(boards[1][0].peers().goodbyes) == {boards[0][1].peer}


def test_an_unreachable_store_is_reported_after_retries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stores.Flaky.clear()
    clock = Clock()
    monkeypatch.setattr(stores.Flaky, "chance", 0.0)
    board, one = member(place("flaky", tmp_path), clock=clock, retry=Retry(tries=5, seconds=60, first_s=1))
    monkeypatch.setattr(stores.Flaky, "chance", 1.0)
    for act in (
        lambda: board.gather(0, [one.peer]),
        board.peers,
        lambda: board.publish(rollouts(one, board.rules.run)),
    ):
        clock.naps.clear()
        with pytest.raises(StoreUnreachable, match=r"flaky://.*failed 5 times, last with") as failure:
            act()
        assert failure.value.tries == 5 and isinstance(failure.value.last, OSError)
        pauses = [1.0, 2.0, 4.0, 8.0]
        assert all(0.5 * p <= nap <= 1.5 * p for p, nap in zip(pauses, clock.naps, strict=True))
        assert clock.naps != pauses  # not all peers come back at the same moment


def test_retries_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stores.Flaky.clear()
    monkeypatch.setattr(stores.Flaky, "chance", 1.0)
    clock = Clock()
    options = Retry(tries=10**6, seconds=100)
    board = Board(place("flaky", tmp_path), retry=options, clock=clock, sleep=clock.sleep)
    with pytest.raises(StoreUnreachable):
        board.peers()
    assert 80 < clock.now <= 100 and max(clock.naps) <= 15


def test_missing_files_are_not_retried(tmp_path: Path) -> None:
    clock = Clock()
    for url in (str(tmp_path), place("scratch", tmp_path)):
        board, one = member(url, clock=clock)
        assert board.gather(5, [one.peer]).missing == (one.peer,)
    assert not clock.naps


def test_each_message_costs_one_request(tmp_path: Path) -> None:
    stores.Scratch.clear()
    url = place("scratch", tmp_path)
    (board, one), (_, two) = member(url), member(url)
    board.publish(rollouts(one, board.rules.run, 0))
    stores.Scratch.calls.clear()
    found = board.gather(0, [one.peer, two.peer])
    assert set(found.found) == {one.peer} and found.missing == (two.peer,)
    assert [call for call, _ in stores.Scratch.calls] == ["cat", "cat"]


def test_connection_errors_of_object_stores_are_retried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class NoConnection(Exception):
        pass

    library = ModuleType("botocore.exceptions")
    library.BotoCoreError = NoConnection  # type: ignore[attr-defined]
    board, one = member(place("scratch", tmp_path), retry=Retry(tries=3))

    def cat_file(*_: object, **__: object) -> None:
        raise NoConnection("no route to host")

    monkeypatch.setattr(stores.Scratch, "cat_file", cat_file)
    with pytest.raises(NoConnection):
        read(board, one.peer, 0)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", library)
    with pytest.raises(StoreUnreachable, match="failed 3 times, last with NoConnection: no route"):
        read(board, one.peer, 0)


def test_a_missing_bucket_is_not_created(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("NoSuchBucket")

    monkeypatch.setattr(stores.Scratch, "pipe_file", missing)
    monkeypatch.setattr(stores.Scratch, "makedirs", lambda *_, **__: pytest.fail("it may make a bucket"))
    with pytest.raises(UserError, match="create it first"):
        Board(place("scratch", tmp_path), PeerIdentity.generate()).create_run(RULES)


def test_delayed_and_partial_objects_are_awaited(tmp_path: Path) -> None:
    stores.Late.clear()
    url = place("late", tmp_path)
    (first, one), (second, two) = member(url), member(url)
    run = first.rules.run
    for board, who in ((first, one), (second, two)):
        board.publish(rollouts(who, run, 0))
    seen = []
    for _ in range(12):
        gathered = second.gather(0, [one.peer])
        seen.append(gathered.rejected.get(one.peer) or gathered.found.get(one.peer))
    assert [s for n, s in enumerate(seen) if n == 0 or s != seen[n - 1]] == [None, "not JSON", rollouts(one, run, 0)]
    closed = first.wait(0, [one.peer, two.peer], RoundTerms(quorum=2, timeout_s=50, patience_s=50))
    assert closed.found == {who.peer: rollouts(who, run, 0) for who in (one, two)}


def test_writes_work_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    board, one = member(str(tmp_path))
    sent = rollouts(one, board.rules.run, 0)
    board.publish(sent)
    board.publish(sent)
    with pytest.raises(AlreadyPublished):
        board.publish(rollouts(one, board.rules.run, 0, groups=()))
    assert read(board, one.peer, 0) == sent and not hidden(tmp_path)


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, one = member(str(tmp_path), retry=Retry(tries=2))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnreachable, match="No space left on device"):
        board.publish(rollouts(one, board.rules.run, 0))
    assert read(board, one.peer, 0) is None and not hidden(tmp_path)


# --- processes -------------------------------------------------------------------------------------------------------


def hidden(root: Path) -> list[Path]:
    """Files that are being written, or were when their writer died."""
    return [path for path in root.rglob(".*") if path.is_file()]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts publishers; none outlives the test."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with ExitStack() as stack:

        def begin(*arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "support.swarm.publisher", *map(str, arguments)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
            stack.callback(process.kill)
            return process

        yield begin


def await_output(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert word in iter(lambda: process.stdout.readline().strip(), ""), f"it ended without {word!r}"


def test_concurrent_processes_found_one_run_and_show_complete_messages(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    root, rounds = tmp_path / "board", 12
    processes = [start(root, tmp_path / f"{n}.pem", rounds, 8000) for n in range(2)]
    for process in processes:
        await_output(process, "joined")
    board, both = Board(str(root)), {PeerIdentity.load_or_create(tmp_path / f"{n}.pem").peer for n in range(2)}
    assert set(board.peers().hellos) == both
    left = {(peer, round) for peer in both for round in range(rounds)}
    while any(process.poll() is None for process in processes):
        left -= there(board, left)
    assert there(board, left) == left
    assert [process.wait() for process in processes] == [0, 0] and not hidden(root)


def there(board: Board, places: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those of the places with a message; one that is not whole, or not valid, fails the test (``read`` raises)."""
    return {(peer, round) for peer, round in places if read(board, peer, round) is not None}


@pytest.mark.slow
def test_a_message_killed_before_its_rename_is_invisible(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    root = tmp_path / "board"
    process = start(root, tmp_path / "key.pem", 3, 30_000, "hang")
    await_output(process, "hung")
    board, peer = Board(str(root)), PeerIdentity.load_or_create(tmp_path / "key.pem").peer
    assert read(board, peer, 2) is None
    process.kill()
    process.wait()
    assert [path.stat().st_size > 10**6 for path in hidden(root)] == [True]
    assert [read(board, peer, round) is not None for round in range(3)] == [True, True, False]
    again = start(root, tmp_path / "key.pem", 3, 30_000)
    assert again.wait() == 0  # and it publishes the same again, and what was missing
    assert read(board, peer, 2) is not None


def test_a_killed_writer_leaves_complete_messages_or_none(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Killed as soon as a file is seen that has no name yet; it may get one in that very moment."""
    cut = 0
    for trial in range(6):
        root, key = tmp_path / f"board{trial}", tmp_path / "key.pem"
        process = start(root, key, 500, 30_000)
        await_output(process, "joined")
        rounds = root / "peers" / PeerIdentity.load_or_create(key).peer / "rounds"
        while len(list(rounds.glob("*.json"))) < trial or not hidden(rounds):
            assert process.poll() is None
        process.kill()
        process.wait()
        board = Board(str(root))
        names = sorted(path.name for path in rounds.glob("*.json"))
        assert names == [f"{round:06d}.json" for round in range(len(names))]
        assert all(read(board, PeerIdentity.load_or_create(key).peer, round) is not None for round in range(len(names)))
        assert read(board, PeerIdentity.load_or_create(key).peer, len(names)) is None
        cut += bool(hidden(rounds))
    assert cut, "no writer was ever killed in the middle"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of moto's server (pip install 'planaria[s3]' 'moto[server]')."""
    pytest.importorskip("s3fs")
    with s3_server.bucket("swarm") as url:
        yield url


@pytest.mark.slow
def test_rounds_are_published_and_never_replaced(bucket: str) -> None:
    url = f"{bucket}/{uuid.uuid4().hex}"
    boards = [member(url) for _ in range(3)]
    exchange(boards, 3)
    board, who = boards[0]
    with pytest.raises(AlreadyPublished):
        board.publish(rollouts(who, board.rules.run, 1, groups=()))


@pytest.mark.slow
def test_the_store_keeps_the_first_of_two_concurrent_writers(bucket: str) -> None:
    """Both found no object before: only the store's conditional write decides."""
    s3fs, name = pytest.importorskip("s3fs"), uuid.uuid4().hex
    first, second = s3fs.S3FileSystem(), s3fs.S3FileSystem()
    first.pipe_file(f"swarm/{name}", b"first", mode="create")
    with pytest.raises(FileExistsError):
        second.pipe_file(f"swarm/{name}", b"second", mode="create")
    assert first.cat_file(f"swarm/{name}") == b"first"


@pytest.mark.slow
def test_a_missing_bucket_is_reported(bucket: str) -> None:
    naps: list[float] = []
    store = Store("s3://nobodys/run", "board", Retry(tries=2), lambda: sum(naps), naps.append)
    with pytest.raises(UserError, match=r"s3://nobodys/run does not exist.*create it first"):
        store.write("rules.json", b"{}")


@pytest.mark.slow
def test_peer_processes_end_with_equal_weights(bucket: str, pupil: Path, tmp_path: Path) -> None:
    config = tiny(pupil, board=f"{bucket}/{uuid.uuid4().hex}")
    codes = LiveSwarm(config, tmp_path).run(lambda *_: None, lambda *_: None)
    assert set(codes.values()) == {0}
    logs = [read_log(path) for path in sorted((tmp_path / PEERS).glob(f"*/{LOG}"))]
    last = [[record for record in log if isinstance(record, RoundDone)][-1] for log in logs]
    assert len(last) == 3 and {record.round for record in last} == {5}
    assert len({record.weights for record in last}) == 1
