"""A shared log has one leader per term, and no line that was durable is lost, whatever the store and leaders do."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from planaria.common.errors import UserError
from planaria.common.object_store import Retry, Store, StoreUnreachable
from planaria.control.log.shared_log import Batch, Deposed, Lease, LogAppender, SharedLog
from support import s3_server

ONCE = Retry(tries=1, seconds=1.0)


class UnreliableStore(Store):
    """A store in memory whose next write may be lost, or succeed while its answer is lost."""

    def __init__(self) -> None:
        self.location, self.files = "memory", dict[str, bytes]()
        self.next_write = "answered"

    def read(self, path: str, most: int) -> bytes | None:
        return self.files.get(path)

    def write(self, path: str, data: bytes) -> bool:
        outcome, self.next_write = self.next_write, "answered"
        if outcome == "lost":
            raise StoreUnreachable("memory", "writing", 1, TimeoutError())
        fresh = path not in self.files
        self.files.setdefault(path, data)
        if outcome == "unknown":
            raise StoreUnreachable("memory", "writing", 1, TimeoutError())
        return fresh

    def replace(self, path: str, data: bytes) -> None:
        self.files[path] = data


class Leaders(RuleBasedStateMachine):
    """Controllers that are elected, append, lose the store, stop, and wake up long after another one leads."""

    @initialize()
    def begin(self) -> None:
        self.store = UnreliableStore()
        self.log = SharedLog(self.store)
        self.leaders: list[LogAppender] = []
        self.numbers = itertools.count()
        self.durable: list[str] = []
        """lines in the order in which flushes made them durable"""

    @rule(copies=st.integers(1, 3), outcome=st.sampled_from(["answered", "lost", "unknown"]))
    def elect(self, copies: int, outcome: str) -> None:
        """Several standbys have read to the same end, and stand for election at once."""
        batches = [*self.log.since(1)]
        term = batches[-1].term if batches else 0
        self.store.next_write = outcome
        elected = []
        for _ in range(copies):
            candidate = LogAppender(self.log, term + 1, len(batches) + 1)
            try:
                if candidate.stand():
                    elected.append(candidate)
            except StoreUnreachable:
                pass
        assert len(elected) <= 1
        self.leaders += elected

    @precondition(lambda self: self.leaders)
    @rule(data=st.data(), lines=st.integers(1, 3), outcome=st.sampled_from(["answered", "lost", "unknown"]))
    def append(self, data: st.DataObject, lines: int, outcome: str) -> None:
        """A leader appends, perhaps one that others have replaced; if the store does not answer, it stops."""
        leader = data.draw(st.sampled_from(self.leaders))
        added = [f"line {next(self.numbers)}" for _ in range(lines)]
        for line in added:
            leader.add(line)
        self.store.next_write = outcome
        try:
            leader.flush()
        except Deposed as deposed:
            assert deposed.term > leader.term
            self.leaders.remove(leader)
        except StoreUnreachable:
            self.leaders.remove(leader)
        else:
            assert leader is self.leaders[-1], "only the newest leader can append"
            self.durable += added

    @invariant()
    def terms_rise_and_have_one_leader(self) -> None:
        batches = [*self.log.since(1)] if hasattr(self, "log") else []
        terms = [batch.term for batch in batches]
        assert terms == sorted(terms)
        assert all(len({b.leader for b in batches if b.term == term}) == 1 for term in terms)

    @invariant()
    def no_durable_line_is_lost(self) -> None:
        lines = [line for batch in self.log.since(1) for line in batch.lines] if hasattr(self, "log") else []
        kept = [line for line in lines if line in {*getattr(self, "durable", ())}]
        assert kept == getattr(self, "durable", [])


TestLeaders = Leaders.TestCase
TestLeaders.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


def folder_log(folder: Path) -> SharedLog:
    return SharedLog(Store(str(folder / "log"), "fleet.shared_log", ONCE))


def test_a_repeated_write_finds_its_own_batch(tmp_path: Path) -> None:
    log, batch = folder_log(tmp_path), Batch(1, "0" * 32, ("a", "b"))
    assert log.append(1, batch) and log.append(1, batch), "its first answer was lost"
    assert not log.append(1, Batch(1, "1" * 32, ("a", "b"))) and not log.append(1, Batch(2, "0" * 32, ()))
    assert [*log.since(1)] == [batch] and log.read(2) is None


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b'{"term": 1}\nx\n', b"cut"])
def test_a_damaged_batch_is_refused_with_its_file(tmp_path: Path, damage: bytes) -> None:
    log = folder_log(tmp_path)
    log.append(1, Batch(1, "0" * 32, ("a",)))
    file = tmp_path / "log" / "log" / f"{1:012d}"
    file.write_bytes(file.read_bytes()[:-1] if damage == b"cut" else damage)
    with pytest.raises(UserError, match=r"log/000000000001: damaged; restore the file from a copy"):
        log.read(1)


def test_a_lease_shows_only_whether_the_leader_is_alive(tmp_path: Path) -> None:
    log = folder_log(tmp_path)
    assert log.lease() is None
    for count in range(3):
        log.renew(Lease(term=1, leader="0" * 32, count=count))
        assert log.lease() == Lease(term=1, leader="0" * 32, count=count)
    (tmp_path / "log" / "lease.json").write_text("{")
    assert log.lease() is None, "a damaged lease counts as no sign of life"


def test_a_store_that_creates_files_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_log(tmp_path).require_creation_once()
    assert not [*(tmp_path / "log" / "probe").iterdir()]
    with pytest.raises(UserError, match="use a folder that all machines mount"):
        SharedLog(Store("memory://log", "fleet.shared_log", ONCE)).require_creation_once()
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
    with pytest.raises(UserError, match="use a folder that all machines mount"):
        folder_log(tmp_path).require_creation_once()

    class Overwriting(UnreliableStore):
        def creates_once(self, path: str) -> bool:
            return False

    with pytest.raises(UserError, match="does not keep a file from being created twice; use a folder"):
        SharedLog(Overwriting()).require_creation_once()


def test_only_one_of_several_writers_to_s3_appends() -> None:
    """Conditional writes of the object store decide, not the look before."""
    with s3_server.bucket("runs") as url:
        logs = [SharedLog(Store(f"{url}/run", "fleet.shared_log", Retry(tries=3, first_s=0.01))) for _ in range(4)]
        logs[0].require_creation_once()
        with ThreadPoolExecutor(4) as threads:
            for number in range(1, 6):
                stood = threads.map(lambda log, at=number: LogAppender(log, at, at).stand(), logs)  # type: ignore[misc]
                assert sum(stood) == 1
        assert [batch.term for batch in logs[0].since(1)] == [1, 2, 3, 4, 5]
        logs[1].renew(Lease(term=5, leader="0" * 32, count=1))
        assert logs[2].lease() == Lease(term=5, leader="0" * 32, count=1)
