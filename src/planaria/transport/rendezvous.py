"""Where the two ends of an edge find each other: a table of small values, kept by the controller.

torch's TCPStore would do, but it listens on every interface of the machine, and it looks up the name of each client in
the DNS, on its only thread: while one answer is late (5 s a try), no edge anywhere gets opened.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from torch.distributed import Store  # type: ignore[attr-defined]

from planaria.errors import UserError

MAX_LINE_BYTES = 1 << 16


class Rendezvous:
    """The table and its server. It lives with the controller, never on a stage."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on ``host``:``port`` (0: any free port), and there only.

        :raises UserError: when the port is taken or the host is not an address of this machine.
        """
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise UserError(
                f"fleet.host = {host!r}, fleet.port = {port}: cannot listen there ({error.strerror}); "
                "choose another port, or 0 for any free one"
            ) from None
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.table: dict[str, str] = {}
        self.changed = threading.Condition()
        super().__init__((host, port), _Answers)


class _Answers(socketserver.StreamRequestHandler):
    """One client's requests, a JSON line each: [key, value] keeps a value, [key, seconds] waits for one (or null)."""

    server: _Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a worker may be killed while it asks
            self._answer_all()

    def _answer_all(self) -> None:
        while line := self.rfile.readline(MAX_LINE_BYTES):
            try:
                key, rest = json.loads(line)
            except (ValueError, TypeError):
                return  # none of ours
            with self.server.changed:
                if isinstance(rest, str):
                    self.server.table[key] = rest
                    self.server.changed.notify_all()
                else:
                    self.server.changed.wait_for(partial(self.server.table.__contains__, key), float(rest))
                answer = self.server.table.get(key)
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class Client(Store):
    """One worker's view of the table, in the shape that torch's process groups want."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """:raises OSError: when nobody listens at ``host``:``port``."""
        super().__init__()
        self._timeout_s = timeout_s
        self._socket = socket.create_connection((host, port), timeout_s + 1.0)  # the server gives up first
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")

    @property
    def own_address(self) -> str:
        """This machine's address on the way to the table; the workers of other machines can reach it there."""
        return str(self._socket.getsockname()[0])

    def set(self, key: str, value: bytes | str) -> None:
        raw = value if isinstance(value, bytes) else value.encode()
        self._ask(key, base64.b64encode(raw).decode())

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._ask(key, self._timeout_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._ask(key, self._timeout_s)

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def _ask(self, key: str, value_or_patience: str | float) -> str:
        """:raises RuntimeError: when the value does not come within the time-out, as torch's own stores do."""
        try:
            self._socket.sendall(json.dumps([key, value_or_patience]).encode() + b"\n")
            answer: str | None = json.loads(self._answers.readline(MAX_LINE_BYTES))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the rendezvous does not answer: {error}") from None
        if answer is None:
            raise RuntimeError(f"the other end did not come within {self._timeout_s:g} s")
        return answer
