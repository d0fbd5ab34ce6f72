"""Files that a machine needs before its workers start: in the run's folder, or fetched from the controller.

Fetched files are in the machine's cache: token shards, which are reused by later runs; the schedule; and the logs of
its workers. Parts of checkpoints go to the controller (``runtime/worker/checkpoint_writer.py``).
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from planaria.common.cache import cache_folder, hold_lock
from planaria.common.errors import UserError
from planaria.common.stdio import Notify
from planaria.data.dataset import CorruptDataset, open_data, parts_of
from planaria.runtime.custom_classes import custom_classes
from planaria.runtime.fleet.base import Workplace
from planaria.runtime.fleet.files import Files
from planaria.runtime.fleet.joining import read_run_address
from planaria.runtime.preparation import run_folders
from planaria.runtime.worker import process
from planaria.runtime.worker.setup import DATA, RUN, Setup

JOINED = "joined"
"""subfolder of the cache for the runs that a machine joined"""


def local_workplace(
    setup: Setup, cwd: Path, cache: Path | None, notify: Notify, address: str, machine: str
) -> Workplace:
    """Return the workplace of this machine's workers; ``machine``: its name in the run.

    A :data:`planaria.runtime.fleet.base.PrepareWorkplace`. ``cwd``: the controller's working directory, for relative
    paths. The other arguments are those of :func:`provide_setup`.

    :raises UserError: if a class that the recipe names cannot be imported, or the run's files are unavailable.
    """
    _require_classes(setup)
    if _shares_run_folder(setup):
        return Workplace(partial(process.main, setup), cwd if cwd.is_dir() else setup.folder)
    fetched = provide_setup(setup, address, machine, cache, notify)
    return Workplace(partial(process.main, fetched), fetched.folder, fetched.scratch)


def _shares_run_folder(setup: Setup) -> bool:
    """Return whether this machine shares the run's folders, rather than others of the same path."""
    if not setup.folder_id:
        return False
    try:
        if read_run_address(setup.folder).folder_id != setup.folder_id:
            return False
        open_data(setup.dataset)
        return True
    except (UserError, OSError):
        return False


def provide_setup(setup: Setup, address: str, host: str, cache: Path | None, notify: Notify) -> Setup:
    """Return the setup for the workers of this machine, ``host`` in the run, after fetching their files.

    ``address``: HOST:PORT of the controller; ``cache``: this machine's, the user's unless given.

    :raises UserError: if a file cannot be fetched or stored.
    """
    # Absolute, since workers run in another directory.
    path, files = (cache or cache_folder()).absolute(), Files(address, setup.key)
    folder = path / JOINED / f"{setup.config.name}-{_digest(setup.key)}-{host}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dataset = _dataset(setup.dataset.name, path, files, notify)
        config = setup.config
        if config.routing.schedule is not None:
            files.fetch(f"{RUN}/{run_folders.SCHEDULE}", folder / run_folders.SCHEDULE)
            routing = config.routing.model_copy(update={"schedule": str(folder / run_folders.SCHEDULE)})
            config = config.model_copy(update={"routing": routing})
    except OSError as error:
        raise UserError(
            f"cannot store the run's files in {path} ({error}); free space, or set another --cache"
        ) from None
    return replace(setup, config=config, folder=folder, dataset=dataset, files=address)


def _dataset(name: str, path: Path, files: Files, notify: Notify) -> Path:
    """Return the prepared data ``name``, which identifies its content; fetch each of its folders once.

    :raises OSError: if they cannot be fetched or stored.
    """
    folder = _fetch_files(name, path, files, notify)
    for part in parts_of(folder):
        _fetch_files(part, path, files, notify)
    open_data(folder)
    return folder


def _fetch_files(name: str, path: Path, files: Files, notify: Notify) -> Path:
    """Return the prepared folder of a source or a mixture; fetch it if it is missing."""
    folder = path / name
    path.mkdir(parents=True, exist_ok=True)
    with hold_lock(path / f".{name}.lock", lambda: notify("waiting for another process that fetches this data")):
        with suppress(CorruptDataset):
            open_data(folder)
            return folder
        at = f"{DATA}/{name}"
        for file in sorted(
            files.names(at), key=lambda file: file == "meta.json"
        ):  # last, since it marks the folder as complete
            notify(f"fetching {file}")
            files.fetch(f"{at}/{file}", folder / file)
    return folder


def _require_classes(setup: Setup) -> None:
    """Raise UserError if a class that the recipe names cannot be imported here, or must not be; code is not sent."""
    try:
        custom_classes(setup.config)
    except UserError as error:
        raise UserError(f"this machine cannot use a class that the recipe names: {error}") from None


def _digest(key: bytes) -> str:
    """Return a suffix that distinguishes runs of one name without revealing the key."""
    return hashlib.sha256(b"planaria run " + key).hexdigest()[:8]
