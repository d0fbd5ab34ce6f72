"""The systems of ``benchmarks.field``, their runs, and the ledger of updates that their processes report."""

from __future__ import annotations

import json
import math
import random
import subprocess
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.harness import ROOT

if TYPE_CHECKING:
    from benchmarks.field_peer import Job
    from planaria.config.schema import RunConfig
    from planaria.control.log.run_record import RunRecord


import contextlib
import os
import shutil
import signal
import time

from benchmarks.harness import RUNS
from benchmarks.processes import alive, children, cli, descendants, free_port, reap_children
from planaria.common.errors import RunStopped
from planaria.control.log.state_file import start_ticks

SMOOTHED = 10  # updates in a smoothed loss


@dataclass(frozen=True)
class Line:
    """One process's part in an update."""

    t: float  # when it was applied; monotonic seconds
    began: float  # when it began to compute it
    step: int  # the number of the update, from 0
    used: int  # samples in the whole update
    upto: int  # samples of the stream up to this update, used or skipped
    loss: float | None  # mean over this process's samples, in nats; None without samples


@dataclass(frozen=True)
class Update:
    """One update of the model."""

    t: float  # when the last process had applied it
    began: float  # when the first process began
    step: int
    used: int
    upto: int
    loss: float  # nan if no process reported it
    by: int = 1  # processes that reported it


def updates_of(lines: Iterable[Line]) -> list[Update]:
    """Group lines into updates, in order of time.

    Processes of one update have all begun before the first of them is done, because it needs all gradients. A line of
    the same number that began later is a repeated update.
    """
    open_: dict[int, list[Line]] = {}
    groups: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: line.t):
        group = open_.get(line.step)
        if group is None or line.began > group[0].t:
            group = open_[line.step] = []
            groups.append(group)
        group.append(line)
    return sorted(map(_update, groups), key=lambda update: update.t)


def _update(group: Sequence[Line]) -> Update:
    losses = [line.loss for line in group if line.loss is not None]
    return Update(
        t=max(line.t for line in group),
        began=min(line.began for line in group),
        step=group[0].step,
        used=max(line.used for line in group),
        upto=max(line.upto for line in group),
        loss=fmean(losses) if losses else float("nan"),
        by=len(group),
    )


def standing(updates: Iterable[Update]) -> tuple[list[Update], list[Update]]:
    """Return the updates in the final model, and the undone ones."""
    stand: list[Update] = []
    undone: list[Update] = []
    for update in updates:
        while stand and stand[-1].step >= update.step:
            undone.append(stand.pop())
        stand.append(update)
    return stand, undone


def lost(stand: Sequence[Update]) -> int:
    """Return the skipped samples; negative if some were used twice."""
    return stand[-1].upto - sum(update.used for update in stand) if stand else 0


def rate(updates: Iterable[Update], begin: float, end: float, batch: int) -> float:
    """Return the useful updates per second between two moments, in batches, without those undone before the end."""
    before, _ = standing(update for update in updates if update.t <= end)
    return sum(update.used for update in before if update.t > begin) / batch / (end - begin)


def next_steps(updates: Sequence[Update], kills: Sequence[float]) -> list[float]:
    """Return the seconds from each kill to the first new update that began after it, or infinity.

    Repeated updates do not count, nor does one already under way, which may not need the dead process.
    """
    found = []
    for kill in kills:
        reached = max((update.step for update in updates if update.t <= kill), default=-1)
        found.append(next((u.t for u in updates if u.began > kill and u.step > reached), math.inf) - kill)
    return found


def to_target(updates: Sequence[Update], begin: float, target: float) -> tuple[int, float] | None:
    """Return the executed updates and the seconds until the smoothed loss reaches the target, or None."""
    for count in range(SMOOTHED, len(updates) + 1):
        if (loss := smoothed(updates[:count])) is not None and loss <= target:
            return count, updates[count - 1].t - begin
    return None


def smoothed(updates: Sequence[Update]) -> float | None:
    """Return the mean loss of the last :data:`SMOOTHED` final updates, or None."""
    losses = [update.loss for update in standing(updates)[0] if math.isfinite(update.loss)]
    return fmean(losses[-SMOOTHED:]) if len(losses) >= SMOOTHED else None


def loss_at(updates: Iterable[Update], step: int) -> float | None:
    """Return the smoothed loss at update ``step``, or None if the run did not reach it."""
    stand, _ = standing(updates)
    steps = [update.step for update in stand]
    return smoothed(stand[: bisect_right(steps, step)]) if steps and steps[-1] >= step else None


