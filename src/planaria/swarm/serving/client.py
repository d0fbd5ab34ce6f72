"""Client of OpenAI-compatible servers: bounded requests, and completions as token ids."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from planaria.common import documents
from planaria.common.errors import UserError, nearest
from planaria.common.printing import printable_line
from planaria.swarm.config.policy import PolicyConfig
from planaria.swarm.policy.base import SampledCompletion

MIN_S = 0.05
PIECE = 1 << 16
SMALL = 1 << 20
"""maximum bytes of a reply without completions"""
OPENING_S = 10.0
"""time limit for listing the server's models"""


class ServerFailed(Exception):
    """A request failed; the message is one line. ``status``: of HTTP; 0 without a reply."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Client:
    """Client of one server; thread-safe, with one connection per request.

    Redirections are not followed, so that the token reaches no other host.
    """

    def __init__(self, config: PolicyConfig) -> None:
        """:raises UserError: if the URL is invalid, or the token is not in the environment."""
        parts = urlsplit(config.server)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise UserError(f"policy.server = {config.server!r}: not the URL of a server; write http://HOST:PORT")
        self.url = config.server.rstrip("/").removesuffix("/v1")
        self._host = parts.hostname
        self._port = port
        self._tls = parts.scheme == "https"
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
        """Return the model name to request: ``wanted``, or the server's first model if it is empty.

        :raises UserError: if the server cannot be reached or lacks the model.
        """
        try:
            result = self.get("/v1/models", time.monotonic() + OPENING_S)
        except ServerFailed as error:
            raise UserError(f"policy.server = {self.url!r}: {error}; check that the server runs, and its URL") from None
        listed = result.get("data") if isinstance(result, dict) else None
        names = [each["id"] for each in listed or () if isinstance(each, dict) and isinstance(each.get("id"), str)]
        if not names:
            raise UserError(f"policy.server = {self.url!r}: lists no models; give an OpenAI-compatible server")
        if wanted and wanted not in names:
            raise UserError(
                f"policy.serving.model = {wanted!r}: the server has no such model; {nearest(wanted, names)}"
            )
        return wanted or names[0]

    def get(self, path: str, until: float) -> Any:
        """Return the JSON reply; ``until`` is a time of the monotonic clock.

        :raises ServerFailed: without a valid reply in time.
        """
        return self._ask("GET", path, None, until, SMALL)

    def post(self, path: str, body: Mapping[str, Any], until: float, most: int = SMALL) -> Any:
        """Post a JSON body; the reply has at most ``most`` bytes."""
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
            raise ServerFailed(f"{path} was answered with {reply.status} ({_line(_message(raw))})", reply.status)
        return _parsed(raw, path)

    def _read(
        self, connection: http.client.HTTPConnection, reply: http.client.HTTPResponse, until: float, most: int
    ) -> bytes:
        """Read a reply and check the deadline between pieces, against servers that send slowly."""
        raw = bytearray()
        if (reply.length or 0) > most:
            raise ServerFailed(f"a reply of more than {most} bytes")
        while True:
            left = self._left(until)
            if connection.sock is not None:  # None after the server closed the connection
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
        return max(left, MIN_S)


def _parsed(raw: bytes, path: str) -> Any:
    if not raw.strip():
        return {}
    try:
        return documents.parse_json(raw, path)
    except UserError as error:
        # Some servers confirm loading an adapter in plain text.
        if path.endswith("adapter") and raw.isascii():
            return {}
        raise ServerFailed(f"{path} was answered with invalid JSON ({_line(str(error))})") from None


def _message(raw: bytes) -> str:
    """Extract the message of an error body."""
    try:
        result = documents.parse_json(raw, "reply")
    except UserError:
        return raw[:400].decode("utf-8", "replace")
    for _ in range(2):
        if isinstance(result, dict):
            result = result.get("error", result.get("message", result.get("detail", result)))
    return str(result)


def _line(text: str) -> str:
    """Shorten a server's text to one line without control characters."""
    return printable_line(text)[:200]


NAMED = "token_id:"
FLOOR = -1e4
"""nats; the minimum that a message accepts"""


class BadReply(Exception):
    """A reply without valid completions; the message is one line."""


