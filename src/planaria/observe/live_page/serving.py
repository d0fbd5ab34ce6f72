"""uvicorn within limits: how many connections there may be, and how long they may idle, or be slow to read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from planaria.errors import UserError
from planaria.observe.live_page.guard import Guard, Guarded
from planaria.observe.live_page.limits import ASK_S, LARGEST_HEAD, LEAVE_S, MOST_CONNECTIONS, STUCK_S


class Bounded(H11Protocol):
    """A connection that is dropped when there are too many, when it asks for nothing, or does not take what it gets."""

    _asked: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._asked = self.loop.call_later(ASK_S, self._drop_idle)

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
    """What a server answers with, such as :class:`planaria.observe.live_page.server.Page`."""

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
