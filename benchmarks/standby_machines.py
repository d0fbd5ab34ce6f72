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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median

from benchmarks.field_systems import free_port
from benchmarks.fleet_run import MODEL_FLAGS, finished, real_stages, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Row, benchmark, interleaved, ratios, start
from benchmarks.standby import different_losses, endless, losses, named, planaria, undisturbed, wait_until
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.logs import LogFollower, RunRecord, read_run
from planaria.report.run.ledger import prove_exactly_once
from planaria.runtime.engine import run_folders

SKIP = 5


@benchmark("standby_machines", kills=Flag(30), seed=1, dim=Flag(64, "width of the model"))
def run_machines(given: Namespace) -> Measurement:
    """Kill the machine of a run's controller again and again: its process group, without workers.

    A standby follows the shared log in another directory, and a joined machine has all workers; all are processes of
    this machine. A gap is from the signal to the next committed step; fleet.lease_s is 1. Claims: median gap <= 3 s;
    the losses equal an undisturbed run's to the last bit; no sample is lost or used twice.
    """
    with _machines(given, "standby-killed") as machines:
        killed_at = [machines.lost(signal.SIGKILL) for _ in range(given.kills)]
        record = machines.stopped()
    gaps = list(map(operator.sub, first_commits(record), killed_at))
    beside = {"max": max(gaps), "kills": len(gaps)}
    return [Row("kill to the next committed step, s", gaps, "0", Claim(high=3.0), beside), *_unchanged(record)]


@benchmark("standby_frozen", stops=Flag(100), seed=1, dim=Flag(64, "width of the model"))
def run_frozen(given: Namespace) -> Measurement:
    """Stop the controller of a run (SIGSTOP) on machines as in standby_machines, and wake it once another one leads.

    Claims: each woken controller exits with one line; the losses equal an undisturbed run's to the last bit, so that no
    order of its was obeyed; no sample is lost or used twice.
    """
    with _machines(given, "standby-frozen") as machines:
        for _ in range(given.stops):
            machines.lost(signal.SIGSTOP)
        record = machines.stopped()
    exited = sum(machines.exits) / given.stops
    return [
        Row("woken controllers that exited / all", [exited], "1", Claim(low=1), {"stops": given.stops}),
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
def run_shared_log(given: Namespace) -> Measurement:
    """Step times with a log shared in a local folder, at three holders on this machine, and without, in turns.

    Claim: <= 1.03 with a folder. The holders' fsyncs share one disk here.
    """

    def side(kind: str) -> float:
        config = real_stages(given, f"log-{kind}", given.steps, spares=1, save_every=0)
        config = named(config, config.name) if kind == "off" else _shared(config, local=True)
        with _held(config) if kind == "quorum" else nullcontext(config) as held:
            return median(step_seconds(finished(held), SKIP))

    folder, quorum, plain = interleaved(
        [lambda: side("folder"), lambda: side("quorum"), lambda: side("off")], given.repeats
    )
    beside = {"with, ms": 1e3 * median(folder), "without, ms": 1e3 * median(plain)}
    return [
        Row("step with a shared log / without", ratios(folder, plain), "1", Claim(high=1.03), beside),
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


def _shared(config: RunConfig, local: bool = False) -> RunConfig:
    """Return the run with a shared log, and two addresses of standbys; unless ``local``, its workers are elsewhere."""
    place = (RUNS / f"{config.name}-shared").absolute()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    key = place / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    standby_at = ", ".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    fleet = {
        "shared_log": str(place / "log"), "key": str(key), "port": free_port(),
        "standby_at": standby_at, "local_workers": None if local else 0,
    }  # fmt: skip
    given = config.fleet.model_dump(exclude_unset=True) | fleet
    return named(config.model_copy(update={"fleet": type(config.fleet).model_validate(given)}), config.name)


@contextmanager
def _machines(given: Namespace, name: str) -> Iterator[_Machines]:
    """Yield a run that trains until it is stopped, with a standby that is ready."""
    with ExitStack() as running:
        machines = _Machines(_shared(endless(given, name, {}, spares=0)), random.Random(given.seed), running)
        machines.start()
        yield machines


class _Machines:
    """A run whose machines are process groups of this one: a controller, a standby, and one with all workers."""

    def __init__(self, config: RunConfig, rng: random.Random, running: ExitStack) -> None:
        self.config, self._rng, self._running = config, rng, running
        self._place = (RUNS / f"{config.name}-shared").absolute()
        self._folder = Path(config.out) / config.name
        self._leader_at, (self._standby_at, self._free) = "", config.fleet.standby_addresses
        self._started = 0
        """number of standbys so far; also the term of the controller"""
        self.exits = list[bool]()
        """for each lost controller, whether it exited with one line"""

    def start(self) -> None:
        """Start all, and return once a standby is ready."""
        file, fleet = self._place / "run.toml", self.config.fleet
        file.write_text(recipe.dump(self.config))
        self._leader = self._begun(Path.cwd(), "train", str(file), "--quiet")
        wait_until("shared log", (self._place / "log" / self.config.name / "files" / run_folders.CONFIG).exists)
        workers = str(self.config.pipeline.stages + 1)
        self._begun(self._place, "join", f"127.0.0.1:{fleet.port}", "--workers", workers, "--key-file", str(fleet.key))
        self._stand_by()
        log = LogFollower(self._folder)
        wait_until("first steps", lambda: any(isinstance(fact, d.Commit) for _, fact in log.history()))

    def lost(self, number: signal.Signals) -> float:
        """Kill or stop the controller's machine at a random moment; return when (seconds since 1970).

        A stopped one is woken once the standby has committed a step. Then another standby starts there.
        """
        time.sleep(self._rng.uniform(0.0, 1.0))
        os.killpg(self._leader.pid, number)
        lost_at = time.time()
        log, facts = LogFollower(self._standby_folder), list[e.Event | d.Decision]()

        def has_committed() -> bool:
            facts.extend(fact for _, fact in log.history())
            led = (n for n, fact in enumerate(facts) if isinstance(fact, e.LeaderStarted) and fact.term > self._started)
            return any(isinstance(fact, d.Commit) for fact in facts[next(led, len(facts)) :])

        wait_until(f"step of controller {self._started + 1}", has_committed)
        with suppress(ProcessLookupError):
            os.killpg(self._leader.pid, signal.SIGCONT)
        _, errors = self._leader.communicate(timeout=60.0)
        self.exits.append(self._leader.returncode == 1 and errors.count("\n") == 1)
        self._leader, self._folder = self._standby, self._standby_folder
        self._leader_at, self._standby_at, self._free = self._standby_at, self._leader_at or self._free, self._free
        self._stand_by()
        return lost_at

    def stopped(self) -> RunRecord:
        """Stop the run; return its record."""
        self._leader.terminate()
        self._leader.communicate(timeout=60.0)
        return read_run(self._folder)

    def _stand_by(self) -> None:
        """Start a standby, and wait until it is ready."""
        self._started += 1
        place, name, key = self._place / f"standby{self._started}", self.config.name, str(self.config.fleet.key)
        place.mkdir()
        words = str(self._place / "log" / name), "--standby", "--at", self._standby_at, "--key-file", key
        self._standby = self._begun(place, "join", *words)
        self._standby_folder = place / "runs" / name
        assert self._standby.stdout is not None and "ready to lead" in self._standby.stdout.readline()

    def _begun(self, place: Path, *words: str) -> subprocess.Popen[str]:
        """Start a command in its own process group."""
        process = subprocess.Popen(
            [*planaria(), *words], cwd=place, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._running.callback(process.communicate)
        self._running.callback(process.kill)
        return process


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
