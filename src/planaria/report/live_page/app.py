"""The application of the live page: its routes, and the followers of the shown folders.

Folders are read in threads, outside the server's event loop.
"""

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
from planaria.report.live_page.frames import SCHEMA, Frames, StateChange
from planaria.report.live_page.limits import (
    KEEP_ALIVE_S,
    MAX_BATCH,
    MAX_BODY,
    MAX_STREAMS,
    POLL_S,
    READY_S,
    REQUEST_TIMEOUT_S,
    SHUTDOWN_S,
)
from planaria.report.live_page.page_source import PageSource, source_of
from planaria.report.observe import prometheus
from planaria.report.observe.prometheus import CONTENT_TYPE, MetricSample
from planaria.report.observe.tally import RunTally

InjectFault = Callable[[Path, str, int, str], str]
"""injects a fault: (run's folder, worker, incarnation, fault) → result; raises UserError if there is no such worker"""
PageFault = Literal["kill", "freeze", "slow", "cut"]
FAULTS: tuple[str, ...] = get_args(PageFault)
MAX_FACTS = 2_000
"""maximum facts folded before watchers are notified"""
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {file.name: file.read_bytes() for file in (resources.files(__package__) / "static").iterdir()}
"""files of the page, by name"""


class FolderFollower:
    """A run, comparison or swarm on the page: its source, frames and watchers."""

    def __init__(self, folder: Path, name: str) -> None:
        """:raises UserError: if ``folder`` holds nothing that has a page."""
        self.folder, self.name = folder, name
        self.source: PageSource = source_of(folder)
        self.frames = Frames()
        self.frames.add(self.source.initial_frame())
        self.caught_up = False
        """whether everything that existed at the start has been read"""
        self.trouble = ""
        """reason for which reading stopped"""
        self.closing = False
        """whether the server is stopping"""
        self.over = False
        """whether no more frames will follow"""
        self._changed = asyncio.Condition()
        self._version = 0
        """number of changes"""
        self._message = (-1, -1), b""

    async def follow(self) -> None:
        """Read until the log is broken, or the server stops and everything has been read."""
        while not self.trouble:
            closing = self.closing
            grew, more = await asyncio.to_thread(self._read)
            if grew or self.caught_up is more:
                self.caught_up = self.caught_up or not more
                await self.notify()
            if closing and not more:
                break
            if not more:
                await asyncio.sleep(POLL_S)
        self.over = True
        await self.notify()

    def _read(self) -> tuple[bool, bool]:
        """Fold at most :data:`MAX_FACTS` facts; return whether there were any, and whether there are more."""
        folded = 0
        try:
            for frame in self.source.read(MAX_FACTS):
                folded += 1
                if frame is not None:
                    self.frames.add(frame)
        except (UserError, OSError) as error:
            self.trouble = str(error)
            return True, False
        return folded > 0, folded == MAX_FACTS

    def on_reading_failed(self, following: asyncio.Task[None]) -> None:
        """Show watchers the internal error that ended the task ``following``, which reads the log."""
        error = None if following.cancelled() else following.exception()
        if error is not None:
            self.trouble = f"this page cannot follow it ({type(error).__name__}: {error})"
            self._version += 1

    async def notify(self) -> None:
        """Wake all watchers."""
        self._version += 1
        async with self._changed:
            self._changed.notify_all()

    async def frames_since(self, number: int) -> AsyncIterator[list[StateChange]]:
        """Yield the frames after ``number`` in batches as they come; an empty batch marks other changes or idleness."""
        reported = -1
        while True:
            version, frames = self._version, self.frames.after(number, MAX_BATCH)
            if frames:
                number = frames[-1].number
                yield frames
            elif version != reported:
                reported = version
                yield []
            elif self.over or self.trouble:
                return
            else:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S), self._changed:
                        if self._version == version:
                            await self._changed.wait()
                except TimeoutError:
                    reported = -1

    def message(self, frames: list[StateChange]) -> bytes:
        """Return frames as an event of a stream; the last one is cached, since current watchers share it."""
        numbers = frames[0].number, frames[-1].number
        if self._message[0] != numbers:
            data = ",".join(frame.text for frame in frames)
            self._message = numbers, f"id: {numbers[1]}\nevent: frames\ndata: [{data}]\n\n".encode()
        return self._message[1]

    @property
    def age_s(self) -> float:
        """Seconds since the last write."""
        return self.source.age_s

    def unready_reason(self) -> str:
        """Return why no new frames of this run can be expected, or an empty string if they can."""
        if self.trouble:
            return "its log is broken"
        if not self.source.began:
            return "it has not started"
        if over := self.source.state.get("over"):
            return f"it is over: {over}"
        return f"nothing new for more than {READY_S:g} s" if self.age_s > READY_S else ""


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
        unready = any(run.unready_reason() for run in self._runs)
        return PlainTextResponse("ready\n") if not unready else _rejection(HTTPStatus.SERVICE_UNAVAILABLE, "not ready")

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
