"""uvicorn with limits on the number of connections, on how long they may be idle, and on how slowly they may read."""

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
from planaria.report.live_page.limits import ASK_S, LARGEST_HEAD, LEAVE_S, MOST_CONNECTIONS, STUCK_S


class Bounded(H11Protocol):
    """A connection that is dropped when it stays idle, does not read its answer, or is needed for another one.

    Beyond :data:`MOST_CONNECTIONS`, a new connection replaces the one that has been idle for longest. So idle
    connections, of any number, keep nobody from being answered.
    """

    _asked: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._asked = self.loop.call_later(ASK_S, self._drop_idle)
        if len(self.connections) > MOST_CONNECTIONS:
            idle = (other for other in self.connections if isinstance(other, Bounded) and other.idle)
            oldest = min(idle, key=lambda other: other._idle_since)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """No request is under way; one that has not arrived as a whole does not count."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._asked, self._stuck):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(STUCK_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def _drop_idle(self) -> None:
        if self.cycle is None:
            self.transport.abort()


@dataclass(frozen=True)
class Address:
    """Where to serve, and by which names the server may be called."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one"""
    names: tuple[str, ...] = ()
    """further hosts, such as a reverse proxy's: NAME or NAME:PORT"""

    def hosts(self, port: int) -> frozenset[str]:
        """What a request may name as its host, when the server listens at this port."""
        own = {"127.0.0.1", "localhost", "[::1]"} | ({self.shown} if self.host not in EVERYWHERE else set())
        return frozenset({f"{name}:{port}" for name in own} | {name.lower() for name in self.names})

    @property
    def shown(self) -> str:
        """The host as an address on this machine names it."""
        host = "127.0.0.1" if self.host in EVERYWHERE else self.host.lower()
        return f"[{host}]" if ":" in host else host


EVERYWHERE = ("0.0.0.0", "::")


class Served(Protocol):
    """What a server answers with, such as :class:`planaria.report.live_page.server.Page`."""

    def app(self) -> ASGIApp: ...

    async def end(self) -> None:
        """What is still to be said before the server goes; not long."""


class Server(uvicorn.Server):
    """Serves a page, or whatever else, until it is asked to stop; its watchers get what is new before it goes."""

    def __init__(self, page: Served, address: Address, token: str, announce: Callable[[str], None]) -> None:
        """``announce`` hears of the address, token included, once the server can be called."""
        self._guarded = Guarded(page.app())
        config = uvicorn.Config(
            self._guarded,
            host=address.host,
            port=address.port,
            http=Bounded,
            ws="none",
            access_log=False,
            log_level="critical",
            server_header=False,
            h11_max_incomplete_event_size=LARGEST_HEAD,
            timeout_graceful_shutdown=int(LEAVE_S),
        )
        super().__init__(config)
        self._page, self._address, self._token, self._announce = page, address, token, announce

    async def startup(self, sockets: Any = None) -> None:
        """:raises UserError: when the address cannot be listened at."""
        try:
            await super().startup(sockets)
        except SystemExit:
            where = f"{self._address.host}:{self._address.port}"
            raise UserError(
                f"{where}: cannot be listened at; give another address, or port 0 for any free one"
            ) from None
        port = self.servers[0].sockets[0].getsockname()[1]
        self._guarded.guard = Guard(self._token, self._address.hosts(port), f"planaria-{port}")
        self._announce(f"http://{self._address.shown}:{port}/?token={self._token}")

    async def shutdown(self, sockets: Any = None) -> None:
        await self._page.end()
        await super().shutdown(sockets)

    def until_closed(self, file: int) -> None:
        """Stop once this file, a pipe from who started the server, is at its end."""

        def look() -> None:
            if not os.read(file, 1 << 10):
                self.should_exit = True
                asyncio.get_running_loop().remove_reader(file)

        asyncio.get_running_loop().add_reader(file, look)


def serve(server: Server, closed: int | None = None) -> None:
    """Runs the server in the main thread until a signal, or until the file ``closed`` is at its end."""

    async def run() -> None:
        if closed is not None:
            server.until_closed(closed)
        await server.serve()

    asyncio.run(run())
