"""``planaria join``: add this machine to a live run."""

from __future__ import annotations

import re
from pathlib import Path

from planaria.common.errors import UserError
from planaria.runtime.engine import runs
from planaria.runtime.engine.fleet import PRELOAD
from planaria.runtime.engine.join import AddressEntrance, Entrance, FolderEntrance, Offer, join
from planaria.runtime.fleet.joining import MAX_WORKERS
from planaria.runtime.fleet.spawner import fork_server
from planaria.runtime.transport.address import REACHABLE, Reach

_ADDRESS = re.compile(r"([^/\s:]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


def lend(
    target: str,
    key: Path | None,
    workers: int | None,
    patience_s: float | None,
    reach: Reach = REACHABLE,
    cache: Path | None = None,
) -> None:
    """Give the run at ``target``, its folder or HOST:PORT, so many workers, or as many as one replica has, until it is
    over or Ctrl-C. One that does not answer is called for ``patience_s``; unless given, for a minute if it has
    answered before.

    :raises UserError: when there is no such run under way, or it cannot be joined from here.
    :raises RunStopped: when the run has not answered for ``patience_s``.
    """
    entrance = _entrance(target, key)
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise UserError(f"--workers {workers}: give 1 to {MAX_WORKERS}")
    if reach.ports is not None and not 1 <= reach.ports[0] <= reach.ports[1] <= 65535:
        raise UserError(f"--ports {reach.ports[0]} {reach.ports[1]}: give the first and the last, from 1 to 65535")
    fork_server(PRELOAD)
    patience = (60.0, 0.0) if patience_s is None else (patience_s, patience_s)
    join(entrance, Offer(workers or 0, *patience, reach, cache), lambda line: print(line, flush=True))


def _entrance(target: str, key: Path | None) -> Entrance:
    address = _ADDRESS.fullmatch(target)
    if address is not None and not Path(target).exists():
        if int(address[2]) not in range(1, 65536):
            raise UserError(f"join {target}: {address[2]} is no port; it is the run's fleet.port")
        if key is None:
            raise UserError(
                f"join {target}: give --key-file, a copy of the run's door.json or of the file that its fleet.key names"
            )
        return AddressEntrance(target, key)
    folder = Path(target)
    if key is not None:
        raise UserError(f"join {target} --key-file {key}: a key goes with HOST:PORT; the run's folder has its own")
    runs.config_of(folder)
    return FolderEntrance(folder, lambda: not runs.is_held(folder))
