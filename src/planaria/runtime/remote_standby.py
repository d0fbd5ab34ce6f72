"""A standby on another machine: follows a run's shared log, and leads the run if its controller is lost.

The standby copies the log into its own folder. When the lease has not been renewed for ``fleet.lease_s``, it
stands for election (``control/log/shared_log.py``), and then leads the run from its own folder, at an address that the
workers know (``fleet.standby_at``). Machines that had joined return to it with their workers; the workers of the lost
machine are replaced.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from planaria.common.errors import RunStopped, UserError
from planaria.common.stdio import Notify
from planaria.config.schema import FleetConfig, RunConfig
from planaria.control.failover import FailoverState
from planaria.control.log.log_segments import RotatingLog
from planaria.control.log.logs import EVENTS, ID
from planaria.control.log.shared_log import Lease, LogAppender, SharedLog
from planaria.runtime.checkpoint.mirror import Mirror
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.engine import run_folders
from planaria.runtime.engine.prepare import prepare
from planaria.runtime.engine.resumption import require_same_data
from planaria.runtime.engine.run_start import START
from planaria.runtime.execution import Callbacks, Succession, display_of, execute_run, mirror_of
from planaria.runtime.followed_run import FollowedRun
from planaria.runtime.leadership import SHARED_FILES, Leadership, opened
from planaria.runtime.run import Run
from planaria.runtime.transport.listener import require_free

FOLLOW_S = 10.0
"""seconds in which a failing look at the shared log is repeated; then it counts as not answering"""
COPY = ".standby"
"""marks a folder as a standby's copy of a log, which has not led"""
_LOOKS = 5
"""looks at the shared log in ``fleet.lease_s``"""
_JITTER = 0.15
"""largest random delay before an election, as a share of ``fleet.lease_s``"""


def stand_by_elsewhere(location: str, at: str, key: Path, callbacks: Callbacks) -> Run | None:
    """Follow the run whose shared log is at ``location``, and lead it if its controller is lost; None if it ends.

    :param location: ``fleet.shared_log`` and the run's name
    :param at: HOST:PORT at which this machine would lead, one of ``fleet.standby_at``
    :param key: file with the run's key
    :raises UserError: if there is no such run, or this machine cannot lead it.
    """
    log = opened(location, FOLLOW_S, key, f"join {location} --standby")
    folder = _copied(log)
    with run_folders.locked_for_training(folder):
        config = _own_config(run_folders.config_of(folder, *run_folders.KEPT), at, key)
        prepared = prepare(config, None, begins=False, samples=START.total_samples(config))
        require_same_data(folder, prepared)
        require_free(config.fleet.host, config.fleet.port)
        callbacks.notify(f"standby       ready to lead {config.name} at {at} (pid {os.getpid()}, folder {folder})")
        run = FollowedRun(folder, config, display_of(callbacks), measure=True)
        order = config.fleet.standby_addresses.index(at)
        follower = LogCopy(log, folder, config.fleet, order, callbacks.notify, run.advance)
        if (appender := follower.follow()) is None:
            callbacks.notify("the run is over")
            return None
        (folder / COPY).unlink()
        lease_s = config.fleet.lease_s
        with closing(Leadership(replace(appender, log=opened(location, lease_s, key)), lease_s)) as leadership:
            failover = replace(run.lost("machine", follower.noticed), silent_since=follower.last_sign)
            failover = replace(failover, has_checkpoint=_has_checkpoint(config, folder, failover, callbacks))
            succession = Succession(failover, run, leadership)
            return execute_run(prepared, folder, START, mirror_of(config, folder), callbacks, succession)


def _has_checkpoint(config: RunConfig, folder: Path, failover: FailoverState, callbacks: Callbacks) -> bool:
    """Return whether this machine has, or can fetch, the checkpoint to which the run would roll back."""
    name = failover.state.durable.folder
    if not name:
        return True
    if config.checkpoint.store is None:
        return False
    with suppress(OSError, UserError):
        Mirror(config.checkpoint.store, folder.name).fetch_checkpoint(name, folder)
        callbacks.notify(f"fetched       {name} from checkpoint.store")
    return any(saved.folder.name == name for saved in CheckpointStore(folder / "checkpoints").list())


