"""A client that knows the protocol, but not the run's key.

``python keyless_client.py HOST:PORT…`` opens every kind of connection to each address, and prints as JSON the number
of bytes received on each.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
from collections.abc import Callable

from planaria.runtime.transport.listener import connect
from planaria.runtime.transport.secure import StrangerError, begin, new_key

GREETINGS = [b"g1:state:1>2", b"g1:0-1", json.dumps(["w1", 1, 1]).encode(), json.dumps(["a machine", 0, 1]).encode()]
FRAME = b"PLNR" + bytes(200)
"""the beginning of what edges carry"""
PATIENCE_S = 2.0


def plain(address: tuple[str, int], greeting: bytes) -> bytes:
    """Plain text, as between processes of one machine that have proved the key."""
    with socket.create_connection(address, PATIENCE_S) as raw:
        raw.sendall(len(greeting).to_bytes(2, "big") + greeting + FRAME)
        answer = raw.recv(1 << 16)
    return b"" if answer[:1] == b"\x15" else answer  # an alert of TLS: not understood


def unnamed(address: tuple[str, int], greeting: bytes) -> bytes:
    """TLS without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(address, PATIENCE_S)) as tls:
        tls.sendall(len(greeting).to_bytes(2, "big") + greeting)
        return tls.recv(1 << 16)


def forged(address: tuple[str, int], greeting: bytes) -> bytes:
    """TLS with a certificate that looks like the run's, of another key; it accepts any certificate."""
    tls = begin(socket.create_connection(address, PATIENCE_S), new_key(), calling=True)
    tls.context.verify_mode = ssl.CERT_NONE
    with tls:
        tls.do_handshake()
        tls.sendall(len(greeting).to_bytes(2, "big") + greeting)
        return tls.recv(1 << 16)


def another_run(address: tuple[str, int], greeting: bytes) -> bytes:
    """The project's own connection, with another run's key."""
    with connect("{}:{}".format(*address), new_key(), greeting, PATIENCE_S) as tls:
        return tls.recv(1 << 16)


def garbage(address: tuple[str, int], greeting: bytes) -> bytes:
    with socket.create_connection(address, PATIENCE_S) as raw:
        raw.sendall(b"\x16\x03\x01\xff\xff" + bytes(range(256)) * 40)
        answer = raw.recv(1 << 16)
    return b"" if answer[:1] == b"\x15" else answer


Connection = Callable[[tuple[str, int], bytes], bytes]
CONNECTIONS: list[Connection] = [plain, unnamed, forged, another_run, garbage]


def bytes_received(connection: Connection, address: str) -> int:
    """Return the number of bytes received on a kind of connection, over all greetings."""
    host, _, port = address.rpartition(":")
    count = 0
    for greeting in GREETINGS:
        try:
            count += len(connection((host, int(port)), greeting))
        except (OSError, StrangerError):
            continue
    return count


if __name__ == "__main__":
    results = [
        {"address": address, "connection": connection.__name__, "bytes": bytes_received(connection, address)}
        for address in sys.argv[1:]
        for connection in CONNECTIONS
    ]
    print(json.dumps(results))
