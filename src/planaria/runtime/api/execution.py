"""Execute a run in its folder: engine, log, trackers and display, then its report and exported model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from planaria.common import digests, logs
from planaria.common.errors import LedgerError, RunStopped, UserError
from planaria.common.stdio import Notify
from planaria.config.registry import blame
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Finish
from planaria.control.failover import FailoverState
from planaria.control.log.reader import EVENTS, ID, identity, read_run
from planaria.control.log.state_file import STATE
from planaria.models.families import make_family
from planaria.planner.schedule import MAX_BYTES as SCHEDULE_BYTES
from planaria.report.observe.progress import NoProgress, Progress, Step, StepListener
from planaria.report.observe.run_observer import RunIdentity, RunObserver
from planaria.report.observe.tracker import settings as reported_settings
from planaria.report.observe.trackers import trackers
from planaria.report.run.report import write_report
from planaria.report.run.sample_ledger import require_exactly_once
from planaria.report.run.summary import key_metrics, summary
from planaria.runtime.api.completer import complete
from planaria.runtime.api.import_export import export_run
from planaria.runtime.api.run import MODEL, Run
from planaria.runtime.checkpoint.mirror import Mirror, mirror_folder
from planaria.runtime.custom_classes import custom_classes
from planaria.runtime.engine.stopping import REQUEST
from planaria.runtime.engine.train_prepared import train_prepared
from planaria.runtime.fleet.joining import join_command, standby_commands
from planaria.runtime.prediction.preflight_table import table
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.prepare import PreparedRun
from planaria.runtime.preparation.run_start import Origin
from planaria.runtime.shared_log.leadership import Leadership, lead_run
from planaria.runtime.standby.followed_run import FollowedRun
from planaria.runtime.worker.log_file import last_error

_OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory")
FolderContext = Callable[[Path], AbstractContextManager[object]]
"""context manager to enter while a run is trained, given its folder"""
MIRRORED = dict.fromkeys((*run_folders.RUN_FILES, ID, STATE, digests.FILE), SCHEDULE_BYTES) | {EVENTS: 1 << 40}
"""files of a run that are stored with its checkpoints, and the limit of each in bytes when it is fetched"""


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a run, and its stop event."""

    progress: bool
    notify: Notify
    on_step: Callable[[Step], object] | None
    stop: Event | None
    context: FolderContext = nullcontext
    bar: bool = True
    """whether a terminal shows a bar; False for a background process, which would write over the user's input"""

    def stopped(self) -> bool:
        """Return whether the run should stop after a whole step."""
        return self.stop is not None and self.stop.is_set()

    @property
    def data_notify(self) -> Notify | None:
        return self.notify if self.progress else None


def display_of(callbacks: Callbacks) -> NoProgress:
    """Return the display of a run, which also calls ``on_step``."""
    display = Progress(bar=callbacks.bar) if callbacks.progress else NoProgress()
    return display if callbacks.on_step is None else StepListener(display, callbacks.on_step)


def mirror_of(config: RunConfig, folder: Path, may_exist: bool = False) -> Mirror | None:
    """Return the store of the run's checkpoints, or None if the recipe names none.

    :raises UserError: if it cannot be written to, or holds another run of that name.
    """
    if config.checkpoint.store is None:
        return None
    mirror = Mirror(config.checkpoint.store, folder.name)
    mirror.claim(folder, may_exist)
    return mirror


@dataclass(frozen=True)
class StandbyTakeover:
    """A run that a standby continues, since its controller was lost."""

    failover: FailoverState
    run: FollowedRun
    leadership: Leadership | None = None
    """of a run with a shared log, whose controller was lost with its machine"""

    @property
    def clock_offset_s(self) -> float:
        """Add this to the times of this machine to continue those of the log."""
        if self.leadership is None:
            return 0.0
        return self.run.last_t - self.failover.silent_since


