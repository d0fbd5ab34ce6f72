"""Where a run's workers are, how they are watched, and how machines find each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planaria.config import bounds
from planaria.config.bounds import Natural, Positive, Seconds
from planaria.config.section import Section

Port = Annotated[int, Field(ge=1, le=65535)]
RelayName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")]


class RelayConfig(Section):
    """A relay that a run's edges may go over: ``planaria relay``, started there before the run."""

    at: str
    """HOST:PORT where it listens"""
    bandwidth_mbit: bounds.Mbits = 1000.0
    """of all that it carries, in Mbit/s: edges are shared out among relays by this"""


class FleetConfig(Section):
    kind: Literal["local", "ray"] = "local"
    """where the workers are: local (processes of this machine) or ray (on the nodes of a Ray cluster)"""
    address: str = "auto"
    """ray: auto (the cluster of this machine), embedded (one started here), HOST:PORT or ray://HOST:PORT"""
    spares: bounds.Spares = 1
    """idle workers kept ready to become any stage"""
    own: Natural | None = None
    """workers that this machine, or the Ray cluster, has room for; all that the run needs, and its spares, unless
    given. The rest is on machines that join; 0: all are"""
    join_s: Annotated[Seconds, Field(gt=0)] = 600.0
    """with own: how long the run waits for machines to join when it lacks workers"""
    threads: bounds.Threads = 1
    """with which each worker computes on CPUs"""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """ray, with train.device = 'cuda': the share of a GPU that is reserved for each worker"""
    replace: bool = True
    """start a new worker for each that dies; without, a run makes do with those that are left"""
    heartbeat_s: bounds.Heartbeat = 0.25
    """seconds between a worker's heartbeats"""
    missed: Positive = 4
    """heartbeats a worker may miss before it counts as dead"""
    start_timeout_s: Annotated[Seconds, Field(gt=0)] = 120.0
    """longest that the imports which all workers of a machine share may take, and longest from a worker's start to its
    first heartbeat"""
    stop_s: Annotated[Seconds, Field(gt=0)] = 10.0
    """seconds that a stop (SIGTERM, Ctrl-C) waits for the step under way and for repairs; after that, the last
    committed step is saved"""
    timeout_s: Annotated[Seconds, Field(gt=0)] = 30.0
    """longest wait for one message from a neighbour, and longest that one action or order may take a worker; more
    where this run's own steps have shown that they take long"""
    disk_timeout_s: Annotated[Seconds, Field(gt=0)] = 120.0
    """longest that reading or writing one stage may take a worker; more where this run's own saves have taken long"""
    diagnose: Literal["off", "tell", "act"] = "tell"
    """name workers and links that are slow (tell), and hand a slow worker's stage to a spare where that pays (act)"""
    host: str = "127.0.0.1"
    """address the controller listens on; on a Ray cluster its node's own, unless another is given"""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """port at which machines call the controller to join; 0 takes any free one"""
    advertise: str = ""
    """address or name under which other machines find this one, where that is not fleet.host: behind a router, or
    where the controller listens at 0.0.0.0"""
    ports: Annotated[tuple[Port, Port] | None, Field(strict=False)] = None
    """first and last port at which this machine's workers listen, such as [7002, 7050]; any free ones unless given"""
    key: str | None = None
    """file of the key that machines prove to join; made if it is not there. Every start makes a new key unless given"""
    relays: dict[RelayName, RelayConfig] = Field(default_factory=dict)
    """by name: the edges of training steps go over these, each over one"""
