"""Run folders: making a new one, and finding what an old one holds."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from planaria import recipe, whole
from planaria.chaos.trace import Trace
from planaria.chaos.trace import write as write_trace
from planaria.checkpoint.store import CheckpointStore, Saved
from planaria.config import RunConfig
from planaria.data.shards import Dataset
from planaria.errors import UserError
from planaria.swarm.config import SwarmConfig

TRACE, DATA, SCHEDULE = "trace.json", "data.json", "schedule.json"
"""the faults of the run, what its token shards were made from, and its nodes and routes if it has a schedule"""


def create(config: RunConfig | SwarmConfig) -> Path:
    """A new folder for the run: ``out/name``, or ``out/name-2`` and so on when that is taken."""
    for number in count(1):
        folder = Path(config.out) / (config.name if number == 1 else f"{config.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another folder with --out") from None
        keep_config(folder, config)
        return folder
    raise AssertionError("unreachable")


def keep(folder: Path, config: RunConfig, dataset: Dataset, trace: Trace) -> None:
    """Write down all that a later resumption, generation or export needs to know of how the run was started."""
    keep_config(folder, config)
    shutil.copyfile(dataset.tokenizer_file, folder / "tokenizer.json")
    (folder / DATA).write_text(dataset.meta.model_dump_json(indent=2))
    if config.chaos.trace is not None:
        write_trace(trace, folder / TRACE)


def keep_config(folder: Path, config: RunConfig | SwarmConfig) -> None:
    """Write down the resolved configuration."""
    whole.write_text(folder / "config.json", config.model_dump_json(indent=2))


def config_of(folder: Path) -> RunConfig:
    """The configuration a run was last started with; UserError when the folder is no run."""
    path = folder / "config.json"
    if not path.is_file():
        others = sorted(p.parent.name for p in folder.parent.glob("*/config.json")) if folder.parent.is_dir() else []
        mend = f"runs here: {', '.join(others)}" if others else "start one with `planaria train`"
        raise UserError(f"{folder}: not a run (no config.json); {mend}")
    return recipe.parse(path.read_text(), str(path))


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
