"""``planaria join``: add this machine to a live run, wait to lead it, or hold its log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from planaria.cli.flags import command, flag, reject_flags, switch
from planaria.common.errors import UserError
from planaria.config.durations import seconds

if TYPE_CHECKING:
    from planaria.runtime.engine.machine_service import RunAccess

PATIENCE = (
    "how long to retry a run that does not answer, such as 90 or 5min (default: 60 s once it has answered, 0 before)"
)
_ADDRESS = re.compile(r"([^/\s:]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


@command("join", lasting=True, forks=True)
def _join(
    run: Annotated[str, Argument(metavar="RUN", help="the run's folder, or HOST:PORT of its controller")],
    *,
    key_file: Annotated[Path | None, flag("FILE", "with HOST:PORT: a copy of the run's key")] = None,
    workers: Annotated[int | None, flag("N", "worker processes (default: enough for one replica)")] = None,
    patience: Annotated[float | None, flag("S", PATIENCE, parser=seconds)] = None,
    advertise: Annotated[
        str, flag("HOST", "name or address under which others find this machine", show_default=False)
    ] = "",
    ports: Annotated[
        tuple[int, int] | None, flag("FIRST LAST", "where its workers listen (default: any free port)")
    ] = None,
    no_inbound: Annotated[bool, switch("--no-inbound", "other machines cannot connect to this one")] = False,
    cache: Annotated[Path | None, flag("DIR", "cache for files of a run whose folder it does not see")] = None,
    ray: Annotated[
        str,
        flag("ADDRESS", "add nodes of this Ray cluster (auto, HOST:PORT) instead of this machine", show_default=False),
    ] = "",
    machines: Annotated[int, flag("N", "with --ray: how many")] = 1,
    gpus: Annotated[float, flag("N", "with --ray: GPUs of each")] = 0.0,
    standby: Annotated[
        bool, switch("--standby", "add no workers: wait until the run's controller is lost, then lead the run")
    ] = False,
    at: Annotated[
        str, flag("HOST:PORT", "with --standby on another machine: where it leads; RUN is LOG/NAME", show_default=False)
    ] = "",
    hold: Annotated[
        str,
        flag("HOST:PORT", "add no workers: hold the log of a run (quorum://HOLDERS/NAME) here", show_default=False),
    ] = "",
) -> int:
    """Add this machine to a live run, until Ctrl-C; or wait to lead the run, or hold its log."""
    own = {"advertise": advertise or None, "ports": ports, "no-inbound": no_inbound or None}
    of_workers = {"workers": workers, "patience": patience, "cache": cache, "ray": ray or None} | own
    if hold:
        return _hold(run, hold, key_file, of_workers | {"standby": standby or None, "at": at or None})
    if standby:
        return _stand_by(run, at, key_file, of_workers)
    if at:
        raise UserError(f"--at {at}: is for a standby; add --standby, or remove it")
    from planaria.runtime.fleet.joining import MAX_WORKERS

    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise UserError(f"--workers {workers}: use 1 to {MAX_WORKERS}")
    retry_s = (60.0, 0.0) if patience is None else (patience, patience)  # once it has answered, and before
    if ray:
        reject_flags(own, "has no effect with --ray; remove it")
        return _add_nodes(ray, machines, gpus, run, key_file, workers, retry_s, cache)
    if machines != 1 or gpus:
        raise UserError("--machines and --gpus are for nodes of a Ray cluster; add --ray ADDRESS, or remove them")
    if ports is not None and not 1 <= ports[0] <= ports[1] <= 65535:
        raise UserError(f"--ports {ports[0]} {ports[1]}: use the first and the last port, from 1 to 65535")
    from planaria.common.address import Reach
    from planaria.runtime.engine.machine_service import MachineOptions, join
    from planaria.runtime.engine.run_fleet import PRELOAD
    from planaria.runtime.fleet.spawner import fork_server

    access = _access(run, key_file)
    fork_server(PRELOAD)
    reach = Reach(advertise=advertise, reachable=not no_inbound, ports=ports)
    join(access, MachineOptions(workers or 0, *retry_s, reach, cache), _print)
    return 0


def _stand_by(run: str, at: str, key: Path | None, of_workers: Mapping[str, object]) -> int:
    """Wait until the run's controller is lost, then lead the run; no flag of workers is valid."""
    reject_flags(of_workers, "has no effect with --standby, which adds no workers; remove it or --standby")
    if key is not None and not at:
        raise UserError(f"join {run} --standby --key-file {key}: add --at HOST:PORT, where this machine leads the run")
    from planaria.group.lead import CANDIDATES
    from planaria.runtime.api.execution import Callbacks
    from planaria.runtime.fleet.joining import read_key
    from planaria.runtime.preparation import run_folders
    from planaria.runtime.standby import local_standby
    from planaria.runtime.standby.remote_standby import stand_by_elsewhere

    callbacks = Callbacks(True, print, None, None)
    if key is not None:
        read_key(key)
        stand_by_elsewhere(run, at, key, callbacks, CANDIDATES)
        return 0
    if at:
        raise UserError(f"join {run} --standby --at {at}: pass --key-file, a copy of the run's fleet.key file")
    if not (Path(run) / run_folders.CONFIG).exists():
        raise UserError(
            f"join {run} --standby: not the folder of a run; on another machine, RUN is LOG/NAME (LOG is "
            "the run's fleet.shared_log): add --at HOST:PORT and --key-file FILE"
        )
    local_standby.stand_by(Path(run), callbacks)
    return 0


