"""Train a recipe or resume its run, then report and export it; the implementation of ``planaria train``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Literal

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.common.filesystems import is_url
from planaria.common.stdio import Notify
from planaria.config.consent import permit_code
from planaria.config.schema import RunConfig
from planaria.config.shipped import find
from planaria.control.log.segments import DiskReserve
from planaria.control.log.shared_log import LeadershipLost
from planaria.models.foreign_weights import WeightsFile
from planaria.planner.schedule import MAX_BYTES as SCHEDULE_BYTES
from planaria.report.observe.progress import Step
from planaria.report.observe.trackers import trackers
from planaria.runtime.api.configure import Recipe, Settings, configure, merge_settings
from planaria.runtime.api.execution import (
    MIRRORED,
    Callbacks,
    FolderContext,
    RunExecution,
    conclude,
    mirror_of,
    require_complete,
)
from planaria.runtime.api.run import MODEL, Run
from planaria.runtime.checkpoint.mirror import Mirror
from planaria.runtime.fleet.supervised_fleet import has_supervisor
from planaria.runtime.prediction.preflight_table import fit_or_show
from planaria.runtime.prediction.profiling import resumed_layers, with_measured_layers
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.prepare import PreparedRun, on_schedule, prepare
from planaria.runtime.preparation.resumption import Resumption, require_same_data, resumption_of
from planaria.runtime.preparation.run_start import START, Origin
from planaria.runtime.preparation.starting_weights import branch_off, starting_weights
from planaria.runtime.standby.local_standby import stand_by
from planaria.runtime.standby.remote_standby import stand_by_again


def train(
    recipe: Recipe,
    *,
    resume: bool | Literal["auto"] = False,
    checkpoint: str | None = None,
    on_step: Callable[[Step], object] | None = None,
    stop: Event | None = None,
    progress: bool = True,
    notify: Notify | None = None,
    context: FolderContext | None = None,
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
    :param context: context manager to enter while the run is trained, given its folder once that exists.
    :param settings: dotted name → value, as in :func:`planaria.configure`; ``short`` are the same by their last part.
    :param allow_code: import modules that the recipe or the run names as ``module:Class``, which runs their code.
        Modules that the program has imported are always permitted.
    :raises UserError: before any worker starts if an argument is invalid; later if the run failed.
    :raises RunStopped: if the run ended early without an error; ``folder`` is the run to resume. Its subclass
        LedgerError: if all steps were made, but samples were lost or used twice.
    """
    callbacks = Callbacks(progress, notify or (print if progress else _discard), on_step, stop, context or nullcontext)
    if checkpoint is not None and resume is not True:
        raise UserError(f"checkpoint = {checkpoint!r} requires resume=True")
    auto, run = resume == "auto", recipe
    with permit_code(allow_code):
        if not resume or auto:
            config = configure(recipe, settings=settings, **short)
            if not (auto and (run := existing_run(config))):
                return _begin(config, callbacks, auto)
            if is_url(run):
                run_folders.set_aside(Path(config.out) / config.name, callbacks.notify)
        changes = merge_settings(settings, short)
        return _resume(_folder(run, changes, callbacks.notify), changes, checkpoint, callbacks, auto)


def existing_run(config: RunConfig) -> str:
    """Return the existing run of this name: its folder in ``out``, or its URL in ``checkpoint.store`` if the folder is
    missing or older; else "".

    :raises UserError: if the store cannot be reached.
    """
    folder, store = Path(config.out) / config.name, config.checkpoint.store
    mirror = None if store is None else Mirror(store, config.name)
    if folder.exists():
        return mirror.url if mirror is not None and mirror.is_ahead(folder) else str(folder)
    return mirror.url if mirror is not None and mirror.newest() else ""


def _begin(config: RunConfig, callbacks: Callbacks, again: bool) -> Run:
    """Train a new run in its own folder; ``again``: it may have been started before, and lost.

    If the start fails, the folder is removed to free its name.
    """
    trackers(config.observe)
    prepared = prepare(config, callbacks.data_notify, warn=callbacks.notify)
    for line in prepared.notes:
        callbacks.notify(line)
    config = with_measured_layers(config, prepared.dataset, callbacks.notify, callbacks.stopped)
    if config is not prepared.config:  # sized, so its memory is known only now
        config, note = fit_or_show(config, callbacks.data_notify)
        if note:
            callbacks.notify(note)
    prepared = prepared.with_config(config)
    folder, origin = _create_run(config, prepared.parent)
    wanted = Path(config.out) / config.name
    if folder != wanted:
        callbacks.notify(f"run           {folder} ({wanted} exists)")
    mirror = None
    try:
        if config.routing.schedule is not None:
            digests.write_files(
                folder, {run_folders.SCHEDULE: documents.read_bytes(Path(config.routing.schedule), SCHEDULE_BYTES)}
            )
            prepared = prepared.with_config(on_schedule(config, (folder / run_folders.SCHEDULE).absolute()))
        mirror = mirror_of(config, folder, again)
        with run_folders.lock_for_training(folder):
            return _lead(replace(prepared, parent=None), folder, origin, mirror, callbacks)
    except (UserError, OSError, MemoryError) as error:
        if not run_folders.has_trained(folder):
            if mirror is not None:
                mirror.release(folder)
            run_folders.remove(folder)
            if isinstance(error, UserError):
                error.folder = None
        raise


