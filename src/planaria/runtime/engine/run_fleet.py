"""The fleet of a run: its own workers, and the address that other machines join."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from planaria.common.address import Reach
from planaria.common.logs import from_environment
from planaria.config.names import WorkerId
from planaria.config.schema import FleetConfig, RunConfig
from planaria.control.failover import FailoverState
from planaria.control.state.run import RunState
from planaria.data.shards import Data
from planaria.models.families import make_family
from planaria.runtime.engine import link_survey_node
from planaria.runtime.engine.run_files import local_workplace
from planaria.runtime.fleet.base import Fleet, FleetWork, WorkerHost
from planaria.runtime.fleet.joinable_fleet import JoinableFleet, RunInvitation
from planaria.runtime.fleet.joining import read_or_create_key
from planaria.runtime.fleet.local import devices_here, worker_host
from planaria.runtime.fleet.supervised_fleet import SupervisedFleet, start_supervisor
from planaria.runtime.preparation.requirements import device_needs, require_answers
from planaria.runtime.preparation.run_folders import SCHEDULE
from planaria.runtime.transport.secure import new_key
from planaria.runtime.worker import process
from planaria.runtime.worker.setup import CHECKPOINTS, DATA, RUN, SETUP, Setup

log = logging.getLogger(__name__)
_RETURN_FACTOR, _MIN_RETURN_S = 3, 10.0
"""time for the return of machines: a multiple of ``fleet.lease_s``, and at least this many seconds"""
PRELOAD = [process.__name__, link_survey_node.__name__, "torch._dynamo"]
"""modules that workers are forked with; an optimizer's first step would import torch._dynamo, a CPU-second in each"""


def preload_for(config: RunConfig) -> list[str]:
    """Return the modules that a run's workers are forked with."""
    return [*PRELOAD, *make_family(config.model).modules_to_preload]


@dataclass(frozen=True)
class FleetRequest:
    """The fleet that a run needs."""

    config: RunConfig
    data: Data
    folder: Path
    workers: int
    """number of own workers"""
    offset: int = 0
    """first sample of block 0"""
    part: str = ""
    """name of this part of the run"""
    failover: FailoverState | None = None
    """lead the living workers of a lost controller, instead of starting some"""
    progress: bool = False
    """whether standbys show the run's progress"""

    @property
    def led_here(self) -> FailoverState | None:
        """The failover whose workers a supervisor on this machine owns."""
        return self.failover if self.failover is not None and not self.failover.elsewhere else None

    @property
    def returning(self) -> Mapping[str, Collection[WorkerId]]:
        """Machines of a controller that was lost with its own → their workers."""
        return returning_workers(self.failover.state) if self.failover is not None and self.failover.elsewhere else {}


@contextmanager
def open_fleet(request: FleetRequest) -> Iterator[JoinableFleet]:
    """Yield a run's fleet.

    :raises UserError: if the port is taken or the cluster is unsuitable.
    """
    config = request.config
    with worker_host(config.fleet, request.workers) as host:
        led = request.led_here
        surviving = SupervisedFleet(request.folder, led.state.term + 1, led.notice) if led is not None else None
        if surviving is None:
            key, folder_id = run_key(config), secrets.token_hex(16)
        else:
            key, folder_id = _decode_shared(surviving.shared)
        require_answers(config.fleet, key)
        setup = Setup(
            config, request.folder, request.data.folder, host.host, key, request.offset,
            Reach(advertise=config.fleet.advertise, ports=config.fleet.ports),
            part=request.part, folder_id=folder_id, log=from_environment(),
        )  # fmt: skip
        with closing(_open_joinable(request, host, setup, surviving)) as fleet:
            yield fleet


def return_s(fleet: FleetConfig) -> float:
    """Return the seconds in which the machines of a lost controller return to the next one."""
    return max(_MIN_RETURN_S, _RETURN_FACTOR * fleet.lease_s)


def first_machine(failover: FailoverState | None) -> int:
    """Return the number of the next machine that joins."""
    machines = () if failover is None else failover.state.machines
    return 1 + max([len(machines), *(int(name[1:]) for name in machines if name[1:].isdigit())])


def returning_workers(state: RunState) -> dict[str, list[WorkerId]]:
    """Return the joined machines → living workers that a new controller expects to return."""
    returning: dict[str, list[WorkerId]] = {name: [] for name, machine in state.machines.items() if machine.workers}
    for name, worker in state.workers.items():
        if worker.host and worker.status not in ("dead", "starting"):
            returning.setdefault(worker.host, []).append(WorkerId(name, worker.incarnation))
    return returning


def run_key(config: RunConfig) -> bytes:
    """Return the run's key: from the file that the recipe names, or a new one.

    :raises UserError: if the file cannot be read or created, or has no key.
    """
    return new_key() if config.fleet.key is None else read_or_create_key(Path(config.fleet.key), new_key())


def _encode_shared(setup: Setup) -> str:
    """Return what the supervisor keeps for later controllers."""
    return json.dumps({"key": setup.key.hex(), "folder_id": setup.folder_id})


def _decode_shared(text: str) -> tuple[bytes, str]:
    """Return the run's key and folder id that an earlier controller left with the supervisor."""
    shared = json.loads(text)
    return bytes.fromhex(shared["key"]), shared["folder_id"]


def _open_joinable(
    request: FleetRequest, host: WorkerHost, setup: Setup, surviving: SupervisedFleet | None
) -> JoinableFleet:
    """Open the fleet, and the address file in the run's folder for machines that join."""
    config = setup.config
    remote = replace(setup, folder=setup.folder.absolute(), dataset=setup.dataset.absolute())
    files = _files_to_serve(setup, request.data.folders)

    def start_local(relay: str) -> Fleet:
        if surviving is not None:
            return surviving
        entry = partial(process.main, replace(setup, reach=replace(setup.reach, relay=relay)))
        # no relay: all nodes of a cluster reach each other
        prepare = partial(local_workplace, remote, Path.cwd(), None, _log_line)
        work = FleetWork(entry, preload_for(config), request.workers, prepare, files, setup.key, device_needs(config))
        if config.fleet.standby == "off":
            return host.fleet(work)
        devices = devices_here(work.needs, work.workers).devices
        supervisor = start_supervisor(
            setup.folder, work, config.fleet, devices, _encode_shared(setup), request.progress
        )
        return SupervisedFleet(setup.folder, term=1, child=supervisor)

    invitation = RunInvitation(
        SETUP.dump_json(replace(remote, reach=Reach())).decode(), config.pipeline.stages + 1, setup.folder_id, files,
        first_machine(request.failover), returning=request.returning,
        return_s=return_s(config.fleet),
    )  # fmt: skip
    return JoinableFleet(start_local, config.fleet, host.host, setup.key, invitation, setup.folder)


def _files_to_serve(setup: Setup, data: Sequence[Path]) -> dict[str, Path]:
    """Return the files that machines without the run's folder fetch, by name."""
    files = {f"{RUN}/{SCHEDULE}": setup.folder / SCHEDULE, CHECKPOINTS: setup.checkpoints}
    return files | {f"{DATA}/{part.name}": part for part in data}


def _log_line(line: str) -> None:
    log.info("%s", line)
