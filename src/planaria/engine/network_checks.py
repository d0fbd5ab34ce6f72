"""What can be wrong with where a run's workers are and how its machines find each other, before any of them starts."""

from __future__ import annotations

import re

from planaria.config import FleetConfig
from planaria.errors import UserError
from planaria.record.started import RunStarted

_EVERYWHERE = ("0.0.0.0", "::")


def require_network(fleet: FleetConfig, started: RunStarted) -> None:
    """:raises UserError: naming the setting, and what goes instead."""
    if fleet.host in _EVERYWHERE and not fleet.advertise:
        raise UserError(
            f"fleet.host = {fleet.host!r} listens at every address of this machine: say with fleet.advertise under "
            "which of them, or which name, other machines find it"
        )
    if fleet.advertise and not re.fullmatch(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+", fleet.advertise):
        raise UserError(
            f"fleet.advertise = {fleet.advertise!r}: give a host name or an address; the port is fleet.port"
        )
    if fleet.own is not None and fleet.own > started.all_workers:
        raise UserError(
            f"fleet.own = {fleet.own}: the run has {started.all_workers} workers with its spares; raise fleet.spares "
            "to have more"
        )
    if fleet.own == 0 and fleet.kind == "ray":
        raise UserError("fleet.own = 0: without workers on the Ray cluster, leave fleet.kind = 'ray' out")
    if fleet.ports is None:
        return
    first, last = fleet.ports
    if last < first:
        raise UserError(f"fleet.ports = [{first}, {last}]: give the first and the last")
    if last - first + 1 < started.own_workers:
        raise UserError(
            f"fleet.ports = [{first}, {last}]: {last - first + 1} ports for {started.own_workers} workers; give "
            "one for each"
        )
    if first <= fleet.port <= last:
        raise UserError(f"fleet.ports = [{first}, {last}]: fleet.port = {fleet.port} is the controller's; leave it out")