def _hold(run: str, at: str, key: Path | None, others: Mapping[str, object]) -> int:
    """Hold the log of a run until Ctrl-C; no other flag is valid. Imports no torch."""
    reject_flags(others, "has no effect with --hold, which starts no workers and no standby; remove it")
    if key is None:
        raise UserError(f"join {run} --hold {at}: pass --key-file, the run's fleet.key; created if missing")
    from planaria.runtime.shared_log.holder import hold

    hold(run, at, key, _print)
    return 0


def _add_nodes(
    cluster: str, machines: int, gpus: float, target: str, key: Path | None, workers: int | None,
    retry_s: tuple[float, float], cache: Path | None,
) -> int:  # fmt: skip
    """Add ``machines`` actors of a Ray cluster to the run at ``target``, HOST:PORT of its controller.

    :raises UserError: if one cannot join.
    """
    from planaria.runtime.engine.machine_service import AddressAccess, KnownRunAccess, MachineOptions, serve_as_child
    from planaria.runtime.engine.run_fleet import PRELOAD
    from planaria.runtime.fleet.joining import RunAddress, read_key

    access = _access(target, key)
    if not isinstance(access, AddressAccess):
        raise UserError(f"join {target} --ray {cluster}: use HOST:PORT of the controller, which the nodes can reach")
    if workers is None:
        raise UserError(f"join {target} --ray {cluster}: pass --workers, the number of workers of each machine")
    if machines < 1:
        raise UserError(f"--machines {machines}: use 1 or more")
    if gpus < 0:
        raise UserError(f"--gpus {gpus:g}: use 0 or more")
    from planaria.runtime.fleet.ray_machines import join_nodes

    known = KnownRunAccess(target, access.key, RunAddress(at=target, key=read_key(access.key).hex()))
    serve = partial(serve_as_child, known, MachineOptions(workers, *retry_s, cache=cache))
    resources = {"num_cpus": workers, "num_gpus": gpus}
    join_nodes(cluster, f"planaria-{target}", machines, resources, serve, PRELOAD, _print)
    return 0


def _print(line: str) -> None:
    print(line, flush=True)


def _access(target: str, key: Path | None) -> RunAccess:
    from planaria.control.log.quorum import SCHEME
    from planaria.runtime.engine.machine_service import AddressAccess, FolderAccess
    from planaria.runtime.preparation import run_folders

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
