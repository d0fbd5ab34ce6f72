"""The calling end of an edge, in its own network namespace, with a forwarder on its loopback.

``python other_host.py PORT BRIDGE KEY``: connections to 127.0.0.1:PORT here are carried over the Unix socket BRIDGE,
the only way out. The first line on it is the caller's port, so that the far side can call from the same one: both ends
of the edge then see the same two addresses. Prints "here", then the kind of channel once it has sent :data:`MARKER`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
from pathlib import Path

from planaria.runtime.transport.port import Port

MARKER = b"SECRET-WEIGHTS" * 100
NOT_ALLOWED = 77
"""exit code where namespaces cannot be made"""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def enter_namespace() -> None:
    """Leave the machine's network for an empty one with a loopback device.

    :raises OSError: when that is not allowed.
    """
    user, libc = os.geteuid(), ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET if user == 0 else _CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:  # the same user as before, so that only the network tells the two ends apart
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(device, _GET_FLAGS, request), 16)
        fcntl.ioctl(device, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def pump(source: socket.socket, sink: socket.socket, seen: bytearray | None = None) -> None:
    """Forward one direction until it ends; ``seen`` collects all bytes."""
    try:
        while piece := source.recv(1 << 16):
            if seen is not None:
                seen += piece
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _forward(server: socket.socket, bridge: str) -> None:
    connection, (_, port) = server.accept()
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.connect(bridge)
    way.sendall(b"%d\n" % port)
    threading.Thread(target=pump, args=(way, connection), daemon=True).start()
    pump(connection, way)


def main(port: str, bridge: str, key: str) -> int:
    try:
        enter_namespace()
    except OSError as error:
        print(f"no network namespaces here: {error}")
        return NOT_ALLOWED
    print("here", flush=True)
    server = socket.create_server(("127.0.0.1", int(port)))
    threading.Thread(target=_forward, args=(server, bridge), daemon=True).start()
    own = Port("127.0.0.1", bytes.fromhex(key))
    channel = own.call(f"127.0.0.1:{port}", "edge", 30.0, lambda: False)
    left = memoryview(MARKER)
    while left:
        left = left[channel.write_some(left, left[:0]) :]
    print(type(channel).__name__, flush=True)
    sys.stdin.read()  # until the other end has all of it
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