def apart(one: Iterable[Update], other: Iterable[Update]) -> float:
    """Return the largest difference of losses of equal updates in both runs, in nats.

    Only updates reported by as many processes in both count: other means are of other samples.
    """
    runs = ([u for u in standing(run)[0] if math.isfinite(u.loss)] for run in (one, other))
    first, second = ({(u.step, u.by): u.loss for u in run} for run in runs)
    return max((abs(first[key] - second[key]) for key in first.keys() & second.keys()), default=0.0)


@dataclass(frozen=True)
class Strike:
    """A planned kill."""

    at: float  # seconds after the first update
    share: float  # the process at this share of all places, in [0, 1)

    def place(self, places: int) -> int:
        return int(self.share * places)


def strikes(seed: int, kills: int, every: float) -> list[Strike]:
    """Draw one kill in the middle half of each interval of ``every`` seconds, equal for all systems."""
    drawn = random.Random(f"field {seed}")
    return [Strike((number + drawn.uniform(0.25, 0.75)) * every, drawn.random()) for number in range(kills)]


RESTARTS = 10_000  # limit of torch's elastic agent, never reached
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""restarted ranks would find the addresses of dead ones (pytorch issue 135712)"""
ENTRY = "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks.{}; main(sys.argv[2])"


@dataclass(frozen=True)
class Command:
    """A process to start."""

    line: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class System(ABC):
    """A system that trains on processes that are killed."""

    name: str
    places: int  # training processes, each of which may be killed

    @abstractmethod
    def commands(self, folder: Path) -> list[Command]:
        """Return the commands to start in order; the first of several is a service for the others."""

    @abstractmethod
    def living(self, folder: Path) -> list[int | None]:
        """Return the process at each place, or None."""

    @abstractmethod
    def begun(self, folder: Path) -> bool:
        """Return True after the first update."""

    @abstractmethod
    def lines(self, folder: Path) -> list[Line]:
        """Return all reports."""

    def problems(self, folder: Path) -> list[str]:
        return []


@dataclass(frozen=True)
class Planaria(System):
    config: RunConfig

    def commands(self, folder: Path) -> list[Command]:
        from planaria.config.recipe import dump

        file = folder / "recipe.toml"
        file.write_text(dump(self.config.model_copy(update={"name": "run", "out": str(folder)})))
        return [Command(cli("train", file, "--quiet"))]

    def living(self, folder: Path) -> list[int | None]:
        from planaria.control.log.state_file import read_state, start_ticks

        workers = read_state(folder / "run").workers
        there = {
            w.node: w.pid
            for w in workers
            if w.node is not None and w.start_ticks == start_ticks(w.pid) and alive(w.pid)
        }
        return [there.get(node) for node in range(self.places)]

    def begun(self, folder: Path) -> bool:
        file = folder / "run/metrics.jsonl"
        return file.exists() and file.stat().st_size > 0

    def lines(self, folder: Path) -> list[Line]:
        return list(lines_of(self._record(folder)))

    def problems(self, folder: Path) -> list[str]:
        from planaria.report.run.sample_ledger import prove_exactly_once

        return prove_exactly_once(self._record(folder))

    def _record(self, folder: Path) -> RunRecord:
        from planaria.control.log.reader import read_run

        return read_run(folder / "run")


def lines_of(record: RunRecord) -> Iterator[Line]:
    """Yield each replica's commits; replicas that average every gradient share their updates."""
    from planaria.control.facts import decisions as d

    losses = {metric.step: metric.loss for metric in record.metrics if metric.kind == "step"}
    batch, began = record.config.samples, dict[int, float]()
    for t, fact in record.history:
        if isinstance(fact, d.RunStep) and fact.mode == "train":
            began[fact.replica] = t
        elif isinstance(fact, d.Commit):
            step = fact.progress if record.config.exchange.replicas > 1 else fact.step
            yield Line(t, began[fact.replica], step, batch, (step + 1) * batch, losses.get(step))


