"""uvicorn with limits on connections, idle time and slow readers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from planaria.common.errors import UserError
from planaria.report.live_page.guard import Guard, Guarded
from planaria.report.live_page.limits import MAX_CONNECTIONS, MAX_HEAD, REQUEST_TIMEOUT_S, SEND_TIMEOUT_S, SHUTDOWN_S


class BoundedConnection(H11Protocol):
    """A connection that is dropped if it stays idle, does not read its answer, or is replaced.

    Beyond :data:`MAX_CONNECTIONS`, a new connection replaces the one idle for longest, so that idle connections cannot
    block the server.
    """

    _request_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._drop_idle)
        if len(self.connections) > MAX_CONNECTIONS:
            idle = (c for c in self.connections if isinstance(c, BoundedConnection) and c.idle)
            oldest = min(idle, key=lambda c: c._idle_since)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """True if no complete request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._request_timer, self._send_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def _drop_idle(self) -> None:
        if self.cycle is None:
            self.transport.abort()


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server, and its accepted names."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 for any free port"""
    names: tuple[str, ...] = ()
    """further host names, e.g. of a reverse proxy: NAME or NAME:PORT"""

    def hosts(self, port: int) -> frozenset[str]:
        """Return the accepted Host headers for a port."""
        names = {"127.0.0.1", "localhost", "[::1]"} | ({self.shown} if self.host not in EVERYWHERE else set())
        return frozenset({f"{name}:{port}" for name in names} | {name.lower() for name in self.names})

    @property
    def shown(self) -> str:
        """Host in the printed address."""
        host = "127.0.0.1" if self.host in EVERYWHERE else self.host.lower()
        return f"[{host}]" if ":" in host else host


EVERYWHERE = ("0.0.0.0", "::")


class Application(Protocol):
    """An application to serve, such as :class:`planaria.report.live_page.app.Page`."""

    def app(self) -> ASGIApp: ...

    async def end(self) -> None:
        """Send the last messages before the server stops; must be short."""


class Server(uvicorn.Server):
    """Serves an application until stopped; its watchers receive the last messages first."""

    def __init__(self, page: Application, address: ServerAddress, token: str, announce: Callable[[str], None]) -> None:
        """``announce`` receives the address with the token once the server listens."""
        self._guarded = Guarded(page.app())
        config = uvicorn.Config(
            self._guarded,
            host=address.host,
            port=address.port,
            http=BoundedConnection,
            ws="none",
            access_log=False,
            log_level="critical",
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEAD,
            timeout_graceful_shutdown=int(SHUTDOWN_S),
        )
        super().__init__(config)
        self._page = page
        self._address = address
        self._token = token
        self._announce = announce

    async def startup(self, sockets: Any = None) -> None:
        """:raises UserError: if the server cannot listen at the address."""
        try:
            await super().startup(sockets)
        except SystemExit:
            where = f"{self._address.host}:{self._address.port}"
            raise UserError(
                f"{where}: cannot listen at this address; use another one, or port 0 for any free port"
            ) from None
        port = self.servers[0].sockets[0].getsockname()[1]
        self._guarded.guard = Guard(self._token, self._address.hosts(port), f"planaria-{port}")
        self._announce(f"http://{self._address.shown}:{port}/?token={self._token}")

    async def shutdown(self, sockets: Any = None) -> None:
        await self._page.end()
        await super().shutdown(sockets)

    def stop_at_end_of(self, file: int) -> None:
        """Stop at the end of this file, a pipe from the parent process."""

        def check_closed() -> None:
            if not os.read(file, 1 << 10):
                self.should_exit = True
                asyncio.get_running_loop().remove_reader(file)

        asyncio.get_running_loop().add_reader(file, check_closed)


def serve(server: Server, closed: int | None = None) -> None:
    """Run the server in the main thread until a signal, or until the file ``closed`` ends."""

    async def run() -> None:
        if closed is not None:
            server.stop_at_end_of(closed)
        await server.serve()

    asyncio.run(run())
