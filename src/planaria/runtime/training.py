"""Train a recipe or resume its run, then report and export it; the implementation of ``planaria train``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Literal

from planaria.common import digests, documents, logs
from planaria.common.errors import LedgerError, RunStopped, UserError
from planaria.common.filesystems import is_url
from planaria.config.consent import allowing
from planaria.config.registry import blame
from planaria.config.schema import RunConfig
from planaria.config.shipped import find
from planaria.control.decisions import Finish
from planaria.control.log_segments import DiskReserve
from planaria.control.logs import EVENTS, ID, identity, read_run
from planaria.control.state_file import STATE
from planaria.models.families import family
from planaria.models.foreign_weights import WeightsFile
from planaria.planner.schedule import MAX_BYTES as SCHEDULE_BYTES
from planaria.report.observe.listener import Step, StepListener
from planaria.report.observe.progress import NoProgress, Progress
from planaria.report.observe.settings import settings as reported_settings
from planaria.report.observe.trackers import trackers
from planaria.report.observe.watch import About, RunWatch
from planaria.report.run.ledger import require_exactly_once
from planaria.report.run.report import write_report
from planaria.report.run.summary import measured, summary
from planaria.runtime.checkpoint.mirror import Mirror, mirrored
from planaria.runtime.complete import complete
from planaria.runtime.configuration import Recipe, Settings, configure, named
from planaria.runtime.engine import fleet, run_folders
from planaria.runtime.engine.custom_classes import own_classes
from planaria.runtime.engine.prepare import PreparedRun, on_schedule, prepare
from planaria.runtime.engine.resolved_config import ResolvedRun
from planaria.runtime.engine.resumption import require_same_data, take_up
from planaria.runtime.engine.run_start import START, Origin
from planaria.runtime.engine.starting_weights import branch_off, starting_weights
from planaria.runtime.engine.stopping import REQUEST
from planaria.runtime.import_export import export_run
from planaria.runtime.prediction.memory import fitted_here
from planaria.runtime.prediction.preflight_table import table
from planaria.runtime.prediction.profiling import resized, sized
from planaria.runtime.run import MODEL, Run
from planaria.runtime.worker.log_file import last_error

_OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory")
Say = Callable[[str], None]
FolderContext = Callable[[Path], AbstractContextManager[object]]
"""context manager to enter while a run is trained, given its folder"""
MIRRORED = dict.fromkeys((*run_folders.KEPT, ID, STATE, digests.FILE), SCHEDULE_BYTES) | {EVENTS: 1 << 40}
"""files of a run that are stored with its checkpoints, and the limit of each in bytes when it is fetched"""


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a run, and its stop event."""

    progress: bool
    say: Say
    on_step: Callable[[Step], object] | None
    stop: Event | None
    beside: FolderContext = nullcontext

    def stopped(self) -> bool:
        """Return whether the run should stop after a whole step."""
        return self.stop is not None and self.stop.is_set()

    @property
    def of_data(self) -> Say | None:
        return self.say if self.progress else None


def train(
    recipe: Recipe,
    *,
    resume: bool | Literal["auto"] = False,
    checkpoint: str | None = None,
    on_step: Callable[[Step], object] | None = None,
    stop: Event | None = None,
    progress: bool = True,
    notify: Say | None = None,
    beside: FolderContext | None = None,
    settings: Settings | None = None,
    allow_code: bool = False,
    **short: object,
) -> Run:
    """Train a recipe with the engines, folder, report and exported model of ``planaria train``.

    :param recipe: a recipe's name or file, or a configuration; with ``resume``, a run's folder, or the name or file of
        a recipe whose newest run is resumed.
    :param resume: resume a run with its own configuration and the given settings; ``"auto"``: resume if
        :func:`existing_run` finds a run of that recipe, else start one, and accept a finished run.
    :param checkpoint: an older checkpoint to resume from, such as ``"step-00000050"``.
    :param on_step: called for every committed step. An exception from it stops the run after a whole step, and is
        raised again once everything is saved.
    :param stop: an event that stops the run after a whole step, from any thread; the run is returned. In the main
        thread, Ctrl-C (a notebook's interrupt) and SIGTERM also stop it, and raise RunStopped.
    :param progress: show a bar on a terminal, and lines elsewhere.
    :param notify: called with notes and results, line by line; default: ``print`` with ``progress``, else none.
    :param beside: context manager to enter while the run is trained, given its folder once that exists.
    :param settings: dotted name → value, as in :func:`planaria.configure`; ``short`` are the same by their last part.
    :param allow_code: import modules that the recipe or the run names as ``module:Class``, which runs their code.
        Modules that the program has imported are always permitted.
    :raises UserError: before any worker starts if an argument is invalid; later if the run failed.
    :raises RunStopped: if the run ended early without an error; ``folder`` is the run to resume. Its subclass
        LedgerError: if all steps were made, but samples were lost or used twice.
    """
    callbacks = Callbacks(progress, notify or (print if progress else _discard), on_step, stop, beside or nullcontext)
    if checkpoint is not None and resume is not True:
        raise UserError(f"checkpoint = {checkpoint!r}: requires resume=True")
    auto, run = resume == "auto", recipe
    with allowing(allow_code):
        if not resume or auto:
            config = configure(recipe, settings=settings, **short)
            if not (auto and (run := existing_run(config))):
                return _begin(config, callbacks, auto)
            if is_url(run):
                run_folders.set_aside(Path(config.out) / config.name, callbacks.say)
        changes = named(settings, short)
        return _resume(_folder(run, changes, callbacks.say), changes, checkpoint, callbacks, auto)


