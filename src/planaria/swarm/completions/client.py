"""Client of OpenAI-compatible servers: bounded requests, and completions as token ids."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from planaria.common import documents
from planaria.common.errors import UserError, suggestion
from planaria.common.printing import printable_line
from planaria.swarm.config.policy_config import PolicyConfig
from planaria.swarm.policy.base import Policy, SampledCompletion

MIN_S = 0.05
PIECE = 1 << 16
SMALL = 1 << 20
"""maximum bytes of a reply without completions"""
OPENING_S = 10.0
"""time limit for listing the server's models"""


class ServerFailed(Exception):
    """A request failed; the message is one line.

    ``status`` is the HTTP status, or 0 without a reply.
    """

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
            raise UserError(f"policy.server = {config.server!r}: not the URL of a server; use http://HOST:PORT")
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
                    "token in it; export it, or remove the setting"
                )
            self._headers["Authorization"] = f"Bearer {token}"

    def model(self, wanted: str) -> str:
        """Return the model name to request: ``wanted``, or the server's first model if it is empty.

        :raises UserError: if the server cannot be reached or lacks the model.
        """
        try:
            result = self.get("/v1/models", time.monotonic() + OPENING_S)
        except ServerFailed as error:
            raise UserError(
                f"policy.server = {self.url!r}: {error}; check its URL and that the server is running"
            ) from None
        listed = result.get("data") if isinstance(result, dict) else None
        names = [each["id"] for each in listed or () if isinstance(each, dict) and isinstance(each.get("id"), str)]
        if not names:
            raise UserError(f"policy.server = {self.url!r}: lists no models; use an OpenAI-compatible server")
        if wanted and wanted not in names:
            raise UserError(
                f"policy.serving.model = {wanted!r}: the server has no such model; {suggestion(wanted, names)}"
            )
        return wanted or names[0]

    def get(self, path: str, until: float) -> Any:
        """Return the JSON reply; ``until`` is a time of the monotonic clock.

        :raises ServerFailed: without a valid reply in time.
        """
        return self._request("GET", path, None, until, SMALL)

    def post(self, path: str, body: Mapping[str, Any], until: float, limit: int = SMALL) -> Any:
        """Post a JSON body; the reply has at most ``limit`` bytes."""
        return self._request("POST", path, json.dumps(body).encode(), until, limit)

    def _request(self, method: str, path: str, body: bytes | None, until: float, limit: int) -> Any:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._remaining_s(until))
        try:
            connection.request(method, self._path + path, body, self._headers)
            if connection.sock is not None:
                connection.sock.settimeout(self._remaining_s(until))
            reply = connection.getresponse()
            raw = self._read(connection, reply, until, limit)
        except TimeoutError:
            raise ServerFailed(f"{path} took too long") from None
        except (OSError, http.client.HTTPException) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise ServerFailed(f"{path} failed ({_line(reason)})") from None
        finally:
            connection.close()
        if reply.status != 200:
            raise ServerFailed(f"{path} was answered with {reply.status} ({_line(_error_message(raw))})", reply.status)
        return _parse_reply(raw, path)

    def _read(
        self, connection: http.client.HTTPConnection, reply: http.client.HTTPResponse, until: float, limit: int
    ) -> bytes:
        """Read a reply and check the deadline between pieces, against servers that send slowly."""
        raw = bytearray()
        if (reply.length or 0) > limit:
            raise ServerFailed(f"a reply of more than {limit} bytes")
        while True:
            left = self._remaining_s(until)
            if connection.sock is not None:  # None after the server closed the connection
                connection.sock.settimeout(left)
            piece = reply.read1(PIECE)
            raw += piece
            if len(raw) > limit:
                raise ServerFailed(f"a reply of more than {limit} bytes")
            if not piece:
                return bytes(raw)

    @staticmethod
    def _remaining_s(until: float) -> float:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return max(left, MIN_S)


def _parse_reply(raw: bytes, path: str) -> Any:
    if not raw.strip():
        return {}
    try:
        return documents.parse_json(raw, path)
    except UserError as error:
        # Some servers confirm loading an adapter in plain text.
        if path.endswith("adapter") and raw.isascii():
            return {}
        raise ServerFailed(f"{path} was answered with invalid JSON ({_line(str(error))})") from None


def _error_message(raw: bytes) -> str:
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


TOKEN_ID_PREFIX = "token_id:"
FLOOR = -1e4
"""nats; the minimum that a message accepts"""


class BadReply(Exception):
    """A reply without valid completions; the message is one line."""


