"""Where a run's workers can be: this machine, or a Ray cluster. Chosen by ``fleet.kind``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from planaria.config.schema import FleetConfig
from planaria.runtime.fleet.base import Fleet
from planaria.runtime.fleet.devices import NOT_ASKED, Inventory, Needs, require_devices
from planaria.runtime.fleet.inventory import inventory
from planaria.runtime.fleet.local import LocalFleet
from planaria.runtime.fleet.request import Ground, Work


@dataclass(frozen=True)
class _Here:
    config: FleetConfig

    @property
    def host(self) -> str:
        return self.config.host

    def fleet(self, work: Work) -> Fleet:
        found = devices_here(work.needs, work.workers).devices
        config = self.config
        beats = config.heartbeat_s, config.missed
        return LocalFleet(work.entry, work.preload, *beats, found, config.start_timeout_s)


def devices_here(needs: Needs, workers: int) -> Inventory:
    """This machine's CUDA devices, where a run needs some.

    :raises UserError: when it cannot have so many workers of that run.
    """
    found = inventory() if needs.cuda else NOT_ASKED
    mend = "use 'cpu', machines that join (fleet.own = 0), or fleet.kind = 'ray' with nodes that have more"
    require_devices("this machine", needs, found, workers, mend)
    return found


@contextmanager
def ground(config: FleetConfig, workers: int) -> Iterator[Ground]:
    """The place that ``config`` names, with room for ``workers`` workers if it is made for them; left at the end.

    :raises UserError: when it is not there, or not fit.
    """
    if config.kind == "local":
        yield _Here(config)
        return
    from planaria.runtime.fleet.ray import Cluster  # takes most of a second, and may not be installed

    cluster = Cluster(config, workers)
    try:
        yield cluster
    finally:
        cluster.leave()
