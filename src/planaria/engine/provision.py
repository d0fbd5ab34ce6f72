"""What a machine that joins by address needs before its workers start: the run's files, fetched from the controller.

They are kept below its cache: token shards, which stay for the next run on the same data; the schedule; and the logs of
its workers. Its parts of checkpoints go to the controller (``engine/stage_files.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planaria.config import DataConfig
from planaria.data.cache import cache_folder, locked
from planaria.data.shards import CorruptDataset, Dataset
from planaria.engine import runs
from planaria.engine.own_classes import own_classes
from planaria.engine.setup import DATA, RUN, Setup
from planaria.errors import UserError
from planaria.fleet.files import Files

JOINED = "joined"
"""folder of the cache in which machines keep what they have of the runs that they joined"""

Say = Callable[[str], None]


def provide(setup: Setup, address: str, host: str, cache: Path | None, say: Say) -> Setup:
    """The setup for the workers of this machine, ``host`` in the run, with all files that they need in place.

    ``address``: HOST:PORT of the controller; ``cache``: this machine's, the user's unless given.

    :raises UserError: when something cannot be fetched, kept or imported here.
    """
    _require_classes(setup)
    place, files = cache or cache_folder(DataConfig()), Files(address, setup.key)
    folder = place / JOINED / f"{setup.config.name}-{_digest(setup.key)}-{host}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dataset = _dataset(setup.dataset.name, place, files, say)
        config = setup.config
        if config.routing.schedule is not None:
            files.fetch(f"{RUN}/{runs.SCHEDULE}", folder / runs.SCHEDULE)
            routing = config.routing.model_copy(update={"schedule": str(folder / runs.SCHEDULE)})
            config = config.model_copy(update={"routing": routing})
    except OSError as error:
        raise UserError(
            f"cannot have the run's files in {place} ({error}); make room, or name another --cache"
        ) from None
    return replace(setup, config=config, folder=folder, dataset=dataset, files=address)


def _dataset(name: str, place: Path, files: Files, say: Say) -> Path:
    """The prepared token shards ``name``, a name that follows from what they were made of: fetched once.

    :raises OSError: when they cannot be fetched or kept.
    """
    folder = place / name
    place.mkdir(parents=True, exist_ok=True)
    with locked(place / f".{name}.lock", lambda: say("waiting for another process that fetches this data")):
        try:
            Dataset.open(folder)
            return folder
        except CorruptDataset:
            pass
        for file in sorted(files.names(DATA), key=lambda file: file == "meta.json"):  # which makes it whole, last
            say(f"fetching {file}")
            files.fetch(f"{DATA}/{file}", folder / file)
        Dataset.open(folder)
    return folder


def _require_classes(setup: Setup) -> None:
    """:raises UserError: when a class from outside planaria is not installed here: code is not sent."""
    try:
        own_classes(setup.config)
    except UserError as error:
        raise UserError(f"this machine lacks a class that the recipe names ({error}); install it here too") from None


def _digest(key: bytes) -> str:
    """What tells runs of one name apart, and tells nothing of the key."""
    return hashlib.sha256(b"planaria run " + key).hexdigest()[:8]
