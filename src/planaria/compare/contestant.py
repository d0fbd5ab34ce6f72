"""One contestant of a comparison in a process of its own: ``python -m planaria.compare.contestant JOB``."""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from planaria import __version__, atomic, documents
from planaria.chaos.trace import Trace, digest
from planaria.compare.race import Course, race
from planaria.config import RunConfig
from planaria.data.shards import Dataset


class Job(BaseModel):
    """Everything that a contestant's course depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str
    config: RunConfig
    dataset: str
    """folder of the prepared token shards"""
    trace: Trace
    faults: bool

    @property
    def digest(self) -> str:
        """Two jobs with the same digest have the same course, so it need not be run again."""
        return hashlib.sha256(f"{__version__} {self.model_dump_json()}".encode()).hexdigest()


class Result(BaseModel):
    """A course, and what it was run with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str
    """the job's digest"""
    trace: str
    """the trace's digest"""
    course: Course


def finished(file: Path, job: Job) -> Result | None:
    """The result that ``file`` holds, if it is this job's."""
    if not file.is_file():
        return None
    result = documents.model(file, Result, mend="remove it to run this arm again")
    return result if result.job == job.digest else None


def run(job: Job, out: Path) -> None:
    """Race the job; the result appears in ``out`` whole or not at all. Ticks are told on standard output."""
    faults: dict[int, list[int]] = defaultdict(list)
    for fault in job.trace.faults if job.faults else ():
        faults[fault.step].append(fault.stage)
    course = race(job.config, Dataset.open(Path(job.dataset)), faults, lambda tick: print(tick, flush=True))
    atomic.write_text(out, Result(job=job.digest, trace=digest(job.trace), course=course).model_dump_json())


if __name__ == "__main__":
    run(Job.model_validate_json(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
