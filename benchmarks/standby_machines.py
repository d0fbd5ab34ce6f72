"""Controllers whose machine is lost, or stopped for a while: gaps and losses; and the cost of a shared log."""

from __future__ import annotations

import operator
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.field_systems import free_port
from benchmarks.fleet_run import MODEL_FLAGS, finished, real_stages, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Row, benchmark, interleaved, ratios, start
from benchmarks.netns import Weather, network
from benchmarks.standby import different_losses, endless, losses, named, planaria, undisturbed, wait_until
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import LogFollower, read_run
from planaria.control.log.run_record import RunRecord
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.preparation import run_folders

SKIP = 5
_READY, _DEPOSED = "ready to lead", "standing by again"
"""words that a machine prints"""


LATENCY = Flag(0.0, "of each link, one way, s; above 0: the machines are network namespaces")


@benchmark("standby_machines", kills=Flag(30), seed=1, dim=Flag(64, "width of the model"), latency=LATENCY)
def run_machines(args: Namespace) -> Measurement:
    """Kill the machine of a run's controller again and again: its process group, without workers.

    A standby follows the shared log in another directory, and a joined machine has all workers; all are processes of
    this machine, or in network namespaces. A gap is from the signal to the next committed step; fleet.lease_s is 1.
    Claims: median gap <= 3 s; the losses equal an undisturbed run's to the last bit; no sample is lost or used twice.
    """
    with _machines(args, "standby-killed") as machines:
        killed_at = [machines.kill_leader() for _ in range(args.kills)]
        record = machines.stopped()
    gaps = list(map(operator.sub, first_commits(record), killed_at))
    columns = {"max": max(gaps), "kills": len(gaps), "latency, s": args.latency}
    return [Row("kill to the next committed step, s", gaps, "0", Claim(high=3.0), columns), *_unchanged(record)]


@benchmark("standby_frozen", stops=Flag(100), seed=1, dim=Flag(64, "width of the model"), latency=LATENCY)
def run_frozen(args: Namespace) -> Measurement:
    """Stop the controller of a run (SIGSTOP) on machines as in standby_machines, and wake it once another one leads.

    Claims: each woken controller prints that another one leads, and stands by again; the losses equal an undisturbed
    run's to the last bit, so that no order of its was obeyed; no sample is lost or used twice.
    """
    with _machines(args, "standby-frozen") as machines:
        for _ in range(args.stops):
            machines.stop_leader()
        record = machines.stopped()
    return [
        Row("woken controllers that stood by again", [machines.deposed], "", Claim(low=args.stops)),
        *_unchanged(record),
    ]


def _unchanged(record: RunRecord) -> list[Row]:
    """Return the rows of losses and samples, which no failover may change."""
    differing, made = different_losses(record, undisturbed(record)), len(losses(record))
    return [
        Row("steps with another loss", [differing], "0", Claim(high=0), {"of": made}),
        Row("samples lost or used twice", [len(prove_exactly_once(record))], "0", Claim(high=0)),
    ]


@benchmark("standby_log", repeats=Flag(5), steps=Flag(60), **MODEL_FLAGS)
def run_shared_log(args: Namespace) -> Measurement:
    """Step times with a log shared in a local folder, at three holders on this machine, and without, in turns.

    Claim: <= 1.03 with a folder. The holders' fsyncs share one disk here.
    """

    def side(kind: str) -> float:
        config = real_stages(args, f"log-{kind}", args.steps, spares=1, save_every=0)
        config = named(config, config.name) if kind == "off" else _shared(config, local=True)
        with _held(config) if kind == "quorum" else nullcontext(config) as held:
            return median(step_seconds(finished(held), SKIP))

    folder, quorum, plain = interleaved(
        [lambda: side("folder"), lambda: side("quorum"), lambda: side("off")], args.repeats
    )
    columns = {"with, ms": 1e3 * median(folder), "without, ms": 1e3 * median(plain)}
    return [
        Row("step with a shared log / without", ratios(folder, plain), "1", Claim(high=1.03), columns),
        Row("step with three holders / without", ratios(quorum, plain), "1", None, {"with, ms": 1e3 * median(quorum)}),
    ]


