"""The election of a run's first controller in its shared log, which then has the files that the others need."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.common.object_store import StoreUnreachable
from planaria.config.schema import RunConfig
from planaria.control.log.logs import EVENTS, ID, history_of, identity
from planaria.control.log.shared_log import LogAppender, SharedLog, SharedPosition
from planaria.runtime.fleet.joining import read_or_create_key
from planaria.runtime.shared_log.client import open_shared_log
from planaria.runtime.shared_log.leadership import Leadership
from planaria.runtime.transport.secure import new_key

KEY_PROOF = "key-proof"
"""file of the shared log that only the run's key gives"""


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
