"""Two-rank gloo groups and the store they meet at.

The one place that knows how torch.distributed makes a group; newer in-place reconfiguration would slot in here.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from planaria.errors import UserError

# Deadlines are kept by whoever waits for a message, who can name it; a time-out inside gloo would close the group.
_NEVER = timedelta(days=30)


class Rendezvous:
    """The store at which the ends of every edge find each other. It lives with the controller, never on a stage."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on ``host``:``port`` (0: any free port).

        :raises UserError: when the port is taken or the host is not an address of this machine.
        """
        try:
            self._store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"fleet.host = {host!r}, fleet.port = {port}: cannot listen there ({str(error).splitlines()[0][:160]}); "
                "choose another port, or 0 for any free one"
            ) from None
        self.host, self.port = host, self._store.port


def open_group(host: str, port: int, link_id: str, rank: int, timeout_s: float) -> dist.ProcessGroupGloo:
    """The two-rank group named ``link_id`` as seen from ``rank`` (0 or 1); blocks until the other end is there too.

    :raises RuntimeError: when the other end does not come within ``timeout_s`` seconds.
    """
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    group = dist.ProcessGroupGloo(dist.PrefixStore(link_id, store), rank, 2, options)
    group._set_default_timeout(_NEVER)
    return group
