"""Who may see the page: a request from a known host, of a known origin, with the token. Pure but for its answers.

A page elsewhere on the web can make a browser send requests to 127.0.0.1, and by a name that it resolves to that
address (DNS rebinding) even read the answers. So the host that a request names must be one of the server's own, and so
must its origin, if it names one. The token comes in the address that the command prints; the browser gets it back as a
cookie that no script can read and no other site can have sent.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planaria.report.live_page.limits import LONGEST_TARGET

OPEN = ("/health", "/ready")
"""what is answered without a token: one word about the server, nothing about the run"""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def new_token() -> str:
    """256 random bits, as text that an address can hold."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Guard:
    """What is let in: ``hosts`` are names, with ports where these are not 80, under which the server may be called."""

    token: str
    hosts: Collection[str]
    cookie: str

    def refusal(self, method: str, path: str, query: bytes, headers: Headers) -> tuple[HTTPStatus, str] | None:
        """Why a request is not answered; None if it is."""
        if len(path) + len(query) > LONGEST_TARGET:
            return HTTPStatus.REQUEST_URI_TOO_LONG, f"an address has at most {LONGEST_TARGET} characters"
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return HTTPStatus.FORBIDDEN, "unknown host; use the address that planaria printed"
        origins = headers.getlist("origin")
        if any(origin.lower() not in self._origins for origin in origins):
            return HTTPStatus.FORBIDDEN, "unknown origin"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not _goes_there(method, headers):
            return HTTPStatus.FORBIDDEN, "unknown origin"
        if path in OPEN:
            return None
        bearer = self._is_token(_bearer(headers))
        if not (bearer or self._is_token(self._from_cookie(headers)) or self._is_token(_from_query(path, query))):
            return HTTPStatus.FORBIDDEN, "no token; use the address that planaria printed"
        if method not in ("GET", "HEAD") and not bearer and not origins:
            return HTTPStatus.FORBIDDEN, "no origin"
        return None

    @property
    def _origins(self) -> set[str]:
        return {f"http://{host}" for host in self.hosts} | {f"https://{host}" for host in self.hosts}

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _from_cookie(self, headers: Headers) -> str:
        return cookie_parser(headers.get("cookie", "")).get(self.cookie, "")

    def set_cookie(self) -> str:
        """The header by which a browser keeps the token: for this server alone, and out of scripts' reach."""
        return f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"


def _goes_there(method: str, headers: Headers) -> bool:
    """Does somebody follow a link to the page, from a mail for example?"""
    return (
        method == "GET" and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )


def _bearer(headers: Headers) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _from_query(path: str, query: bytes) -> str:
    """The token in the address of the page itself; nothing else is asked for by an address that holds it."""
    return parse_qs(query.decode("latin-1")).get("token", [""])[0] if path == "/" else ""


class Guarded:
    """An application behind a :class:`Guard`; all that it answers gets :data:`HEADERS`."""

    def __init__(self, app: ASGIApp, guard: Guard | None = None) -> None:
        """Without a guard, until there is one, nothing is let in."""
        self._app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        guard = self.guard
        if scope["type"] != "http" or guard is None:  # websockets: nothing here speaks them
            return
        first = scope["path"] == "/" and b"token=" in scope["query_string"]

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = dict(HEADERS)
                if first and message["status"] == HTTPStatus.OK:
                    said["set-cookie"] = guard.set_cookie()
                added = [(name.encode(), value.encode()) for name, value in said.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        asked = scope["method"], scope["path"], scope["query_string"]
        refused = guard.refusal(*asked, Headers(scope=scope))
        if refused is None:
            await self._app(scope, receive, answer)
            return
        first = False
        status, why = refused
        await PlainTextResponse(f"{why}\n", status, {"connection": "close"})(scope, receive, answer)