def _create_run(config: RunConfig, parent: WeightsFile | None) -> tuple[Path, Origin]:
    """Create the folder of a new run, unless its weights cannot be read; return the folder and its origin."""
    if parent is None:
        return run_folders.create(config), START
    origins: list[Origin] = []
    folder = run_folders.create_filled(config, lambda made: origins.append(branch_off(parent, made, config)))
    return folder, origins[0]


def _folder(run: Recipe, changes: Settings, notify: Notify) -> Path:
    """Return the folder of the run to resume: given, the newest of a recipe, or fetched from a ``checkpoint.store``."""
    if isinstance(run, str) and is_url(run):
        store, _, name = run.rstrip("/").rpartition("/")
        return Mirror(store, name).fetch(Path(str(changes.get("out", "runs"))), MIRRORED, notify)
    if isinstance(run, RunConfig):
        raise UserError("resume=True: use the run's folder, or its recipe's name; a run resumes with its own recipe")
    if (Path(run) / run_folders.CONFIG).is_file() or not find(str(run)).is_file():
        return Path(run)
    return run_folders.newest(
        configure(run, settings={name: changes[name] for name in changes.keys() & {"name", "out"}})
    )


def _resume(folder: Path, changes: Settings, checkpoint: str | None, callbacks: Callbacks, auto: bool) -> Run:
    """Resume a run from its newest or the named checkpoint; ``auto``: accept a run without steps left.

    A run whose workers still wait for a controller continues with them.
    """
    if has_supervisor(folder) and not run_folders.is_held(folder):
        given = changes if checkpoint is None else {**changes, "checkpoint": checkpoint}
        return _lead_waiting_workers(folder, given, callbacks)
    if checkpoint is None and (folder / run_folders.FOLLOWER).is_file():
        raise UserError(
            f"{folder}: another machine led this run last; resume it there, or from its checkpoint.store "
            "(--resume URL/NAME --out DIR), or from a checkpoint of this folder (--checkpoint NAME)"
        )
    changes = resumed_layers(folder, changes, callbacks.notify, callbacks.stopped)
    resumption = resumption_of(folder, changes, checkpoint, callbacks.notify)
    saved = resumption.saved
    if not resumption.done:
        return _train_on(folder, resumption, callbacks)
    unexported = saved is not None and saved.whole and not (folder / MODEL).exists()
    if unexported and (auto or not changes):  # it was killed before its export
        with run_folders.lock_for_training(folder):
            DiskReserve(folder).release()
            conclude(resumption.config, folder, callbacks.notify)
        return require_complete(folder)
    steps = resumption.config.train.steps
    done = f"{folder}: all {steps} steps are done; train longer with --train.steps {2 * steps}"
    if not auto:
        raise UserError(done)
    callbacks.notify(done)
    return Run(folder)


def _lead_waiting_workers(folder: Path, changes: Settings, callbacks: Callbacks) -> Run:
    """Lead the living workers of a run whose controllers were lost; UserError if a setting would change."""
    if changes:
        raise UserError(
            f"{folder}: its workers still wait, and continue with the settings that they have; resume it without "
            f"--{next(iter(changes))}, or wait until they end (fleet.orphan_s)"
        )
    return stand_by(folder, callbacks) or Run(folder)


def _train_on(folder: Path, resumption: Resumption, callbacks: Callbacks) -> Run:
    """Train the steps that are left."""
    config, saved, origin = resumption.config, resumption.saved, resumption.origin
    prepared = prepare(config, callbacks.data_notify, begins=False, samples=origin.total_samples(config))
    require_same_data(folder, prepared)
    for line in prepared.notes:
        callbacks.notify(line)
    parent = starting_weights(config) if saved is None and origin.recalled is None else None
    mirror = mirror_of(config, folder)
    with run_folders.lock_for_training(folder):
        given, kept = config.routing.schedule, (folder / run_folders.SCHEDULE).absolute()
        if given is not None and Path(given) != kept:
            digests.write_files(folder, {run_folders.SCHEDULE: documents.read_bytes(Path(given), SCHEDULE_BYTES)})
            prepared = prepared.with_config(on_schedule(config, kept))
        resumption.store.discard_unfinished()
        if saved is not None:
            resumption.store.set_aside_after(saved)
        if parent is not None:
            origin = replace(branch_off(parent, folder, config), generation=origin.generation)
        return _lead(prepared, folder, origin, mirror, callbacks)


def _lead(prepared: PreparedRun, folder: Path, origin: Origin, mirror: Mirror | None, callbacks: Callbacks) -> Run:
    """Train in ``folder``, whose lock the caller holds.

    :raises LeadershipLost: if another machine leads the run, and this one is not one of ``fleet.standby_at``.
    """
    try:
        return RunExecution(prepared, folder, origin, mirror, callbacks).execute()
    except LeadershipLost as lost:
        return stand_by_again(lost, prepared.config, folder, callbacks)


def _discard(line: str) -> None:
    del line
