"""Run folders: create a new one, and read an old one."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Protocol

from planaria.common import digests, documents
from planaria.common.atomic import refused
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.logs import EVENTS, not_a_run
from planaria.data.shards import Data
from planaria.faults.trace import Trace
from planaria.faults.trace import text as trace_text
from planaria.models.usage import Usage
from planaria.planner.schedule import MAX_BYTES as SCHEDULE_BYTES
from planaria.runtime.checkpoint.memory import MemoryFolder
from planaria.runtime.checkpoint.store import CheckpointStore, Saved

CONFIG, TOKENIZER = recipe.RUN, "tokenizer.json"
TRACE, DATA, SCHEDULE = "trace.json", "data.json", "schedule.json"
"""the faults of the run, what its token shards were made from, and its nodes and routes if it has a schedule"""
USAGE = "usage.json"
"""of the model that the run started from: what an export keeps of it, beside its weights"""
KEPT = (CONFIG, TOKENIZER, TRACE, DATA, SCHEDULE, USAGE)
"""what a run is, beside its checkpoints; its list of digests covers these"""


class Root(Protocol):
    """A recipe's root section, of a run or of a swarm."""

    @property
    def name(self) -> str: ...
    @property
    def out(self) -> str: ...
    def model_dump_json(self, *, indent: int | None = None) -> str: ...


def create(config: Root) -> Path:
    """A new folder for the run: ``out/name``, or ``out/name-2`` and so on when that is taken."""
    folder = _claimed(config)
    keep_config(folder, config)
    return folder


def create_filled(config: Root, fill: Callable[[Path], None]) -> Path:
    """As :func:`create`, with what ``fill`` puts into the folder, which appears when all is there."""
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".import-") as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            keep_config(made, config)
            fill(made)
            return made.rename(_claimed(config))
    except OSError as error:
        raise UserError(f"{refused(out, error)}; make room, or choose another folder with --out") from None


def _claimed(config: Root) -> Path:
    """An empty folder of a name that no other run has."""
    for number in count(1):
        folder = Path(config.out) / (config.name if number == 1 else f"{config.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another folder with --out") from None
        return folder
    raise AssertionError("unreachable")


def newest(config: Root) -> Path:
    """The folder that was made last for a run of this name; UserError when there is none."""
    folders = [Path(config.out) / config.name]
    while (further := Path(config.out) / f"{config.name}-{len(folders) + 1}").exists():
        folders.append(further)
    if not (folders[-1] / CONFIG).is_file():
        raise UserError(f"{folders[-1]}: not a run (no config.json); there is none of that name to go on with")
    return folders[-1]


def log_size(folder: Path) -> int:
    """Return the size of a run's log in bytes."""
    return (folder / EVENTS).stat().st_size if (folder / EVENTS).exists() else 0


def has_trained(folder: Path, since: int = 0) -> bool:
    """Return whether the run in ``folder`` began a step after its log had ``since`` bytes."""
    with suppress(FileNotFoundError), (folder / EVENTS).open("rb") as events:
        events.seek(since)
        return any(b'"kind":"run_step"' in line for line in events)
    return False


def remove(folder: Path) -> None:
    """Remove a run that never trained, so that the next attempt gets its name."""
    MemoryFolder(folder).remove()
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path, say: Callable[[str], None]) -> None:
    """Give a run's folder another name, if there is one: the run goes on from elsewhere.

    :raises UserError: when somebody trains it.
    """
    if not folder.exists():
        return
    other = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.older-{n}")).exists())
    with held(folder):
        folder.rename(other)
    say(f"{folder}: is older than what the store has; it is {other} now")


def keep(folder: Path, config: RunConfig, dataset: Data, trace: Trace) -> None:
    """Write down all that a later resumption, generation or export needs to know of how the run was started."""
    files = {
        CONFIG: config.model_dump_json(indent=2).encode(),
        TOKENIZER: dataset.tokenizer_file.read_bytes(),
        DATA: dataset.meta.model_dump_json(indent=2).encode(),
    }
    if config.chaos.trace is not None:
        files[TRACE] = trace_text(trace).encode()
    digests.put(folder, files)


def keep_plans(folder: Path, config: RunConfig, trace: Trace) -> None:
    """Write down the files that a recipe names and its run goes on with: faults and schedule."""
    files = {}
    if config.chaos.trace is not None:
        files[TRACE] = trace_text(trace).encode()
    if config.routing.schedule is not None:
        files[SCHEDULE] = documents.data(Path(config.routing.schedule), SCHEDULE_BYTES)
    digests.put(folder, files)


def keep_config(folder: Path, config: Root) -> None:
    """Write down the resolved configuration."""
    digests.put(folder, {CONFIG: config.model_dump_json(indent=2).encode()})


def require(folder: Path, *names: str) -> None:
    """UserError naming the first of a run's own files that is not as the run wrote it.

    The run of an older planaria, whose folder and checkpoints have no digests, is taken as it is.
    """
    sums = digests.read(folder)
    if sums:
        digests.require(folder, names, sums)
    elif any(saved.manifest.digests for saved in CheckpointStore(folder / "checkpoints").list()):
        mend = f"bring it back, or make it anew with `planaria accept {folder}`"
        raise UserError(f"{folder / digests.FILE}: is gone; {mend}")


def config_of(folder: Path, *further: str) -> RunConfig:
    """The configuration a run was last started with; data.tokenization is 'legacy' where the run is older than that.

    :raises UserError: when the folder is no run, or that or one of the ``further`` files is not as the run wrote it.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise not_a_run(folder)
    require(folder, CONFIG, *further)
    found = recipe.parse(documents.text(path), str(path))
    if "tokenization" in found.data.model_fields_set:
        return found
    return found.model_copy(update={"data": found.data.model_copy(update={"tokenization": "legacy"})})


def usage_of(folder: Path) -> Usage | None:
    """Return the usage of the model that a run started from; None if it started from the seed's weights.

    :raises UserError: when the file is not as the run wrote it.
    """
    require(folder, USAGE)
    return documents.model(folder / USAGE, Usage) if (folder / USAGE).is_file() else None


def newest_whole(folder: Path) -> Saved:
    """The newest checkpoint of a run that has every stage; UserError when there is none."""
    saved = CheckpointStore(folder / "checkpoints").newest(whole_only=True)
    if saved is None:
        raise UserError(f"{folder}: has no whole checkpoint yet; train on with `planaria train --resume {folder}`")
    return saved


def is_held(folder: Path) -> bool:
    """Is somebody training this run?"""
    try:
        with held(folder):
            return False
    except UserError:
        return True


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the run, so that nobody else trains it; UserError when somebody does."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: is being trained right now; stop that first, or start another run") from None
        yield
