"""Train a recipe or resume its run, then report and export it: the function behind ``planaria train``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Literal

from planaria.common import digests, documents
from planaria.common.errors import LedgerError, RunStopped, UserError
from planaria.common.filesystems import is_url
from planaria.config.consent import allowing
from planaria.config.registry import blame
from planaria.config.schema import RunConfig
from planaria.config.shipped import find
from planaria.control.decisions import Finish
from planaria.control.logs import EVENTS, ID, identity, read_run
from planaria.control.segments import Reserve
from planaria.control.statefile import STATE
from planaria.models.families import family
from planaria.models.foreign import Weights
from planaria.planner.schedule import MAX_BYTES as SCHEDULE_BYTES
from planaria.report.live.listener import Listener, Step
from planaria.report.live.progress import Progress, Quiet
from planaria.report.live.settings import settings as told_settings
from planaria.report.live.trackers import trackers
from planaria.report.live.watch import About, Watch
from planaria.report.run.ledger import require_exactly_once
from planaria.report.run.report import write_report
from planaria.report.run.summary import summary
from planaria.runtime.checkpoint.mirror import Mirror, mirrored
from planaria.runtime.complete import complete
from planaria.runtime.configuration import Recipe, Settings, configure, named
from planaria.runtime.engine import fleet, runs
from planaria.runtime.engine.branch import branch_off, starting_weights
from planaria.runtime.engine.origin import START, Origin
from planaria.runtime.engine.own_classes import own_classes
from planaria.runtime.engine.prepare import Prepared, on_schedule, prepare
from planaria.runtime.engine.profiling import sized, sized_anew
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.resumption import require_same_data, take_up
from planaria.runtime.engine.stopping import REQUEST
from planaria.runtime.engine.worker_log import last_error
from planaria.runtime.foreign import export_run
from planaria.runtime.run import MODEL, Run

_OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory")
Say = Callable[[str], None]
Beside = Callable[[Path], AbstractContextManager[object]]
"""what is to go on beside a run while it is trained, given its folder"""
MIRRORED = dict.fromkeys((*runs.KEPT, ID, STATE, digests.FILE), SCHEDULE_BYTES) | {EVENTS: 1 << 40}
"""of a run's folder, what goes into a store with its checkpoints, and how many bytes of each are fetched from there"""


@dataclass(frozen=True)
class Listening:
    """Who hears of a run, and who may stop it."""

    progress: bool
    say: Say
    on_step: Callable[[Step], object] | None
    stop: Event | None
    beside: Beside = nullcontext

    def stopped(self) -> bool:
        """Is the run to stop at a whole step?"""
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
    say: Say | None = None,
    beside: Beside | None = None,
    settings: Settings | None = None,
    allow_code: bool = False,
    **short: object,
) -> Run:
    """Train a recipe: what ``planaria train`` does, with the same engines, folder, report and exported model.

    :param recipe: a recipe's name or file, or a configuration; with ``resume``, a run's folder, or the name or file of
        a recipe whose newest run is meant.
    :param resume: train on where that run stopped, with its own configuration and the given settings laid over it;
        ``"auto"``: if :func:`begun` finds a run of that recipe, and begin one otherwise. It is no mistake if all steps
        are done.
    :param checkpoint: of the run that is resumed, one that is not the newest, such as ``"step-00000050"``.
    :param on_step: hears of every committed step. What it raises stops the run at a whole step, and comes back from
        here once everything is saved.
    :param stop: an event that stops the run at a whole step when it is set, from any thread; the run then is returned.
        In the main thread Ctrl-C (a notebook's interrupt) and SIGTERM do the same, but end in RunStopped; another
        thread hears no signals.
    :param progress: show a bar on a terminal, and lines elsewhere.
    :param say: hears notes and results, line by line; ``print`` with ``progress``, and otherwise nobody, unless given.
    :param beside: what goes on beside the run while it is trained: is given its folder, and entered once that is there.
    :param settings: dotted name → value, as in :func:`planaria.configure`; ``short`` are the same by their last word.
    :param allow_code: import modules that the recipe, or the resumed run, names as ``module:Class``, which runs their
        code. Modules that the program has imported itself are always permitted.
    :raises UserError: before any worker starts, when something that was given is wrong; later when the run failed.
    :raises RunStopped: when it ended early for a reason that is nobody's mistake; ``folder`` says what to resume.
        Its subclass LedgerError: when all steps were made, but samples were lost or used twice.
    """
    told = Listening(progress, say or (print if progress else _nobody), on_step, stop, beside or nullcontext)
    if checkpoint is not None and resume is not True:
        raise UserError(f"checkpoint = {checkpoint!r}: goes with resume=True")
    auto, run = resume == "auto", recipe
    with allowing(allow_code):
        if not resume or auto:
            config = configure(recipe, settings=settings, **short)
            if not (auto and (run := begun(config))):
                return _begin(config, told, auto)
            if is_url(run):
                runs.set_aside(Path(config.out) / config.name, told.say)
        changes = named(settings, short)
        return _resume(_folder(run, changes, told.say), changes, checkpoint, told, auto)


