"""The systems of ``benchmarks.field`` and the ledger of updates that their processes report."""

from __future__ import annotations

import json
import math
import random
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.common import ROOT

if TYPE_CHECKING:
    from benchmarks.field_peer import Job
    from planaria.config.schema import RunConfig
    from planaria.control.logs import RunRecord


SMOOTHED = 10
"""updates whose losses are averaged before they are held against a target"""


@dataclass(frozen=True)
class Line:
    """One process took part in an update."""

    t: float
    """when it had taken it; monotonic seconds"""
    began: float
    """when it began to compute it"""
    step: int
    """the number of the update, from 0"""
    used: int
    """samples in the whole update, of all who took part"""
    upto: int
    """samples of the stream that are behind the run with this update, used or passed over"""
    loss: float | None
    """mean over this process's own samples, in nats; None where it had no part in them"""


@dataclass(frozen=True)
class Update:
    """One update of the model."""

    t: float
    """when the last process had taken it"""
    began: float
    """when the first process began"""
    step: int
    used: int
    upto: int
    loss: float
    """nan where nobody came to tell it"""
    by: int = 1
    """processes that told of it: one that dies may not have come to that"""


def updates_of(lines: Iterable[Line]) -> list[Update]:
    """The updates that lines tell of, in order of time.

    Processes that take the same update have all begun before the first of them is done, as it needs the gradients of
    all. So a line of the same number that began later tells of the update made again.
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
    """The updates that are in the model at the end, and those that were undone."""
    stand: list[Update] = []
    undone: list[Update] = []
    for update in updates:
        while stand and stand[-1].step >= update.step:
            undone.append(stand.pop())
        stand.append(update)
    return stand, undone


def lost(stand: Sequence[Update]) -> int:
    """Samples that were passed over: behind the run, and in no update; negative where some are in two."""
    return stand[-1].upto - sum(update.used for update in stand) if stand else 0


def rate(updates: Iterable[Update], begin: float, end: float, batch: int) -> float:
    """Useful updates a second between two moments: samples in updates that stand, over those of a whole batch.

    An update that was undone after the end counts as well; what is undone before it does not.
    """
    before, _ = standing(update for update in updates if update.t <= end)
    return sum(update.used for update in before if update.t > begin) / batch / (end - begin)


def next_steps(updates: Sequence[Update], kills: Sequence[float]) -> list[float]:
    """Seconds from each kill to the first new update that began after it; infinite where there is none.

    New is an update that the model had not made before, so that what is only made again does not count. One that was
    under way is not the next one: it may have needed nothing more of the process that died.
    """
    found = []
    for kill in kills:
        reached = max((update.step for update in updates if update.t <= kill), default=-1)
        found.append(next((u.t for u in updates if u.began > kill and u.step > reached), math.inf) - kill)
    return found


def to_target(updates: Sequence[Update], begin: float, target: float) -> tuple[int, float] | None:
    """Updates carried out, undone ones among them, and seconds since ``begin``, until the loss is at the target.

    The loss is the mean of the last :data:`SMOOTHED` updates that stand; None when it is never there.
    """
    for count in range(SMOOTHED, len(updates) + 1):
        if (loss := smoothed(updates[:count])) is not None and loss <= target:
            return count, updates[count - 1].t - begin
    return None


def smoothed(updates: Sequence[Update]) -> float | None:
    """Mean loss of the last updates that stand."""
    losses = [update.loss for update in standing(updates)[0] if math.isfinite(update.loss)]
    return fmean(losses[-SMOOTHED:]) if len(losses) >= SMOOTHED else None


def loss_at(updates: Iterable[Update], step: int) -> float | None:
    """The same as it was when update ``step`` was made; None when the run had not come so far."""
    stand, _ = standing(updates)
    steps = [update.step for update in stand]
    return smoothed(stand[: bisect_right(steps, step)]) if steps and steps[-1] >= step else None


def apart(one: Iterable[Update], other: Iterable[Update]) -> float:
    """Largest difference of losses, in nats, of updates of the same number that stand in both runs.

    Only of those that as many processes told of in both: else the means are of other samples.
    """
    runs = ([u for u in standing(run)[0] if math.isfinite(u.loss)] for run in (one, other))
    first, second = ({(u.step, u.by): u.loss for u in run} for run in runs)
    return max((abs(first[key] - second[key]) for key in first.keys() & second.keys()), default=0.0)


@dataclass(frozen=True)
class Strike:
    """A process is to be killed."""

    at: float
    """seconds after the first update"""
    share: float
    """which: the process at this share of all places, from 0 to 1 (exclusive)"""

    def place(self, places: int) -> int:
        return int(self.share * places)


def strikes(seed: int, kills: int, every: float) -> list[Strike]:
    """One in each interval of ``every`` seconds, at a random time of its middle half; the same for all systems."""
    drawn = random.Random(f"field {seed}")
    return [Strike((number + drawn.uniform(0.25, 0.75)) * every, drawn.random()) for number in range(kills)]


RESTARTS = 10_000
"""that torch's elastic agent may make: more than anybody strikes"""
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""or ranks that are started again find the addresses of those that died, and fail (pytorch issue 135712)"""
ENTRY = "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks.{} import main; main(sys.argv[2])"


@dataclass(frozen=True)
class Command:
    """A process to start."""

    line: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class System(ABC):
    """One way to train on processes that die."""

    name: str
    places: int
    """processes that train, each of which may be struck"""

    @abstractmethod
    def commands(self, folder: Path) -> list[Command]:
        """What to start, in this order; a first one of several is a service that the others need."""

    @abstractmethod
    def living(self, folder: Path) -> list[int | None]:
        """The process at each place; None where nobody is just now."""

    @abstractmethod
    def begun(self, folder: Path) -> bool:
        """Has the first update been made?"""

    @abstractmethod
    def lines(self, folder: Path) -> list[Line]:
        """All that was done."""

    def problems(self, folder: Path) -> list[str]:
        """What is wrong with the system's own account of its samples."""
        return []


