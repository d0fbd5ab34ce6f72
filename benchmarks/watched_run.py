"""A run that ``planaria train`` leads in a process of its own, watched by its log."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import RUNS

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig


class Training:
    """A run that is trained by a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder = process, folder

    def history(self) -> Sequence[tuple[float, Any]]:
        """Events and decisions so far, each with its moment."""
        from planaria.control.logs import read_run

        return read_run(self.folder).history

    def facts(self) -> list[Any]:
        return [fact for _, fact in self.history()]

    def commits(self) -> int:
        from planaria.control import decisions as d

        return sum(isinstance(fact, d.Commit) for fact in self.facts())

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 120.0, every: float = 0.2) -> None:
        """Wait until ``condition``, looking ``every`` so often; RuntimeError after so many seconds, or when it ends."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"{self.folder}: no {what} in {seconds:g} s")
            time.sleep(every)

    def steps_more(self, steps: int) -> None:
        """Wait until so many more steps are committed."""
        wanted = self.commits() + steps
        self.wait(lambda: self.commits() >= wanted, f"{steps} steps")

    def pace(self, seconds: float) -> float:
        """Steps a second, measured over so many seconds."""
        before, began = self.commits(), time.monotonic()
        time.sleep(seconds)
        return (self.commits() - before) / (time.monotonic() - began)


@contextmanager
def training(config: RunConfig) -> Iterator[Training]:
    """Train until this ends."""
    from planaria.config import recipe as recipes

    folder = RUNS / config.name
    shutil.rmtree(folder, ignore_errors=True)
    file = RUNS / f"{config.name}.toml"
    file.write_text(recipes.dump(config))
    process = subprocess.Popen([sys.executable, "-m", "planaria", "train", str(file), "--quiet"])
    run = Training(process, folder)
    try:
        run.wait(lambda: (folder / "events.jsonl").exists() and run.commits() >= 20, "20 steps")
        yield run
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
