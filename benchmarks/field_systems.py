"""The systems of ``benchmarks.field``: how each is started, who of it is alive, and what its processes say they did."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import ROOT
from benchmarks.field_ledger import Line

if TYPE_CHECKING:
    from benchmarks.field_peer import Job
    from planaria.config.schema import RunConfig
    from planaria.control.logs import RunRecord

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
        line = self.elastic(["--standalone", f"--nproc-per-node={self.places}"], "field_torchrun", self.told(folder))
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
