"""An in-process server of the live page, and a client for raw requests."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from planaria.report.live_page.app import FolderFollower, InjectFault, Page
from planaria.report.live_page.http_server import Server, ServerAddress, serve

TOKEN = "a-token-of-a-test-and-of-nothing-else"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: str


class Client:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.host, self.port, self.url = parts.hostname, parts.port, url

    def request(
        self, path: str, method: str = "GET", body: str | None = None, token: str | None = TOKEN, **headers: str
    ) -> Answer:
        """Send one request on a new connection; ``headers`` by name with _ for -."""
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            own["authorization"] = f"Bearer {token}"
        line = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            line.request(method, path, body, own)
            answer = line.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())
        finally:
            line.close()

    def status(self, path: str, **headers: str) -> int:
        """The status of an answer that may be a stream; ``headers`` as in :meth:`request`."""
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        line = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            line.request("GET", path, headers=own | {"authorization": f"Bearer {TOKEN}"})
            return line.getresponse().status
        finally:
            line.close()

    def inject(self, worker: str, incarnation: int, fault: str, **headers: str) -> Answer:
        body = json.dumps({"worker": worker, "incarnation": incarnation, "fault": fault})
        return self.request("/api/runs/0/faults", "POST", body, **headers)

    def frames(
        self, run: int = 0, after: int = -1, until: Callable[[dict[str, Any]], bool] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the frames of a run until the stream ends, is up to date, or ``until`` returns true."""
        line = http.client.HTTPConnection(self.host, self.port, timeout=60)
        line.request("GET", f"/api/runs/{run}/frames?after={after}", headers={"authorization": f"Bearer {TOKEN}"})
        answer = line.getresponse()
        assert answer.status == 200, answer.read()
        try:
            event = ""
            while own := answer.readline().decode():
                if own.startswith("event: "):
                    event = own.removeprefix("event: ").strip()
                    if event == "end" or (event == "present" and until is None):
                        return
                elif own.startswith("data: ") and event == "frames":
                    for frame in json.loads(own.removeprefix("data: ")):
                        yield frame
                        if until is not None and until(frame):
                            return
        finally:
            line.close()


@contextmanager
def served(
    folders: Sequence[Path], inject_fault: InjectFault | None = None, names: tuple[str, ...] = (), token: str = TOKEN
) -> Iterator[Client]:
    """A server of these runs, for as long as this lasts."""
    announced: list[str] = []
    page = Page([FolderFollower(folder, folder.name) for folder in folders], inject_fault)
    server = Server(page, ServerAddress(names=names), token, announced.append)
    thread = threading.Thread(target=serve, args=(server,))
    thread.start()
    try:
        over = time.monotonic() + 20
        while not announced and time.monotonic() < over:
            time.sleep(0.01)
        yield Client(announced[0])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
