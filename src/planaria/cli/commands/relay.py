"""``planaria relay``: carry edges of a run whose workers meet here."""

from __future__ import annotations

import threading
from pathlib import Path

from planaria.common.errors import UserError
from planaria.common.signals import interrupted
from planaria.runtime.fleet.joining import kept_key
from planaria.runtime.transport.relay import relay_at
from planaria.runtime.transport.secure import new_key


def carry(key: Path, host: str, port: int) -> int:
    """Carry what ends of edges that prove the key in the file ``key`` send each other, until Ctrl-C; the exit code.

    The file is made if it is not there.

    :raises UserError: when nobody can listen there, or the file holds no key.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: give 1 to 65535, or 0 for any free one")
    secret = kept_key(key, new_key())
    try:
        listener, relay = relay_at(host, port, secret)
    except UserError:
        mend = "give an address of this machine and a free port (0: any)"
        raise UserError(f"--host {host} --port {port}: cannot listen there; {mend}") from None
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