def request_body(
    model: str, prompt: Sequence[int], count: int, limit: int, top_k: int, seed: int, end: int
) -> dict[str, Any]:
    """Return the body for ``count`` completions of at most ``limit`` tokens.

    Other sampling settings are set to their neutral values, as servers and models have other defaults.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "n": count,
        "max_tokens": limit,
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


def max_reply_bytes(count: int, limit: int) -> int:
    """Return the maximum size of the reply to such a request in bytes, including JSON per token."""
    return (1 << 16) + count * limit * 1024


def parse_completions(reply: object, policy: Policy, limit: int) -> list[SampledCompletion]:
    """Parse a reply; log-probabilities are empty where their token ids are unknown.

    :raises BadReply: if it is not a reply to a request for completions.

    Token ids are reported in several forms: a field ``token_ids`` (vLLM, SGLang), tokens named "token_id:17" (older
    vLLM), or tokens with an ``id`` (llama.cpp). For servers that report only texts, the ids are the policy's own if its
    tokenizer splits the text into the same pieces.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        raise BadReply("the reply has no choices")
    return [_parse_choice(choice, policy, limit) for choice in choices]


def _parse_choice(choice: object, policy: Policy, limit: int) -> SampledCompletion:
    if not isinstance(choice, dict) or not isinstance(text := choice.get("text"), str):
        raise BadReply("a choice has no text")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        raise BadReply("a choice's text is not Unicode")
    stopped = choice.get("finish_reason") == "stop"
    logps = _logps(choice)
    ids = _ids(choice, text, policy)
    if ids is None:  # the policy's own tokens; their log-probabilities are unknown
        own = policy.encode(text)
        return SampledCompletion(tuple(own[: limit - stopped]), stopped and len(own) < limit)
    if policy.end in ids:
        ids = ids[: ids.index(policy.end) + 1]
    if not ids or len(ids) > limit:
        raise BadReply(f"a choice has {len(ids)} tokens, of 1 to {limit}")
    has_claims = logps is not None and len(logps) >= len(ids)
    claims = tuple(logps[: len(ids)]) if logps is not None and has_claims else ()
    if ids[-1] == policy.end:
        return SampledCompletion(tuple(ids[:-1]), True, claims)
    if not stopped:
        return SampledCompletion(tuple(ids), False, claims)
    # It stopped without an end token, or at another one: the log-probability of the policy's end token is unknown.
    body = ids[:-1] if not policy.decode(ids[-1:]) else ids
    return SampledCompletion(tuple(body[: limit - 1]), len(body) < limit)


def _ids(choice: dict[str, Any], text: str, policy: Policy) -> list[int] | None:
    """Return the token ids of a choice, or None if they are not reported or do not match the text."""
    result = choice.get("token_ids")
    if result is None:
        result = _reported_ids(choice.get("logprobs"), text, policy)
    if not isinstance(result, list) or not all(type(i) is int and 0 <= i < policy.vocab for i in result):
        return None
    whole = policy.decode([i for i in result if i != policy.end])
    return result if whole.strip() == text.strip() or whole.startswith(text) else None


def _reported_ids(logprobs: object, text: str, policy: Policy) -> list[Any] | None:
    """Extract token ids from the log-probabilities' entries."""
    if not isinstance(logprobs, dict):
        return None
    if isinstance(listed := logprobs.get("content"), list):
        return [each.get("id") if isinstance(each, dict) else None for each in listed]
    tokens = logprobs.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return None
    if tokens and all(
        token.startswith(TOKEN_ID_PREFIX) and token[len(TOKEN_ID_PREFIX) :].isdecimal() for token in tokens
    ):
        return [int(token[len(TOKEN_ID_PREFIX) : len(TOKEN_ID_PREFIX) + 12]) for token in tokens]
    own = policy.encode(text)
    pieces = [policy.decode([i]) for i in own]
    if pieces == tokens[: len(own)] and len(tokens) - len(own) in (0, 1):
        return [*own, policy.end] if len(tokens) > len(own) else own
    return None


def _logps(choice: dict[str, Any]) -> list[float] | None:
    """Return the log-probabilities of a choice's tokens in nats, or None if one is not a number."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    result = logprobs.get("token_logprobs")
    if isinstance(listed := logprobs.get("content"), list):
        result = [each.get("logprob") if isinstance(each, dict) else None for each in listed]
    if not isinstance(result, list) or not all(type(p) in (int, float) and p == p for p in result):  # p != p: NaN
        return None
    return [float(min(0, max(FLOOR, p))) for p in result]  # bounded first: large ints do not convert to float
