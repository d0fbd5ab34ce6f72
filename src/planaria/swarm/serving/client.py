"""One server, over HTTP: bounded replies, one deadline for each request, a token that no log ever sees."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from planaria.common import documents
from planaria.common.errors import UserError, nearest
from planaria.swarm.config import PolicyConfig

LEAST_S = 0.05
PIECE = 1 << 16
SMALL = 1 << 20
"""bytes of a reply that is no completion"""
OPENING_S = 10.0
"""how long a server may take to say which models it has"""


class ServerFailed(Exception):
    """The server did not do what it was asked: one line, fit for a log. ``status``: of HTTP; 0 without a reply."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Client:
    """Talks to one server. Safe for several threads: every request has a connection of its own.

    Redirections are not followed, so that the token goes to nobody else.
    """

    def __init__(self, config: PolicyConfig) -> None:
        """:raises UserError: when the URL is none, or the token is not in the environment."""
        parts = urlsplit(config.server)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise UserError(f"policy.server = {config.server!r}: no URL of a server; write http://HOST:PORT")
        self.url = config.server.rstrip("/").removesuffix("/v1")
        self._host, self._port, self._tls = parts.hostname, port, parts.scheme == "https"
        self._path = urlsplit(self.url).path
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if config.serving.token:
            token = os.environ.get(config.serving.token, "")
            if not token or not token.isascii() or not token.isprintable():
                raise UserError(
                    f"policy.serving.token = {config.serving.token!r}: the environment has no such variable with a "
                    "token in it; export it, or leave the setting out"
                )
            self._headers["Authorization"] = f"Bearer {token}"

    def model(self, wanted: str) -> str:
        """The name of the model to ask for: ``wanted`` if the server has it, the first one unless given.

        :raises UserError: when the server cannot be reached, or has no such model.
        """
        try:
            found = self.get("/v1/models", time.monotonic() + OPENING_S)
        except ServerFailed as error:
            raise UserError(
                f"policy.server = {self.url!r}: {error}; is the server running, and the URL right?"
            ) from None
        listed = found.get("data") if isinstance(found, dict) else None
        names = [each["id"] for each in listed or () if isinstance(each, dict) and isinstance(each.get("id"), str)]
        if not names:
            raise UserError(f"policy.server = {self.url!r}: lists no models; is it an OpenAI-compatible server?")
        if wanted and wanted not in names:
            raise UserError(
                f"policy.serving.model = {wanted!r}: the server has no such model; {nearest(wanted, names)}"
            )
        return wanted or names[0]

    def get(self, path: str, until: float) -> Any:
        """What the server answers, as JSON; ``until`` is a time of the monotonic clock.

        :raises ServerFailed: when it answers with anything else, or not in time.
        """
        return self._ask("GET", path, None, until, SMALL)

    def post(self, path: str, body: Mapping[str, Any], until: float, most: int = SMALL) -> Any:
        """The same of a request with a body; the reply has at most ``most`` bytes."""
        return self._ask("POST", path, json.dumps(body).encode(), until, most)

    def _ask(self, method: str, path: str, body: bytes | None, until: float, most: int) -> Any:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._left(until))
        try:
            connection.request(method, self._path + path, body, self._headers)
            if connection.sock is not None:
                connection.sock.settimeout(self._left(until))
            reply = connection.getresponse()
            raw = self._read(connection, reply, until, most)
        except TimeoutError:
            raise ServerFailed(f"{path} took too long") from None
        except (OSError, http.client.HTTPException) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise ServerFailed(f"{path} failed ({_line(reason)})") from None
        finally:
            connection.close()
        if reply.status != 200:
            raise ServerFailed(f"{path} was answered with {reply.status} ({_line(_said(raw))})", reply.status)
        return _parsed(raw, path)

    def _read(
        self, connection: http.client.HTTPConnection, reply: http.client.HTTPResponse, until: float, most: int
    ) -> bytes:
        """All of a reply. The deadline is looked at between pieces: a server that drips is not waited for."""
        raw = bytearray()
        if (reply.length or 0) > most:
            raise ServerFailed(f"a reply of more than {most} bytes")
        while True:
            left = self._left(until)
            if connection.sock is not None:  # None once the server has closed its end: then nothing is waited for
                connection.sock.settimeout(left)
            piece = reply.read1(PIECE)
            raw += piece
            if len(raw) > most:
                raise ServerFailed(f"a reply of more than {most} bytes")
            if not piece:
                return bytes(raw)

    @staticmethod
    def _left(until: float) -> float:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return max(left, LEAST_S)


def _parsed(raw: bytes, path: str) -> Any:
    if not raw.strip():
        return {}
    try:
        return documents.parse_json(raw, path)
    except UserError as error:
        # Some servers confirm in plain words what they were told to load.
        if path.endswith("adapter") and raw.isascii():
            return {}
        raise ServerFailed(f"{path} was answered with no JSON ({_line(str(error))})") from None


def _said(raw: bytes) -> str:
    """The message in an error's body."""
    try:
        found = documents.parse_json(raw, "reply")
    except UserError:
        return raw[:400].decode("utf-8", "replace")
    for _ in range(2):
        if isinstance(found, dict):
            found = found.get("error", found.get("message", found.get("detail", found)))
    return str(found)


def _line(text: str) -> str:
    """One line of what a server said, and no control characters in it."""
    words = " ".join(text.split())
    return "".join(letter for letter in words if letter.isprintable())[:200]