@dataclass(frozen=True)
class Planaria(System):
    config: RunConfig

    def commands(self, folder: Path) -> list[Command]:
        from planaria.config.recipe import dump

        file = folder / "recipe.toml"
        file.write_text(dump(self.config.model_copy(update={"name": "run", "out": str(folder)})))
        return [Command([sys.executable, "-m", "planaria", "train", str(file), "--quiet"])]

    def living(self, folder: Path) -> list[int | None]:
        from planaria.control.statefile import born, read_state

        workers = read_state(folder / "run").workers
        there = {w.node: w.pid for w in workers if w.node is not None and w.born == born(w.pid) and alive(w.pid)}
        return [there.get(node) for node in range(self.places)]

    def begun(self, folder: Path) -> bool:
        file = folder / "run/metrics.jsonl"
        return file.exists() and file.stat().st_size > 0

    def lines(self, folder: Path) -> list[Line]:
        return list(lines_of(self._record(folder)))

    def problems(self, folder: Path) -> list[str]:
        from planaria.report.run.ledger import prove_exactly_once

        return prove_exactly_once(self._record(folder))

    def _record(self, folder: Path) -> RunRecord:
        from planaria.control.logs import read_run

        return read_run(folder / "run")


def lines_of(record: RunRecord) -> Iterator[Line]:
    """Each replica's commits. Replicas that average the gradients of every step take the same update together."""
    from planaria.control import decisions as d

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
    """A system whose processes run one of the trainers here, in an environment of their own."""

    job: Job
    python: Path

    def told(self, folder: Path) -> str:
        """The file that says what to do."""
        file = folder / "job.json"
        file.write_text(json.dumps(asdict(replace(self.job, folder=str(folder)))))
        return str(file)

    def elastic(self, flags: Sequence[str], trainer: str, told: str) -> list[str]:
        """torchrun with one of the trainers. Isolated, so that this folder does not stand before libraries."""
        agent = [str(self.python), "-I", "-m", "torch.distributed.run", "--nnodes=1", *flags]
        return [
            *agent,
            f"--max-restarts={RESTARTS}",
            "--no-python",
            *(str(self.python), "-I", "-c", ENTRY.format(trainer), str(ROOT), told),
        ]

    def living(self, folder: Path) -> list[int | None]:
        return [_newest(folder / f"{place}.jsonl") for place in range(self.places)]

    def begun(self, folder: Path) -> bool:
        return any('"step"' in file.read_text() for file in self._files(folder))

    def lines(self, folder: Path) -> list[Line]:
        told = (json.loads(line) for file in self._files(folder) for line in whole_lines(file))
        return [
            Line(one["t"], one["began"], one["step"], one["used"], one["upto"], one.get("loss"))
            for one in told
            if "step" in one
        ]

    def _files(self, folder: Path) -> list[Path]:
        return [file for place in range(self.places) if (file := folder / f"{place}.jsonl").exists()]


@dataclass(frozen=True)
class Torchrun(Peer):
    """DistributedDataParallel; who dies takes all others with it, and all go back to the newest checkpoint."""

    def commands(self, folder: Path) -> list[Command]:
        line = self.elastic(["--standalone", f"--nproc-per-node={self.places}"], "field_peer", self.told(folder))
        return [Command(line, FRESH_STORE)]


@dataclass(frozen=True)
class Torchft(Peer):
    """Replicas of the whole model, each with an agent that starts it again, and a lighthouse that says who is there."""

    lighthouse: tuple[str, ...]
    """its flags"""

    def commands(self, folder: Path) -> list[Command]:
        at = f"127.0.0.1:{free_port()}"
        service = [str(self.python.parent / "torchft_lighthouse"), "--bind", at, *self.lighthouse]
        told, commands = self.told(folder), [Command(service)]
        for place in range(self.places):
            env = {"REPLICA_GROUP_ID": str(place), "TORCHFT_LIGHTHOUSE": f"http://{at}"}
            line = self.elastic(["--standalone", "--nproc-per-node=1"], "field_torchft", told)
            commands.append(Command(line, env))
        return commands


def _newest(file: Path) -> int | None:
    """The process that a file of lines named last, if it is alive."""
    pids = [line for line in whole_lines(file) if '"pid"' in line] if file.exists() else []
    pid = json.loads(pids[-1])["pid"] if pids else None
    return pid if pid is not None and alive(pid) else None


def whole_lines(file: Path) -> list[str]:
    """Without one at the end that a killed process has torn off."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def alive(pid: int) -> bool:
    """Is there such a process, and not only its remains?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def versions(python: Path) -> dict[str, str] | None:
    """Of torch and torchft in an interpreter's environment; None where it lacks what the trainers need."""
    ask = (
        "import importlib.metadata as m, json, safetensors, torchft; found = m.packages_distributions(); "
        "print(json.dumps({name: m.version(name) for name in ('torch', found['torchft'][0])}))"
    )
    try:
        found = subprocess.run([str(python), "-I", "-c", ask], capture_output=True, text=True)
    except OSError:
        return None
    return dict(json.loads(found.stdout)) if found.returncode == 0 else None
