"""Location and supervision of a run's workers, and connections between machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from planaria.config import bounds
from planaria.config.bounds import Natural, Positive, Seconds
from planaria.config.section import Section, formerly

Port = Annotated[int, Field(ge=1, le=65535)]
RelayName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")]


Diagnosis = Annotated[
    Literal["off", "report", "act"], BeforeValidator(lambda value: "report" if value == "tell" else value)
]
"""reaction to slow workers and links; ``tell`` in recipes and logs of older versions"""


class RelayConfig(Section):
    """A relay for a run's edges, started on its machine by ``planaria network relay`` before the run."""

    at: str
    """HOST:PORT at which it listens"""
    bandwidth_mbit: bounds.Mbits = 1000.0
    """total bandwidth of the relay in Mbit/s; edges are distributed among relays in proportion"""


class FleetConfig(Section):
    kind: Literal["local", "ray"] = "local"
    """where workers run: local (processes of this machine) or ray (on the nodes of a Ray cluster)"""
    address: str = "auto"
    """ray: auto (the cluster of this machine), embedded (one started here), HOST:PORT or ray://HOST:PORT"""
    spares: bounds.Spares = 1
    """idle workers kept ready to take over any stage"""
    local_workers: Annotated[Natural | None, formerly("local_workers", "own")] = None
    """maximum number of workers on this machine or the Ray cluster; the others run on machines that join (0: all of
    them); by default all workers and spares run here"""
    join_s: Annotated[Seconds, Field(gt=0)] = 600.0
    """with local_workers: how long the run waits for machines to join when it lacks workers"""
    threads: bounds.Threads = 1
    """CPU threads of each worker"""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """ray, with train.device = 'cuda': share of a GPU reserved for each worker"""
    standby: Literal["off", "auto", "manual"] = "off"
    """whether the run survives the loss of its controller: auto (a standby on this machine takes over), manual (start
    one with `planaria join RUN --standby`), off (resume from the newest checkpoint)"""
    shared_log: str | None = None
    """folder or URL that several machines share, for the run's log, or quorum://HOST:PORT,HOST:PORT,HOST:PORT, whose
    holders run `planaria join` with --hold; if this machine is lost, one of fleet.standby_at leads the run"""
    standby_at: str = ""
    """with fleet.shared_log: HOST:PORT of the machines that may lead, in order, separated by commas (`planaria join
    LOG/NAME --standby --at HOST:PORT`)"""
    orphan_s: Annotated[Seconds, Field(gt=0)] = 60.0
    """with a standby: how long workers wait for a controller"""
    lease_s: Annotated[Seconds, Field(ge=0.1)] = 1.0
    """with a standby: seconds after which a stopped controller (SIGSTOP) is killed and replaced; with
    fleet.shared_log: seconds without a heartbeat after which another machine leads"""
    replace: bool = True
    """start a new worker for each one that dies; if false, the run continues with the remaining ones"""
    heartbeat_s: bounds.Heartbeat = 0.25
    """seconds between a worker's heartbeats"""
    missed_heartbeats: Annotated[Positive, formerly("missed_heartbeats", "missed")] = 4
    """number of missed heartbeats after which a worker counts as dead"""
    start_timeout_s: Annotated[Seconds, Field(gt=0)] = 120.0
    """longest time for the imports shared by a machine's workers, and from a worker's start to its first heartbeat"""
    stop_s: Annotated[Seconds, Field(gt=0)] = 10.0
    """seconds that a stop (SIGTERM, Ctrl-C) waits for the current step and for repairs; then the last committed step is
    saved"""
    timeout_s: Annotated[Seconds, Field(gt=0)] = 30.0
    """longest wait for one message from a neighbour, and longest duration of one action of a worker; extended if this
    run's own steps take long"""
    disk_timeout_s: Annotated[Seconds, Field(gt=0)] = 120.0
    """longest time for a worker to read or write one stage; extended if this run's own saves take long"""
    diagnose: Diagnosis = "report"
    """report slow workers and links (report), and also hand a slow worker's stage to a spare if that pays (act)"""
    host: str = "127.0.0.1"
    """address at which the controller listens; on a Ray cluster, its node's address by default"""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """port at which joining machines connect to the controller; 0: any free one"""
    advertise: str = ""
    """address or name at which other machines reach this one, if it differs from fleet.host: behind a router, or if the
    controller listens at 0.0.0.0"""
    ports: Annotated[tuple[Port, Port] | None, Field(strict=False)] = None
    """first and last port for this machine's workers, such as [7002, 7050]; any free ones by default"""
    key: str | None = None
    """file with the key that machines must prove to know; created if missing; by default each start draws a new key"""
    relays: dict[RelayName, RelayConfig] = Field(default_factory=dict)
    """relays by name; each edge of training steps uses one of them"""

    @property
    def own_address(self) -> str:
        """HOST:PORT under which other machines reach the controller."""
        return f"{self.advertise or self.host}:{self.port}"

    @property
    def standby_addresses(self) -> list[str]:
        """HOST:PORT of the machines that may lead, in order."""
        return [at.strip() for at in self.standby_at.split(",") if at.strip()]
