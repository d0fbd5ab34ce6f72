"""A headless Chromium, driven by its remote debugging protocol: open a page, run scripts in it, click, look at it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 60.0


def found() -> str | None:
    """The browser's program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page of the browser."""

    def __init__(self, loop: asyncio.AbstractEventLoop, line: aiohttp.ClientWebSocketResponse) -> None:
        self._loop, self._line, self._number = loop, line, 0
        self.trouble: list[str] = []
        """errors that scripts of the page met, or that the browser had with it"""
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> Any:
        """One command, and its answer."""
        return self._loop.run_until_complete(asyncio.wait_for(self._do(method, parameters), PATIENCE_S))

    async def _do(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        await self._line.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads(await self._line.receive_str())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Runtime.exceptionThrown":
            self.trouble.append(str(message["params"]["exceptionDetails"]))
        if message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.trouble.append(str(message["params"]["entry"]))

    def leave(self) -> None:
        """Go to an empty page and drop the last page's errors: its server may have exited first."""
        self.do("Page.navigate", url="about:blank")
        self.trouble.clear()

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False, still: bool = False) -> None:
        """Load a page in a window of this size."""
        phone = width < 600
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        features += [{"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}]
        self.do("Emulation.setEmulatedMedia", features=features)
        self.do("Page.navigate", url="about:blank")
        self.do("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, after its promise is resolved."""
        message = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in message, message
        return message["result"].get("value")

    def until(self, script: str, patience_s: float = PATIENCE_S) -> Any:
        """Wait until an expression is true and return it; it may raise errors until the page is loaded."""
        over = time.monotonic() + patience_s
        expression = (
            f"(() => {{ try {{ const v = {script}; return v instanceof Node || v; }} catch {{ return null }} }})()"
        )
        while not (value := self.run(expression)):
            assert time.monotonic() < over, f"never: {script}; {self.trouble}"
            time.sleep(0.05)
        return value

    def click(self, query: str) -> None:
        """Click on the middle of an element."""
        box = self.run(
            f"(() => {{ const b = document.querySelector({query!r}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, code: str = "", modifiers: int = 0) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            own = text if kind == "keyDown" else {}
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, modifiers=modifiers, **own)


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A browser with one empty page, which ends with this."""
    program = found()
    assert program is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    try:
        port = _port(profile / "DevToolsActivePort", process)
        session, line = loop.run_until_complete(_connect(port))
        try:
            yield Tab(loop, line)
        finally:
            loop.run_until_complete(session.close())
    finally:
        process.terminate()
        process.wait(20)
        loop.close()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    over = time.monotonic() + PATIENCE_S
    while not (file.exists() and file.read_text().strip()):
        assert process.poll() is None and time.monotonic() < over, "the browser does not start"
        time.sleep(0.05)
    return int(file.read_text().split()[0])


async def _connect(port: int) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    session = aiohttp.ClientSession()
    while True:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        if pages:
            break
        await asyncio.sleep(0.05)
    return session, await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=64 << 20)
