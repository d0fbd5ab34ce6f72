"""Run folders: creation and reading."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Protocol

from planaria.common import digests, documents
from planaria.common.atomic import write_error
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.log.line_format import kind_of
from planaria.control.log.reader import EVENTS, not_a_run
from planaria.data.dialogues import training_template
from planaria.data.shards import Data
from planaria.faults.trace import Trace, trace_text
from planaria.models.model_metadata import ModelMetadata
from planaria.planner.schedule import MAX_BYTES as SCHEDULE_BYTES
from planaria.runtime.checkpoint.memory_folder import MemoryFolder
from planaria.runtime.checkpoint.store import CheckpointStore, SealedCheckpoint

CONFIG, TOKENIZER = recipe.RUN, "tokenizer.json"
TRACE, DATA, SCHEDULE = "trace.json", "data.json", "schedule.json"
"""the run's faults, the source of its token shards, and its nodes and routes if it has a schedule"""
MODEL_METADATA = "usage.json"
"""usage metadata of the model that the run started from, for exports"""
RUN_FILES = (CONFIG, TOKENIZER, TRACE, DATA, SCHEDULE, MODEL_METADATA)
"""files that define a run, besides its checkpoints; covered by its list of digests"""
SHARED_FILES = (*RUN_FILES, digests.FILE)
"""files that another machine needs to lead the run"""


class RootSection(Protocol):
    """The root section of a recipe, of a run or a swarm."""

    @property
    def name(self) -> str: ...
    @property
    def out(self) -> str: ...
    def model_dump_json(self, *, indent: int | None = None) -> str: ...


def create(config: RootSection) -> Path:
    """Create a folder for the run: ``out/name``, or ``out/name-2`` and so on if that exists."""
    folder = _claim_folder(config)
    write_config(folder, config)
    return folder


def create_filled(config: RootSection, fill: Callable[[Path], None]) -> Path:
    """Create a run folder filled by ``fill``; it appears atomically."""
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".import-") as temporary:
            unfinished = Path(temporary) / "made"
            unfinished.mkdir()
            write_config(unfinished, config)
            fill(unfinished)
            return unfinished.rename(_claim_folder(config))
    except OSError as error:
        raise UserError(f"{write_error(out, error)}; make room, or choose another folder with --out") from None


def _claim_folder(config: RootSection) -> Path:
    for number in count(1):
        folder = Path(config.out) / (config.name if number == 1 else f"{config.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"{folder} cannot be created ({error.strerror}); choose another folder with --out"
            ) from None
        return folder
    raise AssertionError("unreachable")


def newest(config: RootSection) -> Path:
    """Return the newest folder of a run of this name; UserError if there is none."""
    folders = [Path(config.out) / config.name]
    while (further := Path(config.out) / f"{config.name}-{len(folders) + 1}").exists():
        folders.append(further)
    if not (folders[-1] / CONFIG).is_file():
        raise UserError(f"{folders[-1]}: not a run (no config.json); no run of that name can be resumed")
    return folders[-1]


def log_size(folder: Path) -> int:
    """Return the size of a run's log in bytes."""
    return (folder / EVENTS).stat().st_size if (folder / EVENTS).exists() else 0


def has_trained(folder: Path, since: int = 0) -> bool:
    """Return whether the run in ``folder`` began a step after its log had ``since`` bytes."""
    with suppress(FileNotFoundError), (folder / EVENTS).open("rb") as events:
        events.seek(since)
        return any(kind_of(line) == "run_step" for line in events)
    return False


def remove(folder: Path) -> None:
    """Remove a run that never trained, to free its name."""
    MemoryFolder(folder).remove()
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path, notify: Callable[[str], None]) -> None:
    """Rename a run's folder, if it exists, because a newer copy replaces it.

    :raises UserError: if the run is being trained.
    """
    if not folder.exists():
        return
    aside = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.older-{n}")).exists())
    with lock_for_training(folder):
        folder.rename(aside)
    notify(f"renamed {folder} to {aside}: a newer copy of the run replaces it")


