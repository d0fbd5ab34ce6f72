"""Access control of the live page by host, origin and token.

Any website can make a browser send requests to 127.0.0.1 and, by DNS rebinding, read the answers. So a request's host
and origin must be the server's own. The token is in the printed address; the browser keeps it as a cookie that scripts
cannot read and other sites cannot send.
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

from planaria.report.live_page.limits import MAX_TARGET

OPEN_PATHS = ("/health", "/ready")
"""paths that need no token; their answers contain nothing about the run"""
NO_TOKEN = "no token; use the address that planaria printed, or send the header 'Authorization: Bearer TOKEN'"
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
    """Return 256 random bits as URL-safe text."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Guard:
    """Accepts requests with the token to one of ``hosts`` (names, with ports other than 80)."""

    token: str
    hosts: Collection[str]
    cookie: str

    def rejection(self, method: str, path: str, query: bytes, headers: Headers) -> tuple[HTTPStatus, str] | None:
        """Return the status and reason with which a request is rejected, or None if it is accepted."""
        if len(path) + len(query) > MAX_TARGET:
            return HTTPStatus.REQUEST_URI_TOO_LONG, f"an address has at most {MAX_TARGET} characters"
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return HTTPStatus.FORBIDDEN, "unknown host; use the address that planaria printed"
        origins = headers.getlist("origin")
        if any(origin.lower() not in self._origins for origin in origins):
            return HTTPStatus.FORBIDDEN, "unknown origin"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not _is_navigation(method, headers):
            return HTTPStatus.FORBIDDEN, "unknown origin"
        if path in OPEN_PATHS:
            return None
        bearer = self._is_token(_bearer_token(headers))
        if not (bearer or self._is_token(self._cookie_token(headers)) or self._is_token(_query_token(path, query))):
            return HTTPStatus.FORBIDDEN, NO_TOKEN
        if method not in ("GET", "HEAD") and not bearer and not origins:
            return HTTPStatus.FORBIDDEN, "no origin"
        return None

    @property
    def _origins(self) -> set[str]:
        return {f"http://{host}" for host in self.hosts} | {f"https://{host}" for host in self.hosts}

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())

    def _cookie_token(self, headers: Headers) -> str:
        return cookie_parser(headers.get("cookie", "")).get(self.cookie, "")

    def cookie_header(self) -> str:
        """Return the Set-Cookie header of the token, for this server only and unreadable for scripts."""
        return f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"


def _is_navigation(method: str, headers: Headers) -> bool:
    """Return whether the request follows a link to the page, e.g. from an e-mail."""
    return (
        method == "GET" and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )


def _bearer_token(headers: Headers) -> str:
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""


def _query_token(path: str, query: bytes) -> str:
    """Return the token in the page's own address; no other address may contain it."""
    return parse_qs(query.decode("latin-1")).get("token", [""])[0] if path == "/" else ""


class Guarded:
    """An application behind a :class:`Guard`; adds :data:`HEADERS` to all answers."""

    def __init__(self, app: ASGIApp, guard: Guard | None = None) -> None:
        """Requests get no answer until ``guard`` is set."""
        self._app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        guard = self.guard
        if scope["type"] != "http" or guard is None:  # websockets are unsupported
            return
        first = scope["path"] == "/" and b"token=" in scope["query_string"]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = dict(HEADERS)
                if first and message["status"] == HTTPStatus.OK:
                    headers["set-cookie"] = guard.cookie_header()
                added = [(name.encode(), value.encode()) for name, value in headers.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        requested = scope["method"], scope["path"], scope["query_string"]
        rejected = guard.rejection(*requested, Headers(scope=scope))
        if rejected is None:
            await self._app(scope, receive, send_with_headers)
            return
        first = False
        status, why = rejected
        await PlainTextResponse(f"{why}\n", status, {"connection": "close"})(scope, receive, send_with_headers)
