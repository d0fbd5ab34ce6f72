"""Holders of a shared log as separate processes at free ports of this machine."""

from __future__ import annotations

import secrets
import signal
from contextlib import ExitStack
from pathlib import Path

from benchmarks.processes import free_port

from support.processes import Command
from support.waiting import until

LOG = "log/{:012d}".format
"""path of a batch"""


def written_key(file: Path) -> Path:
    """Write a new key."""
    file.write_text(secrets.token_hex(32))
    file.chmod(0o600)
    return file


class Holders:
    """The holders of one run, each with its own directory."""

    def __init__(self, folder: Path, key: Path, running: ExitStack, run: str = "run", count: int = 3) -> None:
        self.at = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.url, self.run = f"quorum://{','.join(self.at)}", run
        self.key, self._folder, self._running = key, folder, running
        self.processes = dict[int, Command]()

    @property
    def location(self) -> str:
        return f"{self.url}/{self.run}"

    def directory(self, number: int) -> Path:
        return self._folder / f"holder{number}"

    def objects(self, number: int) -> Path:
        """Return the folder of a holder's objects."""
        (folder,) = (self.directory(number) / "holders" / self.run).iterdir()
        return folder / "objects"

    def start(self, number: int) -> None:
        """Start a holder, perhaps again with its folder, and wait until it listens."""
        self.directory(number).mkdir(exist_ok=True)
        words = "join", self.location, "--hold", self.at[number], "--key-file", str(self.key)
        process = self.processes[number] = Command(*words, cwd=self.directory(number))
        self._running.callback(process.close)
        self._running.callback(process.kill)
        line = process.line()
        assert line.startswith(f"holding       the log of {self.run} at {self.at[number]}"), (line, process.poll())

    def start_all(self) -> Holders:
        for number in range(len(self.at)):
            self.start(number)
        return self

    def kill(self, number: int) -> None:
        self.processes[number].send_signal(signal.SIGKILL)
        self.processes[number].wait(20.0)

    def stop(self, number: int) -> None:
        """Stop a holder (SIGSTOP), and wait until all its threads have stopped."""
        process = self.processes[number]
        process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{process.pid}/task")
        until(lambda: all(") T" in (one / "stat").read_text() for one in threads.iterdir()))
