"""Workers without dependencies, for tests of their start and end."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection


def main(connection: Connection, worker: str, incarnation: int) -> None:
    """Report once, then wait until the fleet closes the connection."""
    connection.send_bytes(b"here")
    while not connection.poll(60.0):
        time.sleep(0.0)
