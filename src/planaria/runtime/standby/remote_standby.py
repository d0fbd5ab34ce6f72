"""A standby on another machine: follows a run's shared log, and leads the run if its controller is lost.

The standby copies the log into its own folder. When the controller has been silent for the election timeout, it stands
for election (``runtime/standby/election.py``), and then leads the run from its own folder, at an address that the
workers know (``fleet.standby_at``). Machines that had joined return to it with their workers; the workers of the lost
machine are replaced. A standby that leads and is replaced in turn follows the log again.
"""

from __future__ import annotations

import hmac
import os
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from planaria.common.errors import RunStopped, UserError
from planaria.common.stdio import Notify
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Finish
from planaria.control.failover import FailoverState
from planaria.control.log import segments
from planaria.control.log.reader import EVENTS, ID, METRICS
from planaria.control.log.shared_log import BEGIN, LeadershipLost, LogAppender, SharedLog, SharedPosition
from planaria.runtime.api.execution import Callbacks, RunExecution, StandbyTakeover, display_of, mirror_of
from planaria.runtime.api.run import Run
from planaria.runtime.checkpoint.mirror import Mirror
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.fleet.joining import read_key
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.prepare import prepare
from planaria.runtime.preparation.resumption import require_same_data
from planaria.runtime.preparation.run_start import START
from planaria.runtime.shared_log.client import open_shared_log
from planaria.runtime.shared_log.leadership import KEY_PROOF, Leadership, proof_of, require_usable
from planaria.runtime.standby.election import ControllerWatch, RunEnd
from planaria.runtime.standby.followed_run import FollowedRun
from planaria.runtime.transport.listener import require_free, reserved

NO_KINDS: Mapping[str, type[Candidate]] = MappingProxyType({})
FOLLOW_S = 10.0
"""seconds to retry a failed read of the shared log"""


def stand_by_elsewhere(
    location: str, at: str, key: Path, callbacks: Callbacks, kinds: Mapping[str, type[Candidate]] = NO_KINDS
) -> Run | None:
    """Follow the run whose shared log is at ``location``, and lead it if its controller is lost; None if it ends.

    :param location: ``fleet.shared_log`` and the run's name
    :param at: HOST:PORT at which this machine would lead, one of ``fleet.standby_at``
    :param key: file with the run's key
    :param kinds: candidates for runs of some ``model.family``
    :raises UserError: if there is no such run, or this machine cannot lead it.
    """
    command = f"join {location} --standby"
    with require_usable(command):
        log = open_shared_log(location, FOLLOW_S, key, command)
        config = _suitable_config(log, at, key)
        if (finish := RunEnd.of(log).finish) is not None:
            callbacks.notify(_ended(finish))
            return None
    with reserved(at):
        folder = _new_folder(log, callbacks.notify)
        with run_folders.lock_for_training(folder):
            _copy_files(log, folder)
            kind = kinds.get(config.model.family, Candidate)
            return kind(log, folder, at, key, callbacks).stand_by(BEGIN)


def stand_by_again(
    lost: LeadershipLost, config: RunConfig, folder: Path, callbacks: Callbacks, kind: type[Candidate] | None = None
) -> Run:
    """Follow a run that this process has led from ``folder``, whose lock it holds, and lead it again if necessary.

    :param kind: of candidate
    :raises LeadershipLost: if this machine is not one of ``fleet.standby_at``.
    """
    fleet = config.fleet
    at = fleet.own_address
    if at not in fleet.standby_addresses or fleet.key is None:
        raise LeadershipLost(f"{lost}; list {at} in fleet.standby_at to let this machine stand by", lost.position)
    location = f"{str(fleet.shared_log).rstrip('/')}/{folder.name}"
    log = open_shared_log(location, FOLLOW_S, fleet.key)
    with reserved(at):
        candidate = (kind or Candidate)(log, folder, at, Path(fleet.key), callbacks)
        return candidate.stand_by(candidate.step_down(lost)) or Run(folder)


