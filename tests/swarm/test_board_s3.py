"""A board on S3, simulated by moto's server (pip install 'planaria[s3]' 'moto[server]')."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from boards import exchange, member
from swarms import tiny
from words import rollouts

import s3_server
from planaria.common.errors import UserError
from planaria.common.object_store import Retry, Store
from planaria.swarm.board.board import AlreadyThere
from planaria.swarm.records.lines import LOG, PEERS, RoundDone, read_log
from planaria.swarm.swarm_processes import LiveSwarm

pytestmark = pytest.mark.slow
s3fs = pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server.bucket("swarm") as url:
        yield url


def test_rounds_are_published_and_never_replaced(bucket: str) -> None:
    url = f"{bucket}/{uuid.uuid4().hex}"
    boards = [member(url) for _ in range(3)]
    exchange(boards, 3)
    board, who = boards[0]
    with pytest.raises(AlreadyThere):
        board.publish(rollouts(who, board.rules.run, 1, groups=()))


def test_the_store_keeps_the_first_of_two_concurrent_writers(bucket: str) -> None:
    """Both found no object before: only the store's conditional write decides."""
    name = uuid.uuid4().hex
    first, second = s3fs.S3FileSystem(), s3fs.S3FileSystem()
    first.pipe_file(f"swarm/{name}", b"first", mode="create")
    with pytest.raises(FileExistsError):
        second.pipe_file(f"swarm/{name}", b"second", mode="create")
    assert first.cat_file(f"swarm/{name}") == b"first"


def test_a_missing_bucket_is_reported(bucket: str) -> None:
    naps: list[float] = []
    store = Store("s3://nobodys/run", "board", Retry(tries=2), lambda: sum(naps), naps.append)
    with pytest.raises(UserError, match=r"s3://nobodys/run does not exist.*create it first"):
        store.write("rules.json", b"{}")


def test_peer_processes_end_with_equal_weights(bucket: str, pupil: Path, tmp_path: Path) -> None:
    config = tiny(pupil, board=f"{bucket}/{uuid.uuid4().hex}")
    codes = LiveSwarm(config, tmp_path).run(lambda *_: None, lambda *_: None)
    assert set(codes.values()) == {0}
    logs = [read_log(path) for path in sorted((tmp_path / PEERS).glob(f"*/{LOG}"))]
    last = [[record for record in log if isinstance(record, RoundDone)][-1] for log in logs]
    assert len(last) == 3 and {record.round for record in last} == {5}
    assert len({record.weights for record in last}) == 1
