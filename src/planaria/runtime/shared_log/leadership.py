"""Lead a run whose log is shared with other machines (``fleet.shared_log``): the first election, and the lease.

A lease lasts two ``fleet.lease_s``. A standby stands for election after one (``runtime/standby/election.py``).
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from planaria.common import documents
from planaria.common.errors import RunStopped, UserError
from planaria.common.object_store import StoreUnreachable
from planaria.config.schema import RunConfig
from planaria.control.log.reader import EVENTS, ID, history_of, identity
from planaria.control.log.shared_log import (
    Deposed,
    LeadershipLost,
    Lease,
    LogAppender,
    SharedLog,
    SharedPosition,
)
from planaria.runtime.fleet.joining import read_or_create_key
from planaria.runtime.shared_log.client import open_shared_log
from planaria.runtime.transport.secure import new_key

RENEWALS = 3
"""renewals of the lease in ``fleet.lease_s``"""
LEASE_FACTOR = 2
"""length of a lease in ``fleet.lease_s``; longer than an election timeout, so that a slow store alone ends no run"""
KEY_PROOF = "key-proof"
"""file of the shared log that only the run's key gives"""


class Leadership:
    """The right of this process to lead a run, as long as it renews its lease; a thread does that.

    A call of the store may hang, so another thread watches the lease.
    """

    def __init__(self, appender: LogAppender, lease_s: float) -> None:
        self.appender, self._lease_s = appender, lease_s
        self._renewed = time.monotonic()
        self._closed = threading.Event()
        self._guarded = threading.Lock()
        self._lost = ""
        """why this process must not lead any more; empty while it may"""
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def when_lost(self, disconnect: Callable[[], object]) -> None:
        """Let a thread call ``disconnect`` once this process may not lead any more, even if it waits for the store."""
        threading.Thread(target=self._watch, args=(disconnect,), name="lease watch", daemon=True).start()

    def add(self, line: str) -> None:
        """Add a line of the log."""
        self.appender.add(line)

    def check(self) -> None:
        """Raise LeadershipLost if another controller leads, or the lease could not be renewed."""
        self._give_up_if_expired()
        if self._lost:
            raise LeadershipLost(self._lost, self.appender.position)

    def _give_up_if_expired(self) -> None:
        """Give up the right to lead once the lease has expired, even if no other process leads: workers may have left.

        If a standby was elected before, the store rejects what this process would append.
        """
        silent_s = time.monotonic() - self._renewed
        if silent_s > LEASE_FACTOR * self._lease_s:
            self._lose(
                f"the lease in {self.appender.log.location} was not renewed for {silent_s:.1f} s (the log did not "
                "answer, or this process was stopped); another machine may lead the run"
            )

    def secure(self) -> None:
        """Append all lines to the shared log.

        :raises LeadershipLost: if another controller leads, or the store does not answer.
        """
        self.check()
        try:
            self.appender.flush()
        except (UserError, RunStopped) as error:  # the location of the store has changed, or it does not answer
            self._lose(str(error))
        self.check()

    def _lose(self, why: str) -> None:
        """Give up the right to lead permanently."""
        with self._guarded:
            self._lost = self._lost or why

    def _watch(self, disconnect: Callable[[], object]) -> None:
        while not self._closed.wait(self._lease_s / RENEWALS):
            try:
                self.check()
            except LeadershipLost:
                disconnect()
                return

    def close(self) -> None:
        self._closed.set()
        self._thread.join(self._lease_s)

    def _renew(self) -> None:
        count = 0
        while not self._lost and not self._closed.is_set():
            began = time.monotonic()
            try:
                last = self.appender.log.lease()
                if last is not None and last.term > self.appender.term:
                    self._lose(str(Deposed(last.term)))
                    return
                sign = Lease(term=self.appender.term, leader=self.appender.leader, count=count, at=time.time())
                self.appender.log.renew(sign)
                self._renewed = began
            except (RunStopped, UserError, OSError):
                pass  # the controller stops when that lasts too long
            count += 1
            self._closed.wait(self._lease_s / RENEWALS)
            self._give_up_if_expired()


@contextmanager
def lead_run(
    config: RunConfig, folder: Path, files: Sequence[str], leadership: Leadership | None
) -> Iterator[Leadership | None]:
    """Yield the leadership of a run; None if its log is not shared.

    :param files: names of the files in ``folder`` that another machine needs to lead the run
    :param leadership: of a controller that was elected; None: stand for election, as the run's first controller
    :raises UserError: if the store is unsuitable, holds another run, or another machine leads.
    """
    if config.fleet.shared_log is None:
        yield None
        return
    if leadership is None:
        with require_usable("fleet.shared_log"):
            leadership = Leadership(_first_election(config, folder, files), config.fleet.lease_s)
    try:
        yield leadership
    finally:
        leadership.close()


@contextmanager
def require_usable(setting: str) -> Iterator[None]:
    """Turn a failure of the shared log's store into a UserError that names the user's ``setting``."""
    try:
        yield
    except (StoreUnreachable, OSError) as error:
        raise UserError(f"{setting}: {error}; check the location, your permissions and the network") from error


def _first_election(config: RunConfig, folder: Path, files: Sequence[str]) -> LogAppender:
    """Stand for election as the run's first controller; an entry without a line, of a start that failed, is reused."""
    fleet = config.fleet
    key = None if fleet.key is None else read_or_create_key(Path(fleet.key), new_key())
    log = open_shared_log(f"{str(fleet.shared_log).rstrip('/')}/{folder.name}", fleet.lease_s, fleet.key)
    own, known = identity(folder).encode(), log.file(ID)
    end = SharedPosition(term=0)
    for batch in log.since(1):
        end = SharedPosition(end.number + 1, end.lines + len(batch.lines), batch.term)
    if known not in (None, own) and end.lines:
        raise UserError(f"fleet.shared_log: {log.location} holds another run; choose another --name")
    log.require_creation_once()
    _require_silence(log, config.fleet.lease_s)
    if end.lines > (here := sum(1 for _ in history_of(folder)) if (folder / EVENTS).exists() else 0):
        raise UserError(
            f"{folder}: the shared log {log.location} has {end.lines} lines and this folder {here}: another machine "
            "trained on; resume the run there, or continue from here with another --fleet.shared_log"
        )
    appender = LogAppender.after(end, log)
    if not appender.stand():
        raise UserError(f"fleet.shared_log: {log.location}: another machine leads this run; stop that first")
    log.put_file(ID, own)
    if key is not None:
        log.put_file(KEY_PROOF, proof_of(key, own))
    for name in files:
        if (folder / name).is_file():
            log.put_file(name, documents.read_bytes(folder / name))
    return appender


def proof_of(key: bytes, run: bytes) -> bytes:
    """Return what proves that a key is this run's."""
    return hmac.digest(key, b"shared log of " + run, "sha256")


def _require_silence(log: SharedLog, lease_s: float) -> None:
    """Raise UserError if a controller renews its lease."""
    before = log.lease()
    if before is None:
        return
    time.sleep(lease_s)
    if log.lease() != before:
        raise UserError(f"fleet.shared_log: {log.location}: another machine leads this run; stop that first")