@dataclass(frozen=True)
class RunExecution:
    """A run to be trained in ``folder``, whose lock the caller holds."""

    prepared: PreparedRun
    folder: Path
    origin: Origin
    mirror: Mirror | None
    callbacks: Callbacks
    takeover: StandbyTakeover | None = None
    """of a run whose controller was lost"""

    def execute(self) -> Run:
        """Train, then report the outcome.

        :raises RunStopped: if the run ends early; a LeadershipLost if another machine leads it.
        """
        config, folder = self.prepared.config, self.folder
        size_before = run_folders.log_size(folder)
        if self.takeover is None:
            run_folders.write_run_files(folder, config, self.prepared.dataset, self.prepared.trace)
            _show_table(config, folder, self.origin, self.callbacks)
            display, elected = display_of(self.callbacks), None
        else:
            display, elected = self.takeover.run.account.progress, self.takeover.leadership
        with lead_run(config, folder, run_folders.SHARED_FILES, elected) as leadership:
            ending, watch = self._train(display, leadership)
        trained = self.takeover is not None or run_folders.has_trained(folder, size_before)
        _report_end(self.prepared, folder, ending, watch, trained, self.callbacks)
        if isinstance(display, StepListener) and display.error is not None:
            raise display.error
        if ending.outcome == "finished" or ending.reason == REQUEST:
            return require_complete(folder)
        raise _failure(folder, ending, watch)

    def _train(self, display: NoProgress, leadership: Leadership | None) -> tuple[Finish, RunObserver]:
        """Train to the end of the run; return how it ended, and its observer."""
        folder, callbacks = self.folder, self.callbacks
        watch = self._watch(display, leadership)

        def stop_requested() -> bool:
            return callbacks.stopped() or (isinstance(display, StepListener) and display.error is not None)

        try:
            if self.takeover is not None:
                watch.resume()
            with mirror_folder(self.mirror, folder, MIRRORED, callbacks.notify), callbacks.context(folder):
                return self._run_engine(watch, stop_requested), watch
        finally:
            watch.close()

    def _watch(self, display: NoProgress, leadership: Leadership | None) -> RunObserver:
        config = self.prepared.config
        active_trackers = trackers(config.observe)
        about = RunIdentity(identity(self.folder), reported_settings(config)) if active_trackers else None
        tokens_per_step = config.samples * config.model.context
        offset_s, account = 0.0, None
        if self.takeover is not None:
            offset_s, account = self.takeover.clock_offset_s, self.takeover.run.account
        return RunObserver(self.folder, tokens_per_step, display, active_trackers, about, leadership, offset_s, account)

    def _run_engine(self, watch: RunObserver, stop_requested: Callable[[], bool]) -> Finish:
        """Run the engine of the recipe until the run ends.

        :raises UserError: if the run cannot start, or there is not enough memory.
        """
        prepared, folder = self.prepared, self.folder
        failover = None if self.takeover is None else self.takeover.failover
        try:
            with logs.add_context(lambda: {"run": folder.name}):
                return train_prepared(
                    prepared,
                    folder,
                    watch,
                    self.origin,
                    stop_requested,
                    failover,
                    self._print_join_command,
                    self.callbacks.progress,
                )
        except (OSError, MemoryError, UserError):
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
                raise UserError(f"out of memory: {error}; choose a smaller model or microbatch") from error
            if not (detail := blame(error, custom_classes(prepared.config))):
                raise
            return Finish(outcome="failed", reason=detail)

    def _print_join_command(self, address: str) -> None:
        """Print how machines join and stand by, once the controller listens."""
        fleet = self.prepared.config.fleet
        if self.callbacks.progress and (command := join_command(fleet, self.folder, address)):
            self.callbacks.notify(f"join with     {command}")
            for command in standby_commands(fleet, self.folder.name):
                self.callbacks.notify(f"stand by with {command}")


def _show_table(config: RunConfig, folder: Path, origin: Origin, callbacks: Callbacks) -> None:
    """Show memory, bytes and time of the stages, with the speed of the run so far if it is resumed."""
    if not callbacks.progress:
        return
    speed = key_metrics(read_run(folder)).tokens_per_s if origin.step else None
    step_s = config.samples * config.model.context / speed if speed else None
    for line in table(config, origin.step, step_s):
        callbacks.notify(line)


def _report_end(
    prepared: PreparedRun, folder: Path, ending: Finish, watch: RunObserver, trained: bool, callbacks: Callbacks
) -> None:
    """Report the results of a finished run, or where an unfinished one can be read and resumed.

    :raises UserError: if the run failed before it trained.
    """
    if ending.outcome == "finished":
        conclude(prepared.config, folder, callbacks.notify)
    elif ending.outcome != "stopped" and not trained:
        raise UserError("; ".join(filter(None, (ending.reason, last_error(folder, watch.lost)))))
    else:
        callbacks.notify(f"report        {_report(folder)}")
        callbacks.notify(f"workers' logs {folder / 'workers'}\nresume with   planaria train --resume {folder}")


def _failure(folder: Path, ending: Finish, watch: RunObserver) -> UserError | RunStopped:
    error: UserError | RunStopped
    if ending.outcome == "failed" or watch.trouble:
        error = UserError(ending.reason)
    else:
        reason = f"stopped by {ending.reason}" if ending.outcome == "stopped" else ending.reason
        error = RunStopped("; ".join(filter(None, (reason, ending.detail))))
    error.folder = folder
    return error


def require_complete(folder: Path) -> Run:
    """Return the run if its log shows that every sample was used exactly once; LedgerError if not."""
    run = Run(folder)
    try:
        require_exactly_once(run.record)
    except LedgerError as error:
        error.folder = folder
        raise
    return run


def conclude(config: RunConfig, folder: Path, notify: Notify) -> None:
    """Report the results of a finished run, then write its report and model.

    :raises UserError: if the model cannot be exported; it remains in its checkpoint.
    """
    for line in summary(read_run(folder)):
        notify(line)
    chosen = make_family(config.model)
    if config.prompt:
        none = f"none: model.family = {config.model.family!r} does not complete texts"
        notify(f"completion    {complete(folder, config.prompt) if chosen.completes_texts else none}")
    notify(f"report        {_report(folder)}")
    if not chosen.has_global_names:
        notify(f"model         {run_folders.newest_whole(folder).folder}, stage by stage")
        return
    if (folder / MODEL).exists():  # from an earlier part of the run
        shutil.rmtree(folder / MODEL)
    try:
        model = export_run(folder, folder / MODEL)
    except UserError as error:
        command = f"planaria export {folder} --to {folder / MODEL}"
        raise UserError(f"{error}: the run is finished and saved; after fixing that, run `{command}`") from error
    notify(f"model         {model}")


def _report(folder: Path) -> str:
    """Write the report; return its path, or why that failed, so that the outcome of the run is still reported."""
    try:
        return str(write_report(folder))
    except UserError as error:
        return f"none: {error}"