@dataclass(frozen=True)
class Peer(System):
    """A system whose processes run one of these trainers in their own environment."""

    job: Job
    python: Path

    def write_job(self, folder: Path) -> str:
        file = folder / "job.json"
        file.write_text(json.dumps(asdict(replace(self.job, folder=str(folder)))))
        return str(file)

    def elastic(self, flags: Sequence[str], trainer: str, job_file: str) -> list[str]:
        """Return torchrun's command for ``trainer``, an import of ``main``.

        It is isolated, so that this folder does not shadow libraries.
        """
        agent = [str(self.python), "-I", "-m", "torch.distributed.run", "--nnodes=1", *flags]
        return [
            *agent,
            f"--max-restarts={RESTARTS}",
            "--no-python",
            *(str(self.python), "-I", "-c", ENTRY.format(trainer), str(ROOT), job_file),
        ]

    def living(self, folder: Path) -> list[int | None]:
        return [_newest(folder / f"{place}.jsonl") for place in range(self.places)]

    def begun(self, folder: Path) -> bool:
        return any('"step"' in file.read_text() for file in self._files(folder))

    def lines(self, folder: Path) -> list[Line]:
        records = (json.loads(line) for file in self._files(folder) for line in whole_lines(file))
        return [
            Line(one["t"], one["began"], one["step"], one["used"], one["upto"], one.get("loss"))
            for one in records
            if "step" in one
        ]

    def _files(self, folder: Path) -> list[Path]:
        return [file for place in range(self.places) if (file := folder / f"{place}.jsonl").exists()]


@dataclass(frozen=True)
class Torchrun(Peer):
    """DistributedDataParallel: a death restarts all ranks from the newest checkpoint."""

    def commands(self, folder: Path) -> list[Command]:
        line = self.elastic(
            ["--standalone", f"--nproc-per-node={self.places}"], "field_peer import main", self.write_job(folder)
        )
        return [Command(line, FRESH_STORE)]


@dataclass(frozen=True)
class Torchft(Peer):
    """Replicas of the complete model, each with an agent that restarts it, and a lighthouse."""

    lighthouse: tuple[str, ...]  # its flags

    def commands(self, folder: Path) -> list[Command]:
        at = f"127.0.0.1:{free_port()}"
        service = [str(self.python.parent / "torchft_lighthouse"), "--bind", at, *self.lighthouse]
        job_file, commands = self.write_job(folder), [Command(service)]
        for place in range(self.places):
            env = {"REPLICA_GROUP_ID": str(place), "TORCHFT_LIGHTHOUSE": f"http://{at}"}
            line = self.elastic(["--standalone", "--nproc-per-node=1"], "field_peer import torchft as main", job_file)
            commands.append(Command(line, env))
        return commands


@dataclass(frozen=True)
class GroupMembers(Peer):
    """Members of a group, each with an agent that restarts it; the group's controller is a separate process."""

    def commands(self, folder: Path) -> list[Command]:
        port, job_file = str(free_port()), self.write_job(folder)
        line = self.elastic(["--standalone", "--nproc-per-node=1"], "field_peer import member as main", job_file)
        return [Command(line, {"PLACE": str(place), "GROUP_PORT": port}) for place in range(self.places)]

    def problems(self, folder: Path) -> list[str]:
        from planaria.control.log.reader import read_run
        from planaria.report.run.sample_ledger import prove_exactly_once

        return prove_exactly_once(read_run(folder / "group"))


def _newest(file: Path) -> int | None:
    pids = [line for line in whole_lines(file) if '"pid"' in line] if file.exists() else []
    pid = json.loads(pids[-1])["pid"] if pids else None
    return pid if pid is not None and alive(pid) else None


def whole_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def versions(python: Path) -> dict[str, str] | None:
    """Return the versions of torch and torchft in an environment, or None if they are missing."""
    ask = (
        "import importlib.metadata as m, json, safetensors, torchft; found = m.packages_distributions(); "
        "print(json.dumps({name: m.version(name) for name in ('torch', found['torchft'][0])}))"
    )
    try:
        found = subprocess.run([str(python), "-I", "-c", ask], capture_output=True, text=True)
    except OSError:
        return None
    return dict(json.loads(found.stdout)) if found.returncode == 0 else None


# ---- one run of a system

NAME = "field"
FIRST_S, END_S = 180.0, 40.0  # limits for the first update and for the end
LOOK_S, WEIGH_S = 0.05, 2.0  # polling intervals of kills and of memory
QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ran:
    """The result of a run."""

    updates: list[Update]  # all, including undone ones
    begin: float  # the first update; monotonic seconds
    end: float  # when its time was up
    kills: list[float]
    started: float  # seconds from the command to the first update
    memory: list[int]  # bytes of all processes together, shared pages once
    cpu: float  # processor seconds of the processes that lived throughout
    problems: list[str]


