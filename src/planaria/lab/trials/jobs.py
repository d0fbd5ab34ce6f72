"""Jobs: one process each, a limited number at a time. Finished ones are not repeated, and no process is left behind."""

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

from planaria.common.signals import ending
from planaria.config.bounds import Natural, Seconds
from planaria.config.schema import Section
from planaria.runtime.fleet.process import die_with_parent

POLL_S = 0.1
GRACE_S = 30.0
"""how long processes that are asked to end may take"""
_TAIL = 4096
"""bytes of a log's end in which its last line is looked for"""


class Processes(Section):
    """Settings of trials that run as jobs."""

    workers: Natural = 0
    """processes at the same time; 0 is one for each core"""
    patience_s: Annotated[Seconds, Field(gt=0)] = 3600.0
    """a process that does not get on for so long is killed"""


@dataclass(frozen=True)
class Job:
    """Work for a process of its own. Its progress is on disk, so another process can go on with it."""

    name: str
    """unlike other jobs'"""
    steps: int
    """the work in all"""
    log: Path
    """output of its processes"""
    done: Callable[[], bool]
    """is its result there?"""
    reached: Callable[[], int]
    """steps that are done; may be asked while its process is at work"""
    pulse: Callable[[], object]
    """something that changes as long as its process gets on"""
    command: Callable[[], Sequence[str]]
    """prepares a process that begins it or goes on with it; Python's arguments"""


class Watcher(Protocol):
    """Hears how jobs go."""

    def said(self, line: str) -> None:
        """Something happened to a job."""

    def went(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
        """Of all ``steps``, ``reached`` are done; ``running``: name → the same of each job that is at work."""


def run_jobs(
    title: str,
    jobs: Sequence[Job],
    processes: Processes,
    watcher: Watcher,
    given_up: Callable[[Job, str], None],
    retries: int = 0,
) -> None:
    """Do all jobs that are not done yet. However this ends, none of their processes is left.

    A job whose process dies is taken up again ``retries`` times, then given up: ``given_up`` hears how it ended, and
    may raise to end all.
    """
    reached = {job.name: job.steps if job.done() else job.reached() for job in jobs}
    waiting = deque((job, 1) for job in jobs if not job.done())
    running, done, steps = list[_Attempt](), len(jobs) - len(waiting), sum(job.steps for job in jobs)
    if done:
        watcher.said(f"{done}/{len(jobs)} {title}: kept from before")
    try:
        while waiting or running:
            while waiting and len(running) < (processes.workers or len(os.sched_getaffinity(0))):
                running.append(_Attempt(*waiting.popleft()))
            reached |= {one.job.name: one.job.reached() for one in running}
            at_work = {one.job.name: (reached[one.job.name], one.job.steps) for one in running}
            watcher.went(f"{title}, {done} of {len(jobs)} done", sum(reached.values()), steps, at_work)
            time.sleep(POLL_S)
            for one in [one for one in running if one.is_over(processes.patience_s)]:
                running.remove(one)
                name = one.job.name
                if one.job.done():
                    reached[name], done = one.job.steps, done + 1
                    watcher.said(f"{done}/{len(jobs)} {title}: {name}")
                elif one.number <= retries:
                    watcher.said(f"{name}: {one.ending()}; taken up again")
                    waiting.appendleft((one.job, one.number + 1))
                else:
                    watcher.said(f"{name}: {one.ending()}; given up after {one.number} attempts")
                    given_up(one.job, one.ending())
    finally:
        _stop([one.process for one in running])


class _Attempt:
    """A process that is at work on a job."""

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
                process_group=0,  # a terminal's Ctrl-C is for this process, which asks them once
            )
        self._pulse, self._heard = job.pulse(), time.monotonic()

    def is_over(self, patience_s: float) -> bool:
        """Has it ended? It is killed when it has not got on for too long."""
        pulse, now = self.job.pulse(), time.monotonic()
        if pulse != self._pulse:
            self._pulse, self._heard = pulse, now
        elif now - self._heard > patience_s and not self._stuck:
            self._stuck = f"killed, for it did not get on within {patience_s:g} s"
            self.process.kill()
        return self.process.poll() is not None

    def ending(self) -> str:
        """How it ended, with the last line of its log."""
        with self.job.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            said = file.read().decode(errors="replace").strip().splitlines()
        how = self._stuck or ending(self.process.returncode)
        return f"{how} ({said[-1]})" if said else how


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all to end, and kill those that do not."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