def write_run_files(folder: Path, config: RunConfig, dataset: Data, trace: Trace) -> None:
    """Write the files with which a run can be resumed or exported."""
    files = {
        CONFIG: config.model_dump_json(indent=2).encode(),
        TOKENIZER: dataset.tokenizer_file.read_bytes(),
        DATA: dataset.meta.model_dump_json(indent=2).encode(),
    }
    if config.chaos.trace is not None:
        files[TRACE] = trace_text(trace).encode()
    if (template := training_template(config.data)) is not None:
        metadata = model_metadata_of(folder) or ModelMetadata(context=config.model.context, ids={})
        usage = metadata.model_copy(update={"template": template.text})
        files[MODEL_METADATA] = usage.model_dump_json(indent=1).encode()
    digests.write_files(folder, files)


def write_plans(folder: Path, config: RunConfig, trace: Trace) -> None:
    """Write the faults and the schedule that a recipe names."""
    files = {}
    if config.chaos.trace is not None:
        files[TRACE] = trace_text(trace).encode()
    if config.routing.schedule is not None:
        files[SCHEDULE] = documents.read_bytes(Path(config.routing.schedule), SCHEDULE_BYTES)
    digests.write_files(folder, files)


def write_config(folder: Path, config: RootSection) -> None:
    """Write the resolved configuration."""
    digests.write_files(folder, {CONFIG: config.model_dump_json(indent=2).encode()})


def verify_digests(folder: Path, *names: str) -> None:
    """Raise UserError for the first of a run's files that was changed.

    A run of an older planaria, without digests, is not checked.
    """
    sums = digests.read(folder)
    if sums:
        digests.require(folder, names, sums)
    elif any(saved.manifest.digests for saved in CheckpointStore(folder / "checkpoints").list()):
        fix = f"restore it, or recreate it with `planaria run check {folder} --accept`"
        raise UserError(f"{folder / digests.FILE} is missing; {fix}")


def config_of(folder: Path, *further: str) -> RunConfig:
    """Return the configuration of the last start; ``data.tokenization`` is 'legacy' if the run is older than that
    setting.

    :raises UserError: if the folder is no run, or the configuration or a ``further`` file was changed.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise not_a_run(folder)
    verify_digests(folder, CONFIG, *further)
    config = recipe.parse(documents.read_text(path), str(path))
    if "tokenization" in config.data.model_fields_set:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenization": "legacy"})})


def model_metadata_of(folder: Path) -> ModelMetadata | None:
    """Return the usage metadata of the model that a run started from, or None without one.

    :raises UserError: if the file was changed.
    """
    verify_digests(folder, MODEL_METADATA)
    return documents.read_model(folder / MODEL_METADATA, ModelMetadata) if (folder / MODEL_METADATA).is_file() else None


def newest_whole(folder: Path) -> SealedCheckpoint:
    """Return a run's newest whole checkpoint; UserError if there is none."""
    saved = CheckpointStore(folder / "checkpoints").newest(whole_only=True)
    if saved is None:
        raise UserError(f"{folder} has no complete checkpoint yet; train on with `planaria train --resume {folder}`")
    return saved


def is_held(folder: Path) -> bool:
    """Return whether the run is being trained."""
    with (folder / LOCK).open("a+") as file:  # not signed: its holder is not this process
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def waiting_standbys(folder: Path) -> list[int]:
    """Return the processes of this machine that wait for the run's lock."""
    lock = (folder / LOCK).stat()
    entries = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    waiting = [int(entry[5]) for entry in entries if entry[1] == "->" and entry[6].endswith(f":{lock.st_ino}")]
    return [pid for pid in waiting if _has_open(pid, lock)]  # inodes of two file systems may be equal


def _has_open(pid: int, file: os.stat_result) -> bool:
    with suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.path.samestat(handle.stat(), file):
                    return True
    return False


LOCK = "lock"
"""locked by the process that leads the run, and holds its process id"""
FOLLOWER = ".standby"
"""marks the folder of a standby: another machine leads the run, or led it last"""


@contextmanager
def lock_for_training(folder: Path) -> Iterator[None]:
    """Lock the run for training; UserError if it is locked."""
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is being trained right now; stop that first, or start another run") from None
        with signed_lock(file):
            yield


@contextmanager
def signed_lock(file: IO[str]) -> Iterator[None]:
    """Keep this process's id in the run's lock, which it holds; later, another process may get that id."""
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    try:
        yield
    finally:
        file.truncate(0)
