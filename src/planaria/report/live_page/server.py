"""The server of the live page: starlette's routes, and uvicorn's server within limits."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from planaria.common.documents import read_body
from planaria.common.errors import UserError
from planaria.report.live_page.frames import SCHEMA
from planaria.report.live_page.limits import MAX_BODY, MAX_STREAMS, REQUEST_TIMEOUT_S, SHUTDOWN_S
from planaria.report.live_page.run_source import FolderFollower
from planaria.report.observe import prometheus
from planaria.report.observe.prometheus import CONTENT_TYPE, MetricSample
from planaria.report.observe.tally import RunTally

InjectFault = Callable[[Path, str, int, str], str]
"""injects a fault: (run's folder, worker, incarnation, fault) → result; raises UserError if there is no such worker"""
PageFault = Literal["kill", "freeze", "slow", "cut"]
FAULTS: tuple[str, ...] = get_args(PageFault)
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {file.name: file.read_bytes() for file in (resources.files(__package__) / "static").iterdir()}
"""files of the page, by name"""


class Page:
    """The server's routes; with ``inject_fault``, watchers may inject faults."""

    def __init__(self, runs: Sequence[FolderFollower], inject_fault: InjectFault | None) -> None:
        self._runs, self._inject = runs, inject_fault
        self._streams = 0
        self._tasks: list[asyncio.Task[None]] = []

    def app(self) -> Starlette:
        routes = [
            Route("/", self._page),
            Route("/static/{name}", self._static),
            Route("/api/runs", self._list),
            Route("/api/runs/{run:int}/frames", self._frames),
            Route("/api/runs/{run:int}/faults", self._inject_fault, methods=["POST"]),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
        ]
        return Starlette(routes=routes, lifespan=self._follow_runs)

    @asynccontextmanager
    async def _follow_runs(self, _: Starlette) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(run.follow()) for run in self._runs]
        for run, task in zip(self._runs, self._tasks, strict=True):
            task.add_done_callback(run.on_reading_failed)
        yield
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self) -> None:
        """Send watchers the last frames and the end, for at most :data:`SHUTDOWN_S`."""
        for run in self._runs:
            run.closing = True
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await asyncio.wait(self._tasks)
                while self._streams:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return

    # ---- the page

    async def _page(self, _: Request) -> Response:
        return self._file("index.html")

    async def _static(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if name not in FILES:
            return _rejection(HTTPStatus.NOT_FOUND, "no such file")
        return Response(FILES[name], media_type=KINDS.get(Path(name).suffix, "application/octet-stream"))

    # ---- runs

    async def _list(self, _: Request) -> Response:
        runs = [{"id": i, "name": run.name} for i, run in enumerate(self._runs)]
        return JSONResponse({"schema": SCHEMA, "runs": runs, "faults": FAULTS if self._inject else []})

    def _run(self, request: Request) -> FolderFollower | None:
        number = request.path_params["run"]
        return self._runs[number] if number < len(self._runs) else None

    async def _frames(self, request: Request) -> Response:
        run = self._run(request)
        if run is None:
            return _rejection(HTTPStatus.NOT_FOUND, "no such run")
        if self._streams >= MAX_STREAMS:
            return _rejection(HTTPStatus.SERVICE_UNAVAILABLE, f"all {MAX_STREAMS} streams are in use; try again later")
        after = request.headers.get("last-event-id", request.query_params.get("after", "-1"))
        number = int(after) if re.fullmatch(r"-1|\d{1,12}", after) else -1
        return StreamingResponse(self._stream(run, number), media_type="text/event-stream")

    async def _stream(self, run: FolderFollower, number: int) -> AsyncIterator[str | bytes]:
        self._streams += 1
        try:
            yield "retry: 1000\n\n"
            caught_up = False
            async for frames in run.frames_since(number):
                if frames:
                    number = frames[-1].number
                    yield run.message(frames)
                else:
                    yield ": keep-alive\n\n"
                if run.caught_up and not caught_up and number == run.frames.last:
                    caught_up = True
                    yield "event: present\ndata: {}\n\n"
            ended = json.dumps({"trouble": run.trouble})
            yield f"event: end\ndata: {ended}\n\n"
        finally:
            self._streams -= 1

    async def _inject_fault(self, request: Request) -> Response:
        run = self._run(request)
        if self._inject is None:
            return _rejection(HTTPStatus.FORBIDDEN, "this page is read-only; faults need --live-chaos")
        if run is None:
            return _rejection(HTTPStatus.NOT_FOUND, "no such run")
        if run.source.tally is None:
            return _rejection(HTTPStatus.CONFLICT, "faults are for runs; this is another kind of page")
        requested = await _fault_request(request)
        if requested is None:
            return _rejection(HTTPStatus.BAD_REQUEST, f"set worker, incarnation and fault ({', '.join(FAULTS)})")
        try:
            done = await asyncio.to_thread(
                self._inject, run.folder, requested.worker, requested.incarnation, requested.fault
            )
        except UserError as error:
            return JSONResponse({"refused": str(error)}, HTTPStatus.CONFLICT)
        return JSONResponse({"done": done})

    # ---- monitoring

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("up\n")

    async def _ready(self, _: Request) -> Response:
        why = [f"{run.unready_reason()}" for run in self._runs if run.unready_reason()]
        return PlainTextResponse("ready\n") if not why else _rejection(HTTPStatus.SERVICE_UNAVAILABLE, "not ready")

    async def _metrics(self, _: Request) -> Response:
        text = exposition([(r.name, r.source.tally, r.age_s) for r in self._runs if r.source.tally], self._streams)
        return Response(text, media_type=CONTENT_TYPE)


class FaultRequest(BaseModel):
    """The body of a request to inject a fault. Other keys are ignored."""

    model_config = ConfigDict(strict=True)

    worker: Annotated[str, Field(max_length=200)]
    incarnation: Annotated[int, Field(ge=0, lt=1 << 31)]
    fault: PageFault


async def _fault_request(request: Request) -> FaultRequest | None:
    """Return the fault that a request asks for, or None if its body is invalid."""
    body = await read_body(request.stream(), MAX_BODY, REQUEST_TIMEOUT_S)
    try:
        return None if body is None else FaultRequest.model_validate_json(body)
    except ValidationError:
        return None


def _rejection(status: HTTPStatus, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status)


def exposition(runs: Sequence[tuple[str, RunTally, float]], watchers: int) -> str:
    """Return the answer to ``/metrics``: the metrics of all runs, and the server's own.

    :param runs: name, tally, and seconds since the last write to the log; equal names are numbered
    """
    uses = Counter(name for name, _, _ in runs)
    names = [name if uses[name] == 1 else f"{name} ({index})" for index, (name, _, _) in enumerate(runs)]
    ages = [MetricSample(age, {"run": name}) for name, (_, _, age) in zip(names, runs, strict=True)]
    server_metrics = [
        *prometheus.lines("planaria_watchers", "gauge", "Open streams.", [MetricSample(watchers)]),
        *prometheus.lines("planaria_log_age_seconds", "gauge", "Seconds since the last write to the run's log.", ages),
    ]
    tallies = {name: tally for name, (_, tally, _) in zip(names, runs, strict=True)}
    return prometheus.exposition(tallies) + "".join(f"{line}\n" for line in server_metrics)
