"""Jobs: one process each, a limited number at a time. Finished jobs are not repeated; no process is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from planaria.common.signals import describe_exit
from planaria.config.bounds import Natural, Seconds
from planaria.config.schema import Section
from planaria.runtime.fleet.process import die_with_parent

POLL_S = 0.1
GRACE_S = 30.0
"""seconds to wait for processes to exit after SIGTERM"""
_TAIL = 4096
"""bytes at the end of a log in which to look for the last line"""


class JobSettings(Section):
    """Settings of trials that run as jobs."""

    workers: Natural = 0
    """processes at the same time; 0 is one for each core"""
    patience_s: Annotated[Seconds, Field(gt=0)] = 3600.0
    """seconds without progress after which a process is killed"""


@dataclass(frozen=True)
class Job:
    """Work for a separate process. Its progress is on disk, so another process can resume it."""

    name: str
    """unique name"""
    steps: int
    """total work"""
    log: Path
    """output of its processes"""
    done: Callable[[], bool]
    """returns whether its result exists"""
    reached: Callable[[], int]
    """returns the steps done; may be called while its process runs"""
    pulse: Callable[[], object]
    """returns a value that changes while its process makes progress"""
    command: Callable[[], Sequence[str]]
    """prepares a process that starts or resumes it; returns Python's arguments"""


class Watcher(Protocol):
    """Receiver of jobs' progress."""

    def print_note(self, line: str) -> None:
        """Handle an event of a job."""

    def on_progress(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
        """Handle progress: ``reached`` of all ``steps``; ``running``: name → the same of each running job."""


def run_jobs(
    title: str,
    jobs: Sequence[Job],
    processes: JobSettings,
    watcher: Watcher,
    on_give_up: Callable[[Job, str], None],
    retries: int = 0,
) -> None:
    """Run all jobs that are not done. None of their processes outlives this call.

    A job whose process dies is resumed ``retries`` times. Then ``on_give_up`` receives the job and its ending, and
    may raise to stop all jobs.
    """
    reached = {job.name: job.steps if job.done() else job.reached() for job in jobs}
    waiting = deque((job, 1) for job in jobs if not job.done())
    running, done, steps = list[_Attempt](), len(jobs) - len(waiting), sum(job.steps for job in jobs)
    if done:
        watcher.print_note(f"{done}/{len(jobs)} {title}: kept from before")
    try:
        while waiting or running:
            while waiting and len(running) < (processes.workers or len(os.sched_getaffinity(0))):
                running.append(_Attempt(*waiting.popleft()))
            reached |= {attempt.job.name: attempt.job.reached() for attempt in running}
            progress = {attempt.job.name: (reached[attempt.job.name], attempt.job.steps) for attempt in running}
            watcher.on_progress(f"{title}, {done} of {len(jobs)} done", sum(reached.values()), steps, progress)
            time.sleep(POLL_S)
            for attempt in [attempt for attempt in running if attempt.is_over(processes.patience_s)]:
                running.remove(attempt)
                name = attempt.job.name
                if attempt.job.done():
                    reached[name], done = attempt.job.steps, done + 1
                    watcher.print_note(f"{done}/{len(jobs)} {title}: {name}")
                elif attempt.number <= retries:
                    watcher.print_note(f"{name}: {attempt.ending()}; resumed")
                    waiting.appendleft((attempt.job, attempt.number + 1))
                else:
                    watcher.print_note(f"{name}: {attempt.ending()}; given up after {attempt.number} attempts")
                    on_give_up(attempt.job, attempt.ending())
    finally:
        _stop([attempt.process for attempt in running])


class _Attempt:
    """A running process of a job."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number, self._stuck = job, number, ""
        words = job.command()
        with job.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                preexec_fn=die_with_parent,
                process_group=0,  # a terminal's Ctrl-C reaches only this process, which terminates them once
            )
        self._pulse, self._changed = job.pulse(), time.monotonic()

    def is_over(self, patience_s: float) -> bool:
        """Return whether it has exited; kill it if it made no progress for ``patience_s``."""
        pulse, now = self.job.pulse(), time.monotonic()
        if pulse != self._pulse:
            self._pulse, self._changed = pulse, now
        elif now - self._changed > patience_s and not self._stuck:
            self._stuck = f"killed after {patience_s:g} s without progress"
            self.process.kill()
        return self.process.poll() is not None

    def ending(self) -> str:
        """Return how it ended, with the last line of its log."""
        with self.job.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().decode(errors="replace").strip().splitlines()
        how = self._stuck or describe_exit(self.process.returncode)
        return f"{how} ({lines[-1]})" if lines else how


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate all processes, and kill those that do not exit."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
