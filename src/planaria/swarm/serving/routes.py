"""Starlette's routes of :mod:`planaria.swarm.serving.answering`: bounded bodies, a bounded queue, errors as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from planaria.common.errors import UserError
from planaria.common.request_body import read_body
from planaria.swarm.audit.censor import Closed, Spent
from planaria.swarm.serving.answering import Answering, parsed

LARGEST_BODY = 1 << 20
"""bytes of a request"""
ASK_S = 10.0
"""a body has so long to come"""
MOST_WAITING = 32
"""requests that wait for the model, the one that it works on among them"""


class Service:
    """What is served: a :class:`planaria.report.live_page.serving.Served`."""

    def __init__(self, answering: Answering, warn: Callable[[str], None]) -> None:
        """``warn`` hears why nothing can be answered any more."""
        self._answering, self._warn, self._waiting = answering, warn, 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/health", self._health),
        ]
        return Starlette(routes=routes)

    async def end(self) -> None:
        """Nobody waits for more than their reply."""

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("up\n")

    async def _models(self, _: Request) -> Response:
        return JSONResponse(self._answering.models())

    async def _completions(self, request: Request) -> Response:
        if self._waiting >= MOST_WAITING:
            return _refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_WAITING} requests wait already; try again later")
        self._waiting += 1
        try:
            body = await read_body(request.stream(), LARGEST_BODY, ASK_S)
            if body is None:
                return _refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {LARGEST_BODY} bytes")
            return await asyncio.to_thread(self._answer, body)
        finally:
            self._waiting -= 1

    def _answer(self, body: bytes) -> Response:
        try:
            return JSONResponse(self._answering.completions(parsed(body)))
        except UserError as error:
            return _refused(HTTPStatus.BAD_REQUEST, str(error))
        except Spent as spent:
            return _refused(HTTPStatus.TOO_MANY_REQUESTS, str(spent))
        except Closed as closed:
            self._warn(str(closed))
            return _refused(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable: what was spent is not known")


def _refused(status: HTTPStatus, why: str) -> Response:
    return JSONResponse({"error": {"message": why, "code": int(status)}}, status)