@dataclass(frozen=True)
class RemoteText:
    """The functions of the policy's tokenizer that replies need."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab: int
    end: int


def request(
    model: str, prompt: Sequence[int], count: int, most: int, top_k: int, seed: int, end: int
) -> dict[str, Any]:
    """Return the body for ``count`` completions of at most ``most`` tokens.

    Other sampling settings are set to their neutral values, as servers and models have other defaults.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "n": count,
        "max_tokens": most,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": top_k or -1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "repeat_penalty": 1.0,
        "seed": seed % 2**31,
        "logprobs": 1,
        "stop_token_ids": [end],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": False,
    }


def reply_bytes(count: int, most: int) -> int:
    """Return the maximum size of the reply to such a request in bytes, including JSON per token."""
    return (1 << 16) + count * most * 1024


def completions(reply: object, words: RemoteText, most: int) -> list[SampledCompletion]:
    """Parse a reply; log-probabilities are empty where their token ids are unknown.

    :raises BadReply: if it is not a reply to a request for completions.

    Token ids are reported in several forms: a field ``token_ids`` (vLLM, SGLang), tokens named "token_id:17" (older
    vLLM), or tokens with an ``id`` (llama.cpp). For servers that report only texts, the ids are the policy's own if its
    tokenizer splits the text into the same pieces.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        raise BadReply("the reply has no choices")
    return [_drawn(choice, words, most) for choice in choices]


def _drawn(choice: object, words: RemoteText, most: int) -> SampledCompletion:
    if not isinstance(choice, dict) or not isinstance(text := choice.get("text"), str):
        raise BadReply("a choice has no text")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        raise BadReply("a choice's text is not Unicode")
    stopped = choice.get("finish_reason") == "stop"
    logps = _logps(choice)
    ids = _ids(choice, text, words)
    if ids is None:  # the policy's own tokens; their log-probabilities are unknown
        own = words.encode(text)
        return SampledCompletion(tuple(own[: most - stopped]), stopped and len(own) < most)
    if words.end in ids:
        ids = ids[: ids.index(words.end) + 1]
    if not ids or len(ids) > most:
        raise BadReply(f"a choice has {len(ids)} tokens, of 1 to {most}")
    has_claims = logps is not None and len(logps) >= len(ids)
    claims = tuple(logps[: len(ids)]) if logps is not None and has_claims else ()
    if ids[-1] == words.end:
        return SampledCompletion(tuple(ids[:-1]), True, claims)
    if not stopped:
        return SampledCompletion(tuple(ids), False, claims)
    # It stopped without an end token, or at another one: the log-probability of the policy's end token is unknown.
    body = ids[:-1] if not words.decode(ids[-1:]) else ids
    return SampledCompletion(tuple(body[: most - 1]), len(body) < most)


def _ids(choice: dict[str, Any], text: str, words: RemoteText) -> list[int] | None:
    """Return the token ids of a choice; None if they are not reported or do not match the text."""
    result = choice.get("token_ids")
    if result is None:
        result = _reported_ids(choice.get("logprobs"), text, words)
    if not isinstance(result, list) or not all(type(i) is int and 0 <= i < words.vocab for i in result):
        return None
    whole = words.decode([i for i in result if i != words.end])
    return result if whole.strip() == text.strip() or whole.startswith(text) else None


def _reported_ids(logprobs: object, text: str, words: RemoteText) -> list[Any] | None:
    """Extract token ids from the log-probabilities' entries."""
    if not isinstance(logprobs, dict):
        return None
    if isinstance(listed := logprobs.get("content"), list):
        return [each.get("id") if isinstance(each, dict) else None for each in listed]
    tokens = logprobs.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return None
    if tokens and all(token.startswith(NAMED) and token[len(NAMED) :].isdecimal() for token in tokens):
        return [int(token[len(NAMED) : len(NAMED) + 12]) for token in tokens]
    own = words.encode(text)
    pieces = [words.decode([i]) for i in own]
    if pieces == tokens[: len(own)] and len(tokens) - len(own) in (0, 1):
        return [*own, words.end] if len(tokens) > len(own) else own
    return None


def _logps(choice: dict[str, Any]) -> list[float] | None:
    """Return the log-probabilities of a choice's tokens in nats; None if one is not a number."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    result = logprobs.get("token_logprobs")
    if isinstance(listed := logprobs.get("content"), list):
        result = [each.get("logprob") if isinstance(each, dict) else None for each in listed]
    if not isinstance(result, list) or not all(type(p) in (int, float) and p == p for p in result):  # p != p: NaN
        return None
    return [float(min(0, max(FLOOR, p))) for p in result]  # bounded first: large ints do not convert to float