def begun(config: RunConfig) -> str:
    """Where there is a run of this name: its folder in ``out``, or its URL in ``checkpoint.store`` if there is no such
    folder, or only an older state of the run, of when this machine had it last; empty if there is none.

    :raises UserError: when the store cannot be reached.
    """
    folder, store = Path(config.out) / config.name, config.checkpoint.store
    mirror = None if store is None else Mirror(store, config.name)
    if folder.exists():
        return mirror.url if mirror is not None and mirror.ahead(folder) else str(folder)
    return mirror.url if mirror is not None and mirror.newest() else ""


def _begin(config: RunConfig, told: Listening, again: bool) -> Run:
    """Train a new run, in its own folder; ``again``: it may have been started before, and lost.

    If the start fails, the folder is removed, so that the next attempt gets the same name.
    """
    trackers(config.observe)
    prepared = prepare(config, told.of_data)
    for line in prepared.notes:
        told.say(line)
    config = sized(config, prepared.dataset, told.say, told.stopped)
    prepared = prepared.with_config(config)
    folder, origin = _created(config, prepared.parent)
    mirror = None
    try:
        if config.routing.schedule is not None:
            digests.put(folder, {runs.SCHEDULE: documents.data(Path(config.routing.schedule), SCHEDULE_BYTES)})
            prepared = prepared.with_config(on_schedule(config, (folder / runs.SCHEDULE).absolute()))
        mirror = _mirror(config, folder, again)
        with runs.held(folder):
            return _train(replace(prepared, parent=None), folder, origin, mirror, told)
    except (UserError, OSError, MemoryError) as error:
        if not runs.has_trained(folder):
            if mirror is not None:
                mirror.release(folder)
            runs.remove(folder)
            if isinstance(error, UserError):
                error.folder = None
        raise


def _created(config: RunConfig, parent: Weights | None) -> tuple[Path, Origin]:
    """The folder of a new run, and where it takes up; there is none when its first weights cannot be read."""
    if parent is None:
        return runs.create(config), START
    origins: list[Origin] = []
    folder = runs.create_filled(config, lambda made: origins.append(branch_off(parent, made, config)))
    return folder, origins[0]


def _folder(run: Recipe, changes: Settings, say: Say) -> Path:
    """The run to resume: that folder, or the newest of a recipe, or one that is fetched from a ``checkpoint.store``."""
    if isinstance(run, str) and is_url(run):
        store, _, name = run.rstrip("/").rpartition("/")
        return Mirror(store, name).fetch(Path(str(changes.get("out", "runs"))), MIRRORED, say)
    if isinstance(run, RunConfig):
        raise UserError("resume=True: give the run's folder, or its recipe's name; a run goes on with its own recipe")
    if (Path(run) / runs.CONFIG).is_file() or not find(str(run)).is_file():
        return Path(run)
    return runs.newest(configure(run, settings={name: changes[name] for name in changes.keys() & {"name", "out"}}))


def _resume(folder: Path, changes: Settings, checkpoint: str | None, told: Listening, auto: bool) -> Run:
    """Train on where a run stopped, or from the named checkpoint of it; ``auto``: unless all its steps are done."""
    changes = sized_anew(folder, changes, told.say, told.stopped)
    there = take_up(folder, changes, checkpoint, told.say)
    config, saved, origin = there.config, there.saved, there.origin
    unexported = saved is not None and saved.whole and not (folder / MODEL).exists()
    if there.done and unexported and (auto or not changes):
        with runs.held(folder):  # it was killed between its last step and its export
            Reserve(folder).release()
            _conclude(config, folder, told.say)
        return _proved(folder)
    if there.done:
        steps = config.train.steps
        done = f"{folder}: all {steps} steps are done; give more with --train.steps {2 * steps}"
        if not auto:
            raise UserError(done)
        told.say(done)
        return Run(folder)
    prepared = prepare(config, told.of_data, begins=False, samples=origin.samples_in_all(config))
    require_same_data(folder, prepared)
    for line in prepared.notes:
        told.say(line)
    parent = starting_weights(config) if saved is None and origin.recalled is None else None
    mirror = _mirror(config, folder)
    with runs.held(folder):
        given, kept = config.routing.schedule, (folder / runs.SCHEDULE).absolute()
        if given is not None and Path(given) != kept:
            digests.put(folder, {runs.SCHEDULE: documents.data(Path(given), SCHEDULE_BYTES)})
            prepared = prepared.with_config(on_schedule(config, kept))
        there.store.discard_unfinished()
        if saved is not None:
            there.store.set_aside_after(saved)
        if parent is not None:
            origin = replace(branch_off(parent, folder, config), generation=origin.generation)
        return _train(prepared, folder, origin, mirror, told)


