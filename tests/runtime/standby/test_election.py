"""A standby copies a shared log, and stands for election only when its controller is silent for the timeout."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from planaria.common.errors import RunStopped, UserError
from planaria.common.object_store import Retry, Store
from planaria.config.schema import FleetConfig
from planaria.control.log.shared_log import Batch, Lease, LogAppender, SharedLog
from planaria.runtime.standby.election import ControllerWatch, RunEnd

LEASE_S = 0.3
START, END = '{"t": 0.0, "event": {}}', '{"t": 1.0, "decision": {"kind":"finish","outcome":"finished"}}'


class Mount:
    """A folder with a shared log that its leader renews."""

    def __init__(self, folder: Path, orphan_s: float = 20.0) -> None:
        self.folder, self.notices = folder, list[str]()
        self.log = SharedLog(Store(str(folder / "log"), "fleet.shared_log", Retry(tries=1)))
        self.leader = LogAppender(self.log)
        assert self.leader.stand()
        self.leader.add(START)
        self.leader.flush()
        fleet = FleetConfig(lease_s=LEASE_S, orphan_s=orphan_s)
        self.follower = ControllerWatch(self.log, folder, fleet, 0, self.notices.append, lambda: None)

    def renew(self, seconds: float) -> threading.Thread:
        """Renew the lease for some time, in a thread."""

        def work() -> None:
            until, count = time.monotonic() + seconds, 0
            while time.monotonic() < until:
                self.log.renew(Lease(term=1, leader=self.leader.leader, count=count))
                count += 1
                time.sleep(LEASE_S / 6)

        thread = threading.Thread(target=work)
        thread.start()
        return thread


def test_a_standby_is_elected_only_after_the_election_timeout(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    renewing, began = mount.renew(4 * LEASE_S), time.monotonic()
    appender = mount.follower.follow()
    renewing.join()
    assert appender is not None and appender.term == 2 and time.monotonic() - began > 4 * LEASE_S
    assert (tmp_path / "events.jsonl").read_text() == START + "\n"
    mount.leader.add("late")
    with pytest.raises(RunStopped, match="as term 2"):
        mount.leader.flush()


def test_a_standby_that_starts_late_knows_since_when_the_controller_is_silent(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    mount.log.renew(Lease(term=1, leader=mount.leader.leader, count=1, at=time.time() - 100))
    began = time.monotonic()
    assert mount.follower.follow() is not None
    assert 99 < began - mount.follower.silent_since < 101
    assert LEASE_S < mount.follower.noticed - began < 20, "it waits for the whole election timeout"


def test_a_run_that_ends_needs_no_other_leader(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    mount.leader.add(END)
    mount.leader.flush()
    assert mount.follower.follow() is None
    assert (tmp_path / "events.jsonl").read_text() == f"{START}\n{END}\n"


COMMIT, BEGUN = '{"t": 2.0, "decision": {"kind":"commit","replica":0}}', '{"t": 3.0, "event": {"kind":"run_started"}}'


@pytest.mark.parametrize(
    ("batches", "ended"),
    [
        ([(START,), (END,)], True),
        ([(START,), (COMMIT, END)], True),
        ([(START,), (END,), ("late",), ("later",)], True),
        ([(START,), (COMMIT,)], False),
        ([(END,), (BEGUN,), (COMMIT,), ("late",)], False),
        ([(END,), ()], False),
        ([], False),
    ],
    ids=["ends", "ends in a batch", "lines after the end", "continues", "resumed", "resumption elected", "nothing"],
)
def test_the_end_of_a_run_is_found_in_the_last_batches(
    tmp_path: Path, batches: list[tuple[str, ...]], ended: bool
) -> None:
    log = Mount(tmp_path).log
    term = 1
    for number, lines in enumerate(batches, start=3):
        term += not lines
        assert log.append(number, Batch(term, "0" * 32, lines))
    assert log.newest() == 2 + len(batches)
    assert (RunEnd.of(log).finish is not None) == ended
    forward = RunEnd()
    for batch in log.since(1):
        forward.take(batch)
    assert forward.finish == RunEnd.of(log).finish


def test_a_standby_waits_for_a_log_that_does_not_answer(tmp_path: Path) -> None:
    """Its controller cannot lead either; the election timeout begins again when the log answers."""
    mount = Mount(tmp_path)
    log = tmp_path / "log"
    log.rename(tmp_path / "gone")
    log.write_text("not a folder")

    def back() -> None:
        log.unlink()
        (tmp_path / "gone").rename(log)
        mount.renew(2 * LEASE_S).join()

    timer = threading.Timer(3 * LEASE_S, back)
    timer.start()
    began = time.monotonic()
    assert mount.follower.follow() is not None and time.monotonic() - began > 5 * LEASE_S
    timer.join()
    assert [notice.partition("(")[0] for notice in mount.notices] == ["standby       waits for the shared log "]


def test_a_standby_does_not_wait_longer_than_workers_do(tmp_path: Path) -> None:
    mount = Mount(tmp_path, orphan_s=2 * LEASE_S)
    (tmp_path / "log").rename(tmp_path / "gone")
    (tmp_path / "log").write_text("not a folder")
    with pytest.raises(UserError, match="not a file; restore the file from a copy"):
        mount.follower.follow()