def existing_run(config: RunConfig) -> str:
    """Return the existing run of this name: its folder in ``out``, or its URL in ``checkpoint.store`` if the folder is
    missing or older; else "".

    :raises UserError: if the store cannot be reached.
    """
    folder, store = Path(config.out) / config.name, config.checkpoint.store
    mirror = None if store is None else Mirror(store, config.name)
    if folder.exists():
        return mirror.url if mirror is not None and mirror.ahead(folder) else str(folder)
    return mirror.url if mirror is not None and mirror.newest() else ""


def _begin(config: RunConfig, callbacks: Callbacks, again: bool) -> Run:
    """Train a new run in its own folder; ``again``: it may have been started before, and lost.

    If the start fails, the folder is removed to free its name.
    """
    trackers(config.observe)
    prepared = prepare(config, callbacks.of_data)
    for line in prepared.notes:
        callbacks.say(line)
    config = sized(config, prepared.dataset, callbacks.say, callbacks.stopped)
    if config is not prepared.config:  # sized, so its memory is known only now
        config, note = fitted_here(config)
        if note:
            callbacks.say(note)
    prepared = prepared.with_config(config)
    folder, origin = _created(config, prepared.parent)
    mirror = None
    try:
        if config.routing.schedule is not None:
            digests.put(folder, {run_folders.SCHEDULE: documents.data(Path(config.routing.schedule), SCHEDULE_BYTES)})
            prepared = prepared.with_config(on_schedule(config, (folder / run_folders.SCHEDULE).absolute()))
        mirror = _mirror(config, folder, again)
        with run_folders.held(folder):
            return _train(replace(prepared, parent=None), folder, origin, mirror, callbacks)
    except (UserError, OSError, MemoryError) as error:
        if not run_folders.has_trained(folder):
            if mirror is not None:
                mirror.release(folder)
            run_folders.remove(folder)
            if isinstance(error, UserError):
                error.folder = None
        raise


def _created(config: RunConfig, parent: WeightsFile | None) -> tuple[Path, Origin]:
    """Create the folder of a new run; return it and its origin. It does not appear if weights cannot be read."""
    if parent is None:
        return run_folders.create(config), START
    origins: list[Origin] = []
    folder = run_folders.create_filled(config, lambda made: origins.append(branch_off(parent, made, config)))
    return folder, origins[0]


def _folder(run: Recipe, changes: Settings, notify: Say) -> Path:
    """Return the folder of the run to resume: given, the newest of a recipe, or fetched from a ``checkpoint.store``."""
    if isinstance(run, str) and is_url(run):
        store, _, name = run.rstrip("/").rpartition("/")
        return Mirror(store, name).fetch(Path(str(changes.get("out", "runs"))), MIRRORED, notify)
    if isinstance(run, RunConfig):
        raise UserError("resume=True: give the run's folder, or its recipe's name; a run resumes with its own recipe")
    if (Path(run) / run_folders.CONFIG).is_file() or not find(str(run)).is_file():
        return Path(run)
    return run_folders.newest(
        configure(run, settings={name: changes[name] for name in changes.keys() & {"name", "out"}})
    )


def _resume(folder: Path, changes: Settings, checkpoint: str | None, callbacks: Callbacks, auto: bool) -> Run:
    """Resume a run from its newest or the named checkpoint; ``auto``: accept a run without steps left."""
    changes = resized(folder, changes, callbacks.say, callbacks.stopped)
    there = take_up(folder, changes, checkpoint, callbacks.say)
    config, saved, origin = there.config, there.saved, there.origin
    unexported = saved is not None and saved.whole and not (folder / MODEL).exists()
    if there.done and unexported and (auto or not changes):
        with run_folders.held(folder):  # it was killed before its export
            DiskReserve(folder).release()
            _conclude(config, folder, callbacks.say)
        return _verified(folder)
    if there.done:
        steps = config.train.steps
        done = f"{folder}: all {steps} steps are done; give more with --train.steps {2 * steps}"
        if not auto:
            raise UserError(done)
        callbacks.say(done)
        return Run(folder)
    prepared = prepare(config, callbacks.of_data, begins=False, samples=origin.samples_in_all(config))
    require_same_data(folder, prepared)
    for line in prepared.notes:
        callbacks.say(line)
    parent = starting_weights(config) if saved is None and origin.recalled is None else None
    mirror = _mirror(config, folder)
    with run_folders.held(folder):
        given, kept = config.routing.schedule, (folder / run_folders.SCHEDULE).absolute()
        if given is not None and Path(given) != kept:
            digests.put(folder, {run_folders.SCHEDULE: documents.data(Path(given), SCHEDULE_BYTES)})
            prepared = prepared.with_config(on_schedule(config, kept))
        there.store.discard_unfinished()
        if saved is not None:
            there.store.set_aside_after(saved)
        if parent is not None:
            origin = replace(branch_off(parent, folder, config), generation=origin.generation)
        return _train(prepared, folder, origin, mirror, callbacks)