def _mirror(config: RunConfig, folder: Path, again: bool = False) -> Mirror | None:
    """Where checkpoints of the run in ``folder`` are kept beside it; None where the recipe names no such place.

    :raises UserError: when it cannot be written to, or holds another run of that name.
    """
    if config.checkpoint.store is None:
        return None
    mirror = Mirror(config.checkpoint.store, folder.name)
    mirror.claim(folder, again)
    return mirror


def _train(prepared: Prepared, folder: Path, origin: Origin, mirror: Mirror | None, told: Listening) -> Run:
    """Train in ``folder``, which the caller holds; then tell how it went."""
    config, before = prepared.config, runs.log_size(folder)
    told_too = trackers(config.observe)
    runs.keep(folder, config, prepared.dataset, prepared.trace)
    display = Progress() if told.progress else Quiet()
    listener = None if told.on_step is None else Listener(display, told.on_step)
    about = About(identity(folder), told_settings(config)) if told_too else None
    watch = Watch(folder, config.samples * config.model.context, listener or display, told_too, about)

    def asked() -> bool:
        return told.stopped() or (listener is not None and listener.error is not None)

    try:
        with mirrored(mirror, folder, MIRRORED, told.say), told.beside(folder):
            ending = _engine(prepared, folder, watch, origin, asked)
    finally:
        watch.close()
    if ending.outcome == "finished":
        _conclude(config, folder, told.say)
    elif ending.outcome != "stopped" and not runs.has_trained(folder, before):
        raise UserError("; ".join(filter(None, (ending.reason, last_error(folder, watch.lost)))))
    else:
        told.say(f"report        {_report(folder)}")
        told.say(f"workers' logs {folder / 'workers'}\ngo on with    planaria train --resume {folder}")
    if listener is not None and listener.error is not None:
        raise listener.error
    if ending.outcome == "finished" or ending.reason == REQUEST:
        return _proved(folder)
    wrong: UserError | RunStopped
    if ending.outcome == "failed" or watch.trouble:
        wrong = UserError(ending.reason)
    else:
        said = f"stopped by {ending.reason}" if ending.outcome == "stopped" else ending.reason
        wrong = RunStopped("; ".join(filter(None, (said, ending.detail, _remedy(prepared.run, ending)))))
    wrong.folder = folder
    raise wrong


def _proved(folder: Path) -> Run:
    """The run, once its log shows that every sample was used exactly once.

    :raises LedgerError: when it does not.
    """
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


def _engine(prepared: Prepared, folder: Path, watch: Watch, origin: Origin, asked: Callable[[], bool]) -> Finish:
    """Run the engine of the recipe until the run ends.

    :raises UserError: if the run cannot start, or there is not enough memory.
    """
    config = prepared.config
    try:
        return fleet.train(prepared, folder, watch, origin, asked)
    except (OSError, MemoryError, UserError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            raise UserError(f"out of memory: {error}; choose a smaller model or microbatch") from error
        if not (said := blame(error, own_classes(config))):
            raise
        return Finish(outcome="failed", reason=said)


def _conclude(config: RunConfig, folder: Path, say: Say) -> None:
    """Tell what a finished run came to, then write down what can be written.

    :raises UserError: when the model cannot be exported; it is trained, and safe in its checkpoint.
    """
    for line in summary(read_run(folder)):
        say(line)
    whole = family(config.model).whole
    if config.prompt:
        none = f"none: model.family = {config.model.family!r} completes no texts"
        say(f"completion    {complete(folder, config.prompt) if whole else none}")
    say(f"report        {_report(folder)}")
    if not whole:
        say(f"model         {runs.newest_whole(folder).folder}, stage by stage")
        return
    if (folder / MODEL).exists():  # of an earlier part of the run
        shutil.rmtree(folder / MODEL)
    try:
        model = export_run(folder, folder / MODEL)
    except UserError as error:
        mend = f"planaria export {folder} --to {folder / MODEL}"
        raise UserError(f"{error}: the run is finished and saved; when that is mended, `{mend}`") from error
    say(f"model         {model}")


def _report(folder: Path) -> str:
    """The report's path, or why there is none: a full disk must not hide how the run itself ended."""
    try:
        return str(write_report(folder))
    except UserError as error:
        return f"none: {error}"


def _nobody(line: str) -> None:
    del line
