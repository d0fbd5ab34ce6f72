"""Runs all contestants of a comparison, some at a time, each in its own process. What is done is not done again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planaria.compare.contestant import Job, Result, finished
from planaria.errors import RunStopped

Told = Callable[[Job, int], None]
"""hears how many ticks of a job are done"""


class Contest:
    """The jobs of a comparison, in its folder."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers or len(os.sched_getaffinity(0))
        self._processes: set[subprocess.Popen[str]] = set()
        self._stopping = threading.Event()

    def run(self, jobs: Sequence[Job], told: Told) -> list[Result]:
        """The results of all ``jobs``, in their order.

        :raises RunStopped: when one failed, naming its arm, its seed and its log. Jobs that are done stay done.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self._one, job, told) for job in jobs]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        self._stopping.set()
        for process in list(self._processes):
            process.kill()

    def _one(self, job: Job, told: Told) -> Result:
        name = f"{job.arm}.{job.config.seed}"
        out, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        if (result := finished(out, job)) is not None:
            told(job, job.config.train.steps)
            return result
        if self._stopping.is_set():
            raise RunStopped("stopped")
        request = self._folder / f"{name}.job"
        request.write_text(job.model_dump_json())
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "planaria.compare.contestant", str(request), str(out)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            self._processes.add(process)
            assert process.stdout is not None
            for line in process.stdout:
                told(job, int(line))
            code = process.wait()
            self._processes.discard(process)
        result = finished(out, job)
        if code or result is None:
            raise RunStopped(f"{job.arm} with seed {job.config.seed} ended with exit code {code}; see {log}")
        told(job, job.config.train.steps)  # also if it stopped before
        request.unlink()
        log.unlink()
        return result
