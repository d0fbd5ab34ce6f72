"""``planaria network relay``: forward edges of a run whose workers cannot connect directly."""

from __future__ import annotations

import threading
from pathlib import Path

from planaria.common.errors import UserError
from planaria.common.signals import interrupted
from planaria.runtime.fleet.joining import kept_key
from planaria.runtime.transport.relay import relay_at
from planaria.runtime.transport.secure import new_key


def carry(key: Path, host: str, port: int) -> int:
    """Forward edges between ends that prove the key in the file ``key``, until Ctrl-C; return the exit code.

    The file is created if missing.
    :raises UserError: if it cannot listen there, or the file has no key.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: give 1 to 65535, or 0 for any free one")
    secret = kept_key(key, new_key())
    try:
        listener, relay = relay_at(host, port, secret)
    except UserError:
        advice = "give an address of this machine and a free port (0: any)"
        raise UserError(f"--host {host} --port {port}: cannot listen there; {advice}") from None
    print(f"relay         {listener.address}", flush=True)
    try:
        with interrupted():
            threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    finally:
        listener.close()
        relay.close()
    return 0
