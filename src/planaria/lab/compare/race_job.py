"""Races of a comparison as jobs in separate processes: ``python -m planaria.lab.compare.race_job FILE``."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from pydantic import Field

from planaria.common import atomic
from planaria.common.documents import Record
from planaria.common.errors import RunStopped
from planaria.common.logs import command_logs
from planaria.config import consent
from planaria.config.schema import RunConfig
from planaria.data.dataset import open_data
from planaria.faults.trace import Trace
from planaria.lab.compare.race import ArmCourse, race
from planaria.pipeline.routing.arrangement import node_of
from planaria.trials.arms import file_name
from planaria.trials.jobs import Job, JobSettings, Watcher, run_jobs
from planaria.trials.result_cache import CachedResult, TrialIdentity, identity, make_folder

Code = Callable[[RunConfig], Iterable[type | ModuleType]]
"""configuration → the code outside planaria that it names"""


class Race(Record):
    """One arm with one seed: everything that its course depends on."""

    arm: str
    config: RunConfig
    dataset: str
    """folder of the prepared token shards"""
    trace: Trace
    faults: bool
    """whether the trace applies"""
    replica_traces: list[Trace] = Field(default_factory=list)
    """traces of the arm's replicas 1, 2, …, if faults apply"""
    behind: int = 0
    """ticks until a background checkpoint is durable"""

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.config.seed}"

    def identity(self, code: Iterable[type | ModuleType] = ()) -> TrialIdentity:
        """Return the race's identity, which excludes paths and names."""
        inputs: dict[str, object] = {
            "config": self.config.model_dump(mode="json", exclude={"name": True, "out": True, "data": {"cache"}}),
            "data": open_data(self.dataset).meta.model_dump(mode="json"),
            "trace": self.trace.model_dump(mode="json") if self.faults else None,
        }
        replica_traces = [trace.model_dump(mode="json") for trace in self.replica_traces]
        inputs |= {"behind": self.behind} if self.behind else {}
        inputs |= {"further": replica_traces} if self.faults and replica_traces else {}
        return identity(inputs, code)

    def lost_nodes_by_tick(self) -> Mapping[int, Sequence[int]]:
        """Return tick → the nodes lost before it, those of replica 0 first."""
        nodes_by_tick, stages = defaultdict[int, list[int]](list), self.config.pipeline.stages
        for replica, trace in enumerate([self.trace, *self.replica_traces] if self.faults else []):
            for fault in trace.faults:
                nodes_by_tick[fault.step].append(node_of(replica, fault.stage, stages))
        return nodes_by_tick


class _Work(Record):
    """A race in the comparison's folder; its process reads this."""

    race: Race
    identity: TrialIdentity
    folder: Path

    def file(self, kind: str) -> Path:
        """Return its result (json), request (job), output (log), or file of ticks with losses if validated (ticks)."""
        return self.folder / f"{file_name(self.race.arm)}.{self.race.config.seed}.{kind}"

    @property
    def kept(self) -> CachedResult[ArmCourse]:
        return CachedResult(self.file("json"), ArmCourse, self.identity)

    def job(self) -> Job:
        def ticks() -> int:
            file = self.file("ticks")
            return file.read_bytes().count(b"\n") if file.is_file() else 0

        def command() -> Sequence[str]:
            self.remove_temporary_files()
            atomic.write_text(self.file("job"), self.model_dump_json())
            return ["-m", "planaria.lab.compare.race_job", str(self.file("job")), *consent.flags()]

        steps, is_done = self.race.config.train.steps, lambda: self.kept.read()[0] is not None
        return Job(self.race.name, steps, self.file("log"), is_done, ticks, ticks, command)

    def remove_temporary_files(self) -> None:
        """Remove the other files of an attempt."""
        for kind in ("job", "ticks", "log"):
            self.file(kind).unlink(missing_ok=True)

    def run(self) -> None:
        """Run the race; write its course atomically."""
        trial = self.race
        with self.file("ticks").open("w") as ticks:
            course = race(
                trial.config,
                open_data(trial.dataset),
                trial.lost_nodes_by_tick(),
                lambda tick, loss: print(tick, "" if loss is None else repr(loss), file=ticks, flush=True),
                trial.behind,
            )
        self.identity.require_current()
        self.kept.write(course)


def run_races(
    races: Sequence[Race], folder: Path, processes: JobSettings, watcher: Watcher, code: Code = lambda config: ()
) -> list[ArmCourse]:
    """Return the courses of all ``races`` in order; those with a result of the same identity are not repeated.

    :raises RunStopped: when one failed, naming its arm, seed and log.
    """
    make_folder(folder)
    works = [_Work(race=trial, identity=trial.identity(code(trial.config)), folder=folder) for trial in races]
    for work in works:
        if stale := work.kept.read()[1]:
            watcher.print_note(f"{work.race.name}: run again, {stale}")
    run_jobs("runs", [work.job() for work in works], processes, watcher, _raise_stopped)
    for work in works:
        work.remove_temporary_files()
    return [course for work in works if (course := work.kept.read()[0]) is not None]


def cached_races(races: Sequence[Race], folder: Path, code: Code = lambda config: ()) -> list[bool]:
    """Return for each race whether a result of the same identity exists."""
    works = (_Work(race=trial, identity=trial.identity(code(trial.config)), folder=folder) for trial in races)
    return [work.kept.read()[0] is not None for work in works]


def _raise_stopped(job: Job, ending: str) -> None:
    raise RunStopped(f"{job.name}: {ending}; see {job.log}, and run the comparison again to resume")


if __name__ == "__main__":
    with command_logs(), consent.permit_code(consent.FLAG in sys.argv[2:]):
        _Work.model_validate_json(Path(sys.argv[1]).read_bytes()).run()
