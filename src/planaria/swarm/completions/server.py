"""Server side of the completions protocol: bounded requests and their replies.

The counterpart of :mod:`planaria.swarm.completions.client`. Sampling settings that this server does not support are
refused unless they have their neutral value.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from starlette import requests
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from planaria.common import documents
from planaria.common.documents import read_body
from planaria.common.errors import UserError
from planaria.swarm.audit.censor import BudgetSpent, Censor, LedgerUnusable
from planaria.swarm.audit.leakage_measurement import encode_chat
from planaria.swarm.policy.base import Policy, SampledCompletion

MAX_REPLIES = 64
MAX_TOKENS = 4096
MAX_PROMPT = 1 << 20
"""maximum characters or ids of a prompt"""
FIX = "fix the request"
One = Annotated[float, Field(ge=1, le=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class CompletionRequest(BaseModel):
    """A request for completions; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

    prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | Annotated[list[int], Field(max_length=MAX_PROMPT)]
    model: str = ""
    n: Annotated[int, Field(ge=1, le=MAX_REPLIES)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 16
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1 << 24)] = -1
    seed: Seed | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | bool | None = None
    return_token_ids: bool = False
    top_p: One = 1.0
    min_p: Zero = 0.0
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0
    repetition_penalty: One = 1.0
    repeat_penalty: One = 1.0
    stream: Literal[False] = False
    echo: Literal[False] = False
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: None = None
    stop: None = None


def parse_request(raw: bytes) -> CompletionRequest:
    """Parse a request; UserError of one line if it is invalid."""
    return documents.parse_model(CompletionRequest, raw, "request", FIX)


class CompletionsApi:
    """Answers requests with a policy, one at a time, optionally behind a censor."""

    def __init__(self, policy: Policy, name: str, censor: Censor | None = None) -> None:
        self.name = name
        self._policy = policy
        self._censor = censor
        self._lock = threading.Lock()

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "planaria"}]}

    def completions(self, requested: CompletionRequest) -> dict[str, Any]:
        """Return the reply to a request.

        :raises UserError: for another model, invalid ids, or more tokens than the model reads.
        :raises planaria.swarm.audit.censor.BudgetSpent: if a budget would be exceeded.
        :raises planaria.swarm.audit.censor.LedgerUnusable: if the ledger cannot be used.
        """
        if requested.model not in ("", self.name):
            raise UserError(f"request: model {documents.quote(requested.model)} is not here; ask for {self.name!r}")
        ids = self._ids(requested)
        drawn = self._draw_released(requested, ids)
        choices = [self._choice(requested, index, completion) for index, completion in enumerate(drawn)]
        tokens = sum(len(completion.ids) + completion.ended for completion in drawn if completion is not None)
        usage = {"prompt_tokens": len(ids), "completion_tokens": tokens, "total_tokens": len(ids) + tokens}
        return {"object": "text_completion", "model": self.name, "choices": choices, "usage": usage}

    def _ids(self, requested: CompletionRequest) -> list[int]:
        ids = encode_chat(self._policy, requested.prompt) if isinstance(requested.prompt, str) else requested.prompt
        if not ids or not all(0 <= i < self._policy.vocab for i in ids):
            raise UserError(f"request: prompt has no ids, or some outside 0 … {self._policy.vocab - 1}; {FIX}")
        if len(ids) + requested.max_tokens > self._policy.context:
            takes = f"{len(ids)} tokens and {requested.max_tokens} of max_tokens"
            raise UserError(f"request: prompt takes {takes}, the model reads {self._policy.context}; {FIX}")
        return ids

    def _draw_released(self, requested: CompletionRequest, ids: list[int]) -> list[SampledCompletion | None]:
        """Return the completions, with None for a censored one."""
        if (censor := self._censor) is None:
            return [*self._draw(requested, ids, requested.n)]
        text = requested.prompt if isinstance(requested.prompt, str) else self._policy.decode(ids)
        given = censor.decide_replies(text, requested.n)
        drawn = iter(self._draw(requested, ids, sum(given)))
        results = [next(drawn) if completion else None for completion in given]
        return [
            completion if completion and censor.decide_completed(text, self._policy.decode(completion.ids)) else None
            for completion in results
        ]

    def _draw(self, requested: CompletionRequest, ids: list[int], count: int) -> list[SampledCompletion]:
        if not count:
            return []
        seed = secrets.randbits(63) if requested.seed is None else requested.seed
        generator, top_k = torch.Generator().manual_seed(seed), max(0, requested.top_k)
        with self._lock:
            (result,) = self._policy.sample([ids], count, requested.max_tokens, requested.temperature, top_k, generator)
        return result

    def _choice(self, requested: CompletionRequest, index: int, drawn: SampledCompletion | None) -> dict[str, Any]:
        """Return one reply; a censored one is empty and without ids, so that no client takes it for a sample."""
        reply: dict[str, Any] = {"index": index, "text": "", "finish_reason": "stop", "logprobs": None}
        if drawn is None:
            return reply
        ids = [*drawn.ids, *([self._policy.end] if drawn.ended else [])]
        reply |= {"text": self._policy.decode(drawn.ids), "finish_reason": "stop" if drawn.ended else "length"}
        if requested.logprobs not in (None, False):
            tokens = [self._policy.decode([i]) for i in ids]
            reply["logprobs"] = {"tokens": tokens, "token_logprobs": list(drawn.logps)}
        return reply | {"token_ids": ids} if requested.return_token_ids else reply


LARGEST_BODY = 1 << 20
"""maximum bytes of a request"""
ASK_S = 10.0
"""time limit for receiving a body"""
MAX_WAITING = 32
"""maximum number of requests in progress or waiting"""


class Service:
    """The HTTP service: a :class:`planaria.report.live_page.http_server.Application`."""

    def __init__(self, api: CompletionsApi, warn: Callable[[str], None]) -> None:
        """``warn`` receives the reason when the ledger cannot be used."""
        self._api = api
        self._warn = warn
        self._waiting = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/health", self._health),
        ]
        return Starlette(routes=routes)

    async def end(self) -> None:
        """Do nothing: requests end by themselves."""

    async def _health(self, _: requests.Request) -> Response:
        return PlainTextResponse("up\n")

    async def _models(self, _: requests.Request) -> Response:
        return JSONResponse(self._api.models())

    async def _completions(self, request: requests.Request) -> Response:
        if self._waiting >= MAX_WAITING:
            return _error_response(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_WAITING} requests wait already; try again later"
            )
        self._waiting += 1
        try:
            body = await read_body(request.stream(), LARGEST_BODY, ASK_S)
            if body is None:
                return _error_response(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {LARGEST_BODY} bytes"
                )
            return await asyncio.to_thread(self._answer, body)
        finally:
            self._waiting -= 1

    def _answer(self, body: bytes) -> Response:
        try:
            return JSONResponse(self._api.completions(parse_request(body)))
        except UserError as error:
            return _error_response(HTTPStatus.BAD_REQUEST, str(error))
        except BudgetSpent as spent:
            return _error_response(HTTPStatus.TOO_MANY_REQUESTS, str(spent))
        except LedgerUnusable as closed:
            self._warn(str(closed))
            return _error_response(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable: the spent budget is not known")


def _error_response(status: HTTPStatus, why: str) -> Response:
    return JSONResponse({"error": {"message": why, "code": int(status)}}, status)