def _mirror(config: RunConfig, folder: Path, again: bool = False) -> Mirror | None:
    """Return the store of the run's checkpoints; None if the recipe names none.

    :raises UserError: if it cannot be written to, or holds another run of that name.
    """
    if config.checkpoint.store is None:
        return None
    mirror = Mirror(config.checkpoint.store, folder.name)
    mirror.claim(folder, again)
    return mirror


def _train(prepared: PreparedRun, folder: Path, origin: Origin, mirror: Mirror | None, callbacks: Callbacks) -> Run:
    """Train in ``folder``, which the caller holds; then report the outcome."""
    config, before = prepared.config, run_folders.log_size(folder)
    followers = trackers(config.observe)
    run_folders.keep(folder, config, prepared.dataset, prepared.trace)
    if callbacks.progress:
        speed = measured(read_run(folder)).tokens_per_s if origin.step else None
        step_s = config.samples * config.model.context / speed if speed else None
        for line in table(config, origin.step, step_s):
            callbacks.say(line)
    display = Progress() if callbacks.progress else NoProgress()
    listener = None if callbacks.on_step is None else StepListener(display, callbacks.on_step)
    about = About(identity(folder), reported_settings(config)) if followers else None
    watch = RunWatch(folder, config.samples * config.model.context, listener or display, followers, about)

    def asked() -> bool:
        return callbacks.stopped() or (listener is not None and listener.error is not None)

    try:
        with mirrored(mirror, folder, MIRRORED, callbacks.say), callbacks.beside(folder):
            ending = _engine(prepared, folder, watch, origin, asked)
    finally:
        watch.close()
    if ending.outcome == "finished":
        _conclude(config, folder, callbacks.say)
    elif ending.outcome != "stopped" and not run_folders.has_trained(folder, before):
        raise UserError("; ".join(filter(None, (ending.reason, last_error(folder, watch.lost)))))
    else:
        callbacks.say(f"report        {_report(folder)}")
        callbacks.say(f"workers' logs {folder / 'workers'}\nresume with   planaria train --resume {folder}")
    if listener is not None and listener.error is not None:
        raise listener.error
    if ending.outcome == "finished" or ending.reason == REQUEST:
        return _verified(folder)
    wrong: UserError | RunStopped
    if ending.outcome == "failed" or watch.trouble:
        wrong = UserError(ending.reason)
    else:
        reason = f"stopped by {ending.reason}" if ending.outcome == "stopped" else ending.reason
        wrong = RunStopped("; ".join(filter(None, (reason, ending.detail, _remedy(prepared.run, ending)))))
    wrong.folder = folder
    raise wrong


def _verified(folder: Path) -> Run:
    """Return the run if its log shows that every sample was used exactly once; LedgerError if not."""
    run = Run(folder)
    try:
        require_exactly_once(run.record)
    except LedgerError as error:
        error.folder = folder
        raise
    return run


def _remedy(run: ResolvedRun, ending: Finish) -> str:
    """Return the strategy that would have continued a run whose own could not rebuild a stage; empty if none would."""
    refused = ending.outcome == "cannot" and " cannot, " in ending.reason
    if not refused or "checkpoint" in run.recovery.strategies or run.recovery.control:
        return ""
    return (
        "to roll back to the newest checkpoint instead, add ', checkpoint': "
        f"--recovery.strategy '{run.config.recovery.strategy}, checkpoint'"
    )


def _engine(
    prepared: PreparedRun, folder: Path, watch: RunWatch, origin: Origin, requested: Callable[[], bool]
) -> Finish:
    """Run the engine of the recipe until the run ends.

    :raises UserError: if the run cannot start, or there is not enough memory.
    """
    config = prepared.config
    try:
        with logs.about(lambda: {"run": folder.name}):
            return fleet.train(prepared, folder, watch, origin, requested)
    except (OSError, MemoryError, UserError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            raise UserError(f"out of memory: {error}; choose a smaller model or microbatch") from error
        if not (detail := blame(error, own_classes(config))):
            raise
        return Finish(outcome="failed", reason=detail)


def _conclude(config: RunConfig, folder: Path, notify: Say) -> None:
    """Report the results of a finished run, then write its report and model.

    :raises UserError: if the model cannot be exported; it remains in its checkpoint.
    """
    for line in summary(read_run(folder)):
        notify(line)
    chosen = family(config.model)
    if config.prompt:
        none = f"none: model.family = {config.model.family!r} does not complete texts"
        notify(f"completion    {complete(folder, config.prompt) if chosen.whole else none}")
    notify(f"report        {_report(folder)}")
    if not chosen.named:
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


def _discard(line: str) -> None:
    del line