def ran(system: System, arm: str, planned: Sequence[Strike], seconds: float) -> Ran:
    """Train for ``seconds`` after the first update, with the ``planned`` kills.

    :raises RunStopped: if it never begins or exits early.
    """
    from planaria.runtime.fleet.process import adopt_orphans

    shutil.rmtree(folder := folder_of(system, arm), ignore_errors=True)
    folder.mkdir(parents=True)
    processes: list[subprocess.Popen[bytes]] = []
    others, launched = children(), time.monotonic()
    with adopt_orphans():
        try:
            _start(system, folder, processes)
            _await_first(system, folder, processes)
            watched = _watched(system, folder, processes, planned, seconds)
        finally:
            _end(processes, others)
    updates = updates_of(system.lines(folder))
    begin = updates[0].t
    return Ran(
        updates=updates,
        begin=begin,
        end=begin + seconds,
        kills=watched.kills,
        started=begin - launched,
        memory=watched.memory,
        cpu=watched.cpu,
        problems=system.problems(folder),
    )


def folder_of(system: System, arm: str) -> Path:
    return RUNS / NAME / f"{system.name}-{arm}".replace(" ", "-").replace(",", "")


def _start(system: System, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    with (folder / "out.txt").open("w") as out:
        for command in system.commands(folder):
            env = {**os.environ, **QUIET, **command.env}
            processes.append(subprocess.Popen(command.line, stdout=out, stderr=out, env=env))


def _require_running(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        if (code := process.poll()) is not None:
            raise RunStopped(f"{folder.name}: exited early with code {code}; its output is in {folder / 'out.txt'}")


def _await_first(system: System, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + FIRST_S
    while not system.begun(folder):
        _require_running(processes, folder)
        if time.monotonic() > until:
            raise RunStopped(f"{folder.name}: no update within {FIRST_S:g} s; its output is in {folder / 'out.txt'}")
        time.sleep(LOOK_S)


@dataclass
class _Watched:
    kills: list[float]
    memory: list[int]
    cpu: float = 0.0


def _watched(
    system: System,
    folder: Path,
    processes: Sequence[subprocess.Popen[bytes]],
    planned: Sequence[Strike],
    seconds: float,
) -> _Watched:
    """Kill the planned processes and sample memory until the time is up and the system continues after the last kill.

    A kill at an empty place waits until the place is taken.
    """
    found, due, began = _Watched([], []), list(planned), time.monotonic()
    before, weigh, over = _cpu(processes), began, began + seconds
    while (now := time.monotonic()) < over or due or not _training_continues(system, folder, found.kills):
        if now > over + FIRST_S:
            raise RunStopped(f"{folder.name}: does not continue; its output is in {folder / 'out.txt'}")
        if due and now >= began + due[0].at:
            pid = system.living(folder)[due[0].place(system.places)]
            if pid is not None:
                found.kills.append(time.monotonic())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                del due[0]
        if now >= weigh:
            weigh = now + WEIGH_S
            found.memory.append(sum(map(_memory, _family(processes))))
            _require_running(processes, folder)
        time.sleep(LOOK_S if now < over else 10 * LOOK_S)
    after = _cpu(processes)
    found.cpu = sum(after[pid] - before[pid] for pid in before.keys() & after.keys())
    return found


def _training_continues(system: System, folder: Path, kills: Sequence[float]) -> bool:
    """Return True after a new update since the last kill."""
    updates = updates_of(system.lines(folder)) if kills else []
    return all(seconds < math.inf for seconds in next_steps(updates, kills[-1:]))


def _end(processes: Sequence[subprocess.Popen[bytes]], others: frozenset[int]) -> None:
    """Terminate all processes, the first one last because others may need it; kill the remaining descendants."""
    family = {pid: start_ticks(pid) for pid in _family(processes)}
    until = time.monotonic() + END_S
    for process in reversed(processes):
        process.terminate()
    for process in reversed(processes):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
    for pid, started_ticks in family.items():
        if started_ticks is not None and start_ticks(pid) == started_ticks and alive(pid):
            os.kill(pid, signal.SIGKILL)
    if not reap_children(others):
        raise RunStopped("a process that was started does not end, not even killed; see `ps`")


def _family(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [pid for process in processes for pid in descendants(process.pid)]


def _memory(pid: int) -> int:
    """Return the proportional set size in bytes (shared pages divided among processes)."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def _cpu(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, float]:
    found = {}
    for pid in _family(processes):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    return found