@contextmanager
def _held(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the run with its log at three holders, processes of this machine."""
    place, at = (RUNS / f"{config.name}-shared").absolute(), [f"127.0.0.1:{free_port()}" for _ in range(3)]
    url, words = f"quorum://{','.join(at)}", [sys.executable, "-m", "planaria", "join"]
    with ExitStack() as running:
        for one in at:
            hold = [*words, f"{url}/{config.name}", "--hold", one, "--key-file", str(config.fleet.key)]
            process = subprocess.Popen(hold, cwd=place, stdout=subprocess.PIPE, text=True)
            running.callback(process.wait)
            running.callback(process.terminate)
            assert process.stdout is not None and process.stdout.readline().startswith("holding")
        yield config.model_copy(update={"fleet": config.fleet.model_copy(update={"shared_log": url})})


def _shared(config: RunConfig, local: bool = False, hosts: Sequence[str] = ("127.0.0.1",) * 2) -> RunConfig:
    """Return the run with a log that ``hosts`` share, which may lead; unless ``local``, all workers are elsewhere."""
    place = (RUNS / f"{config.name}-shared").absolute()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    key = place / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    ports = [free_port() for _ in hosts]
    fleet = {
        "shared_log": str(place / "log"), "key": str(key), "host": hosts[0], "port": ports[0],
        "standby_at": ", ".join(f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)),
        "local_workers": None if local else 0,
    }  # fmt: skip
    given = config.fleet.model_dump(exclude_unset=True) | fleet
    return named(config.model_copy(update={"fleet": type(config.fleet).model_validate(given)}), config.name)


@contextmanager
def _machines(args: Namespace, name: str) -> Iterator[_Machines]:
    """Yield a run that trains until it is stopped, with a standby that is ready."""
    with ExitStack() as running:
        hosts = running.enter_context(network(3)) if args.latency > 0 else []
        for host in hosts:
            host.link(Weather(latency_s=args.latency))
        addresses = [host.address for host in hosts[:2]] or ["127.0.0.1"] * 2
        config = _shared(endless(args, name, {}, spares=0), hosts=addresses)
        machines = _Machines(config, [host.prefix for host in hosts] or [[]] * 3, random.Random(args.seed), running)
        machines.start()
        yield machines


@dataclass
class _Seat:
    """A machine that may lead: its latest process, and the folder from which it would lead."""

    at: str
    prefix: list[str]
    folder: Path
    process: subprocess.Popen[bytes]
    output: Path

    def has_printed(self, words: str) -> int:
        """Return how many lines of the process have these words."""
        return self.output.read_text().count(words)


class _Machines:
    """A run on three machines, which are process groups or namespaces: two that may lead, and one with all workers."""

    def __init__(
        self, config: RunConfig, prefixes: Sequence[list[str]], rng: random.Random, running: ExitStack
    ) -> None:
        """:param prefixes: words before the commands of each machine"""
        self.config, self._prefixes, self._rng, self._running = config, prefixes, rng, running
        self._place = (RUNS / f"{config.name}-shared").absolute()
        self._term, self._begins = 1, 0
        self.deposed = 0
        """number of stopped controllers that stood by again"""

    def start(self) -> None:
        """Start all, and return once a standby is ready and the first step is committed."""
        (file := self._place / "run.toml").write_text(recipe.dump(self.config))
        (first, second), fleet = self.config.fleet.standby_addresses, self.config.fleet
        folder = (Path(self.config.out) / self.config.name).absolute()
        self._leader = self._seat(first, self._prefixes[0], folder, "train", str(file))
        wait_until("shared log", (self._place / "log" / self.config.name / "files" / run_folders.CONFIG).exists)
        workers = "--workers", str(self.config.pipeline.stages + 1)
        self._begun(self._prefixes[2], self._place / "workers", "join", first, *workers, "--key-file", str(fleet.key))
        self._standby = self._stand_by(second, self._prefixes[1])
        log = LogFollower(folder)
        wait_until("first steps", lambda: any(isinstance(fact, d.Commit) for _, fact in log.history()))

    def kill_leader(self) -> float:
        """Kill the controller's machine at a random moment, and start a standby there; return when (s since 1970)."""
        killed_at, lost = self._lose(signal.SIGKILL), self._leader
        lost.process.wait()
        self._leader, self._standby = self._standby, self._stand_by(lost.at, lost.prefix)
        return killed_at

    def stop_leader(self) -> None:
        """Stop the controller's machine at a random moment, and wake it once the standby has committed a step."""
        ready, deposed = (self._leader.has_printed(words) for words in (_READY, _DEPOSED))
        self._lose(signal.SIGSTOP)
        os.killpg(self._leader.process.pid, signal.SIGCONT)
        wait_until("standby that is ready again", lambda: self._leader.has_printed(_READY) > ready)
        self._leader, self._standby = self._standby, self._leader
        self.deposed += self._standby.has_printed(_DEPOSED) == deposed + 1

    def _lose(self, number: signal.Signals) -> float:
        """Signal the leader, and wait for a step of the next one; return when it was signalled."""
        time.sleep(self._rng.uniform(0.0, 1.0))
        os.killpg(self._leader.process.pid, number)
        lost_at, log, facts = time.time(), LogFollower(self._standby.folder), list[e.Event | d.Decision]()
        self._term += 1

        def has_committed() -> bool:
            facts.extend(fact for _, fact in log.history())
            led = (n for n, fact in enumerate(facts) if isinstance(fact, e.LeaderStarted) and fact.term >= self._term)
            return any(isinstance(fact, d.Commit) for fact in facts[next(led, len(facts)) :])

        wait_until(f"step of controller {self._term}", has_committed)
        return lost_at

    def stopped(self) -> RunRecord:
        """Stop the run; return its record."""
        self._leader.process.terminate()
        self._leader.process.wait(60.0)
        return read_run(self._leader.folder)

    def _stand_by(self, at: str, prefix: list[str]) -> _Seat:
        """Start a standby, and wait until it is ready."""
        place = self._place / f"standby{self._term}"
        words = str(self._place / "log" / self.config.name), "--standby", "--at", at
        seat = self._seat(
            at, prefix, place / "runs" / self.config.name, "join", *words, "--key-file", str(self.config.fleet.key),
            place=place,
        )  # fmt: skip
        wait_until("standby", lambda: seat.has_printed(_READY) > 0)
        return seat

    def _seat(self, at: str, prefix: list[str], folder: Path, *words: str, place: Path | None = None) -> _Seat:
        process, output = self._begun(prefix, place or Path.cwd(), *words)
        return _Seat(at, prefix, folder, process, output)

    def _begun(self, prefix: list[str], place: Path, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a command in its own process group and directory; return it and the file with its output."""
        place.mkdir(exist_ok=True)
        self._begins += 1
        output = self._place / f"output-{self._begins}"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*prefix, *planaria(), *words], cwd=place, start_new_session=True, stdout=file, stderr=file
            )
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        return process, output


def first_commits(record: RunRecord) -> list[float]:
    """Return when each controller but the first committed its first step, seconds since 1970."""
    found, leader = list[float](), None
    for t, fact in record.history:
        if isinstance(fact, e.LeaderStarted):
            leader = fact.wall_time - t
        elif isinstance(fact, d.Commit) and leader is not None:
            found.append(leader + t)
            leader = None
    return found


if __name__ == "__main__":
    start(machines=run_machines, frozen=run_frozen, log=run_shared_log)
