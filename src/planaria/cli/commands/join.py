"""``planaria join``: add this machine to a live run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from planaria.common.address import REACHABLE, Reach
from planaria.common.errors import UserError
from planaria.control.log.quorum import SCHEME
from planaria.runtime.engine.machine_service import (
    AddressAccess,
    FolderAccess,
    KnownRunAccess,
    MachineOptions,
    RunAccess,
    join,
    serve_as_child,
)
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet.joining import MAX_WORKERS, RunAddress, read_key
from planaria.runtime.fleet.spawner import fork_server
from planaria.runtime.preparation import run_folders

_ADDRESS = re.compile(r"([^/\s:]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


def add_machine(
    target: str,
    key: Path | None,
    workers: int | None,
    patience_s: float | None,
    reach: Reach = REACHABLE,
    cache: Path | None = None,
) -> None:
    """Add this machine to the run at ``target``, a folder or HOST:PORT, until the run ends or Ctrl-C.

    :param workers: default: enough for one replica
    :param patience_s: seconds to retry a run that does not answer; default: 60 after it has answered once, else 0
    :raises UserError: if the run is not active, or cannot be joined from here.
    :raises RunStopped: if the run does not answer for ``patience_s``.
    """
    access = _access(target, key)
    _check_workers(workers)
    if reach.ports is not None and not 1 <= reach.ports[0] <= reach.ports[1] <= 65535:
        raise UserError(f"--ports {reach.ports[0]} {reach.ports[1]}: use the first and the last port, from 1 to 65535")
    fork_server(PRELOAD)
    join(access, MachineOptions(workers or 0, *_retry_durations(patience_s), reach, cache), _print)


def add_nodes(
    cluster: str, machines: int, gpus: float, target: str, key: Path | None, workers: int | None,
    patience_s: float | None, cache: Path | None,
) -> None:  # fmt: skip
    """Add ``machines`` actors of a Ray cluster to the run at ``target``, HOST:PORT of its controller.

    :raises UserError: if one cannot join.
    """
    access = _access(target, key)
    if not isinstance(access, AddressAccess):
        raise UserError(f"join {target} --ray {cluster}: use HOST:PORT of the controller, which the nodes can reach")
    if workers is None:
        raise UserError(f"join {target} --ray {cluster}: pass --workers, the number of workers of each machine")
    _check_workers(workers)
    if machines < 1:
        raise UserError(f"--machines {machines}: use 1 or more")
    if gpus < 0:
        raise UserError(f"--gpus {gpus:g}: use 0 or more")
    from planaria.runtime.fleet.ray_machines import join_nodes

    known = KnownRunAccess(target, access.key, RunAddress(at=target, key=read_key(access.key).hex()))
    serve = partial(serve_as_child, known, MachineOptions(workers, *_retry_durations(patience_s), cache=cache))
    resources = {"num_cpus": workers, "num_gpus": gpus}
    join_nodes(cluster, f"planaria-{target}", machines, resources, serve, PRELOAD, _print)


def _check_workers(workers: int | None) -> None:
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise UserError(f"--workers {workers}: use 1 to {MAX_WORKERS}")


def _retry_durations(seconds: float | None) -> tuple[float, float]:
    """Return how long to retry a run that has answered, and one that has not."""
    return (60.0, 0.0) if seconds is None else (seconds, seconds)


def _print(line: str) -> None:
    print(line, flush=True)


def stand_by(target: str, at: str, key: Path | None) -> None:
    """Wait until a run's controller is lost, then lead the run.

    :param target: the run's folder; with ``at``, its shared log
    :param at: HOST:PORT at which this machine leads; empty: it is the controller's machine
    :raises UserError: if the run cannot be led from here.
    """
    from planaria.runtime.api.execution import Callbacks
    from planaria.runtime.standby import local_standby
    from planaria.runtime.standby.remote_standby import stand_by_elsewhere

    if not at:
        if not (Path(target) / run_folders.CONFIG).exists():
            raise UserError(
                f"join {target} --standby: not the folder of a run; on another machine, RUN is LOG/NAME (LOG is "
                "the run's fleet.shared_log): add --at HOST:PORT and --key-file FILE"
            )
        local_standby.stand_by(Path(target), Callbacks(True, print, None, None))
        return
    if key is None:
        raise UserError(f"join {target} --standby --at {at}: pass --key-file, a copy of the run's fleet.key file")
    read_key(key)
    stand_by_elsewhere(target, at, key, Callbacks(True, print, None, None))


def _access(target: str, key: Path | None) -> RunAccess:
    address = _ADDRESS.fullmatch(target)
    if address is not None and not Path(target).exists():
        if int(address[2]) not in range(1, 65536):
            raise UserError(f"join {target}: {address[2]} is not a port; use the run's fleet.port")
        if key is None:
            raise UserError(f"join {target}: pass --key-file, a copy of the run's address.json or fleet.key")
        return AddressAccess(target, key)
    if target.startswith(SCHEME):
        raise UserError(
            f"join {target}: workers join at HOST:PORT of the controller; to hold the log here, add --hold HOST:PORT, "
            "or to lead the run, --standby --at HOST:PORT"
        )
    folder = Path(target)
    if key is not None:
        raise UserError(f"join {target} --key-file {key}: a key requires HOST:PORT; the run's folder has its own")
    run_folders.config_of(folder)
    return FolderAccess(folder, lambda: not run_folders.is_held(folder))