class Candidate:
    """A machine that may lead a run: it follows the shared log, leads when it is elected, and follows again when it is
    replaced."""

    def __init__(self, log: SharedLog, folder: Path, at: str, key: Path, callbacks: Callbacks) -> None:
        """:raises UserError: if this machine cannot lead the run."""
        self._log, self._folder, self._at, self._key, self._callbacks = log, folder, at, key, callbacks
        self._config = _own_config(run_folders.config_of(folder, *run_folders.RUN_FILES), at, key)
        self._prepare()

    def _prepare(self) -> None:
        """Prepare to lead; UserError if this machine cannot."""
        self._prepared = prepare(self._config, None, begins=False, samples=START.total_samples(self._config))
        require_same_data(self._folder, self._prepared)

    def stand_by(self, end: SharedPosition) -> Run | None:
        """Return the run once this machine has led it to its end; None if another one has.

        :raises RunStopped: if it is stopped while another machine leads.
        :param end: of the part of the shared log that the folder has
        """
        while True:
            (self._folder / run_folders.FOLLOWER).touch()
            run = FollowedRun(self._folder, self._config, display_of(self._callbacks), measure=True)
            run.advance()
            saved = run.saved
            watch = self._watch(run, end)
            if (appender := watch.follow(self._callbacks.stopped)) is None:
                if self._callbacks.stopped():
                    raise RunStopped("stopped; another machine leads the run")
                if watch.finish is not None:
                    self._callbacks.notify(_ended(watch.finish))
                return None
            failover = run.lost("silent", watch.noticed)
            if failover.finish is not None:  # its resumption was lost before the first step
                self._callbacks.notify(_ended(failover.finish))
                return None
            (self._folder / run_folders.FOLLOWER).unlink(missing_ok=True)
            run_folders.write_config(self._folder, self._config)  # with which the run is resumed here
            if run.saved != saved:
                self._set_aside_checkpoints()
            try:
                return self._lead(appender, run, replace(failover, silent_since=watch.silent_since))
            except LeadershipLost as lost:
                end = self.step_down(lost)

    def _watch(self, run: FollowedRun, end: SharedPosition) -> ControllerWatch:
        """Return a watch that reports once that the log is copied."""
        notify, fleet, ready = self._callbacks.notify, self._config.fleet, False

        def copied() -> None:
            nonlocal ready
            run.advance()
            if not ready and watch.finish is None:
                ready = True
                about = f"(pid {os.getpid()}, folder {self._folder})"
                notify(f"standby       ready to lead {self._config.name} at {self._at} {about}")

        order = fleet.standby_addresses.index(self._at)
        watch = ControllerWatch(self._log, self._folder, fleet, order, notify, copied, end)  # which `copied` reads
        return watch

    def _lead(self, appender: LogAppender, run: FollowedRun, failover: FailoverState) -> Run:
        """Lead the run to its end.

        :raises LeadershipLost: if another machine does.
        """
        lease_s = self._config.fleet.lease_s
        leader = replace(appender, log=open_shared_log(self._log.location, lease_s, self._key))
        with closing(Leadership(leader, lease_s)) as leadership:
            failover = replace(failover, has_checkpoint=self._has_checkpoint(failover))
            return self._execute(StandbyTakeover(failover, run, leadership))

    def _execute(self, takeover: StandbyTakeover) -> Run:
        """Lead the run to its end, as :class:`RunExecution`."""
        mirror = mirror_of(self._config, self._folder)
        return RunExecution(self._prepared, self._folder, START, mirror, self._callbacks, takeover).execute()

    def step_down(self, lost: LeadershipLost) -> SharedPosition:
        """Give up what this machine has done that is not in the shared log; return the end of the log that it keeps."""
        self._callbacks.notify(f"standby       {lost}; standing by again")
        segments.keep_first(self._folder / EVENTS, lost.position.lines)
        segments.keep_first(self._folder / METRICS, 0)  # written again from the log
        CheckpointStore(self._folder / "checkpoints").discard_unfinished()
        return lost.position

    def _set_aside_checkpoints(self) -> None:
        """Rename this machine's checkpoints, as another one has saved since: their names may be the same."""
        for saved in (store := CheckpointStore(self._folder / "checkpoints")).list():
            store.set_aside(saved)

    def _has_checkpoint(self, failover: FailoverState) -> bool:
        """Return whether this machine has, or can fetch, the checkpoint to which the run would roll back."""
        name, folder = failover.state.durable.folder, self._folder
        saved = CheckpointStore(folder / "checkpoints").list()
        if not name or any(checkpoint.folder.name == name for checkpoint in saved):
            return True
        if self._config.checkpoint.store is None:
            return False
        with suppress(OSError, UserError):
            Mirror(self._config.checkpoint.store, folder.name).fetch_checkpoint(name, folder)
            self._callbacks.notify(f"fetched       {name} from checkpoint.store")
            return True
        return False