def _own_config(config: RunConfig, at: str, key: Path) -> RunConfig:
    """Return the run's configuration with this machine's address and key.

    :raises UserError: if the run does not know the address.
    """
    if at not in config.fleet.standby_addresses:
        raise UserError(f"join --at {at}: the run's fleet.standby_at is {config.fleet.standby_at!r}; give one of them")
    host, _, port = at.rpartition(":")
    fleet = config.fleet.model_copy(
        update={"host": host.strip("[]"), "port": int(port), "advertise": "", "ports": None, "key": str(key)}
    )
    return config.model_copy(update={"fleet": fleet})


def _copied(log: SharedLog) -> Path:
    """Return a new folder with the run's files; an older copy of this run that has not led is replaced.

    :raises UserError: if the log is no run's, or the folder holds something else.
    """
    identity, name = log.file(ID), log.location.rstrip("/").rpartition("/")[2]
    if identity is None or log.file(run_folders.CONFIG) is None:
        raise UserError(f"join {log.location} --standby: no run has its shared log there; give fleet.shared_log/NAME")
    folder = Path("runs") / name
    if folder.exists():
        if not (folder / COPY).is_file():
            raise UserError(f"{folder} exists already; start the standby in another directory, or remove it")
        if run_folders.is_held(folder):
            raise UserError(f"{folder}: another standby uses it; start this one in another directory")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / COPY).touch()
    (folder / ID).write_bytes(identity)
    for file in SHARED_FILES:
        if (content := log.file(file)) is not None:
            (folder / file).write_bytes(content)
    return folder


class LogCopy:
    """Copies a shared log into a folder until the run ends, or this machine is elected to lead it."""

    def __init__(
        self, log: SharedLog, folder: Path, fleet: FleetConfig, position: int, notify: Notify,
        copied: Callable[[], None],
    ) -> None:  # fmt: skip
        """:param position: in the order of standbys; later ones stand for election a little later.
        :param copied: called after each copied part
        """
        self.log, self._notify, self._copied = log, notify, copied
        self._lease_s, self._orphan_s = fleet.lease_s, fleet.orphan_s
        self._copy = RotatingLog(folder / EVENTS)
        self._delay_s = fleet.lease_s * (1 + _JITTER * (position + random.random()))
        self._seen: Lease | None = None
        self._number, self._term, self._over = 1, 1, False
        self.last_sign = self.noticed = time.monotonic()
        """when the controller gave a sign of life, and when this process considered it lost; monotonic seconds"""

    def follow(self) -> LogAppender | None:
        """Return once this machine leads; None if the run has ended.

        While the store does not answer, the controller cannot lead either: both wait for it.

        :raises RunStopped: if the store does not answer for ``fleet.orphan_s``.
        :raises UserError: if the log is damaged during that time.
        """
        answered = time.monotonic()
        while not self._over:
            try:
                if (appender := self._look()) is not None:
                    self._copy.close()
                    return appender
                answered = time.monotonic()
            except (RunStopped, UserError, OSError) as error:
                if time.monotonic() - answered > self._orphan_s:
                    raise
                if self.last_sign <= answered:
                    self._notify(f"standby       waits for the shared log ({error})")
                self.last_sign = time.monotonic()
            time.sleep(self._lease_s / _LOOKS)
        self._copy.close()
        return None

    def _look(self) -> LogAppender | None:
        """Copy what is new, and stand for election if the lease is over; return the appender of an elected one."""
        lease = self.log.lease()
        advanced = self._advance()
        self._copied()
        if advanced or lease != self._seen:
            self._seen, self.last_sign = lease, time.monotonic()
        if self._over or time.monotonic() - self.last_sign <= self._delay_s:
            return None
        self.noticed = time.monotonic()
        return self._stand()

    def _advance(self) -> bool:
        """Copy new batches; return whether there were any."""
        before = self._number
        for batch in self.log.since(self._number):
            for line in batch.lines:
                self._copy.write(line)
            self._number, self._term = self._number + 1, batch.term
            for line in batch.lines:
                self._over = '"decision": {"kind":"finish"' in line or (
                    self._over and '"event": {"kind":"run_started"' not in line
                )
        return self._number > before

    def _stand(self) -> LogAppender | None:
        appender = LogAppender(self.log, self._term + 1, self._number)
        if appender.stand():
            return appender
        self.last_sign = time.monotonic()  # another one was elected
        return None