def _ended(finish: Finish) -> str:
    """Return the message about a run that has ended."""
    if finish.outcome == "finished":
        return "the run is finished"
    return f"the run has ended ({finish.reason or finish.outcome}); resume it on the machine that led it last"


def _suitable_config(log: SharedLog, at: str, key: Path) -> RunConfig:
    """Return the run's configuration; UserError if this machine could not lead the run, before anything is written."""
    identity, text = log.file(ID), log.file(run_folders.CONFIG)
    if identity is None or text is None:
        raise UserError(f"join {log.location} --standby: no run has its shared log there; use fleet.shared_log/NAME")
    proof = log.file(KEY_PROOF)
    if proof is not None and not hmac.compare_digest(proof, proof_of(read_key(key), identity)):
        raise UserError(f"--key-file {key}: not the run's key; copy the fleet.key file of the controller's machine")
    config = recipe.parse(text.decode(errors="replace"), f"{log.location}/{run_folders.CONFIG}")
    fleet = _own_config(config, at, key).fleet
    try:
        require_free(fleet.host, fleet.port)
    except UserError as error:
        raise UserError(f"join --at {at}: {error}") from None
    return config


def _own_config(config: RunConfig, at: str, key: Path) -> RunConfig:
    """Return the run's configuration with this machine's address and key.

    :raises UserError: if the run does not know the address.
    """
    if at not in config.fleet.standby_addresses:
        raise UserError(f"join --at {at}: the run's fleet.standby_at is {config.fleet.standby_at!r}; use one of them")
    if at == config.fleet.own_address:
        return config
    host, _, port = at.rpartition(":")
    here = {"host": host.strip("[]"), "port": int(port), "advertise": "", "ports": None, "key": str(key.absolute())}
    return config.model_copy(update={"fleet": config.fleet.model_copy(update=here)})


def _new_folder(log: SharedLog, notify: Notify) -> Path:
    """Return a new folder for the run. A former copy of the log is replaced; a folder with checkpoints is renamed.

    :raises UserError: if the folder holds something else, or another process uses it.
    """
    identity, folder = log.file(ID), Path("runs") / log.location.rstrip("/").rpartition("/")[2]
    if folder.exists():
        checkpoints = CheckpointStore(folder / "checkpoints").list()
        copied = (folder / run_folders.FOLLOWER).is_file() and not checkpoints
        if not copied and not ((folder / ID).is_file() and (folder / ID).read_bytes() == identity):
            raise UserError(f"{folder} is not of this run; start the standby in another directory, or remove it")
        if run_folders.is_held(folder):
            raise UserError(f"{folder}: another process uses it; start this standby in another directory")
        if copied:
            shutil.rmtree(folder)
        else:
            run_folders.set_aside(folder, notify)
    folder.mkdir(parents=True)
    (folder / run_folders.FOLLOWER).touch()
    return folder


def _copy_files(log: SharedLog, folder: Path) -> None:
    """Copy the run's identity and files into its folder, whose lock the caller holds."""
    for file in (ID, *run_folders.SHARED_FILES):
        if (content := log.file(file)) is not None:
            (folder / file).write_bytes(content)
