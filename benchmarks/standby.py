"""Lost controllers: the gap until the next one leads, losses, and the cost of a standby and of a shared log."""

from __future__ import annotations

import operator
import os
import random
import secrets
import shutil
import signal
import subprocess
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.fleet_run import MODEL_FLAGS, finished, real_stages, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Row, benchmark, interleaved, ratios, start
from benchmarks.processes import cli, free_port, wait_until
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.apply import apply
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log import state_file
from planaria.control.log.reader import LogFollower, read_run
from planaria.control.log.run_record import RunRecord
from planaria.control.state.run import RunState
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.preparation import run_folders

SKIP = 5


@benchmark("standby", kills=Flag(200), seed=1, dim=Flag(64, "width of the model"))
def run_kills(args: Namespace) -> Measurement:
    """Kill each controller of a run (SIGKILL) once its standby waits, after lines of its log of each kind in turn.

    Two thirds of the kills are in a run whose lost stages are restored from copies: with every fourth of them a worker
    is killed too. The others are in a run of two replicas with DiLoCo. With every tenth one the standby is killed
    too, and the supervisor starts another. A step takes 0.1 s and more, as on links. A gap is from the signal to the
    first order of the next controller; it counts if the standby was not killed. Workers finish their step meanwhile.
    Claims: median gap <= 1 s; losses equal an undisturbed run's to the last bit; no sample is lost or used twice; no
    worker is left.
    """
    rng, rounds = random.Random(args.seed), args.kills // 3
    exact = {"recovery": {"strategy": "redundant, checkpoint"}}
    replicas = {"exchange": {"kind": "diloco", "replicas": 2, "options": {"every": 5}}}
    campaigns = [
        Campaign(_with_standby(endless(args, "standby", exact), "auto"), rng, args.kills - rounds),
        Campaign(_with_standby(endless(args, "standby-rounds", replicas), "auto"), rng, rounds),
    ]
    records = [campaign.run() for campaign in campaigns]
    gaps = [gap for one, record in zip(campaigns, records, strict=True) for gap in one.gaps(record)]
    phases = Counter[str]()
    for record in records:
        phases += phases_at_failovers(record)
    differing = sum(different_losses(record, undisturbed(record)) for record in records)
    worker, standby = (sum(getattr(one, of) for one in campaigns) for of in ("with_worker", "with_standby"))
    kills = {"kills": args.kills, "with a worker": worker, "with the standby": standby}
    return [
        Row("gap between controllers, s", gaps, "0", Claim(high=1.0), {"max": max(gaps), **kills}),
        *(Row(f"controllers lost in phase {phase}", [count], "") for phase, count in sorted(phases.items())),
        Row("steps with another loss", [differing], "0", Claim(high=0), {"of": sum(map(len, map(losses, records)))}),
        Row("samples lost or used twice", [sum(len(prove_exactly_once(r)) for r in records)], "0", Claim(high=0)),
        Row("workers left", [sum(len(_left(r.folder)) for r in records)], "0", Claim(high=0)),
    ]  # fmt: skip


@benchmark("standby_cost", repeats=Flag(5), steps=Flag(100), **MODEL_FLAGS)
def run_cost(args: Namespace) -> Measurement:
    """Step times with a standby, with a supervisor only, and without both, in turns. Claims: <= 1.01 each."""

    def side(standby: str) -> float:
        config = real_stages(args, f"cost-{standby}", args.steps, spares=1, save_every=0)
        return median(step_seconds(trained(_with_standby(config, standby)), SKIP))

    following, kept, plain = interleaved(
        [lambda: side("auto"), lambda: side("manual"), lambda: side("off")], args.repeats
    )
    without = {"without, ms": 1e3 * median(plain)}
    return [
        Row("step with a standby / without", ratios(following, plain), "1", Claim(high=1.01), without),
        Row("step with a supervisor / without", ratios(kept, plain), "1", Claim(high=1.01), without),
    ]


def endless(args: Namespace, name: str, sections: Mapping[str, object], spares: int = 2) -> RunConfig:
    """Return a small run that goes through all phases until it is stopped; a step takes 0.1 s and more, as on links."""
    sizes = {"stages": 2, "microbatches": 4, "context": 32}
    plain = real_stages(Namespace(dim=args.dim, **sizes), name, 1_000_000, spares, save_every=7)
    fields = {
        "network": {"emulate": "links", "latency_s": 0.02},
        "optim": {"schedule": "constant"},
        "train": {"steps": 1_000_000, "eval_every": 10, "eval_microbatches": 2},
    }
    return named(RunConfig.model_validate(plain.model_dump(exclude_unset=True) | fields | dict(sections)), name)


def undisturbed(record: RunRecord) -> RunRecord:
    config = record.config
    fields = config.model_dump(exclude_unset=True, exclude={"fleet", "network"})
    last = max(step for _, step in losses(record))
    fields |= {"engine": "inline", "train": {**fields["train"], "steps": last + 1}}
    return trained(named(RunConfig.model_validate(fields), f"{config.name}-calm"))


def trained(config: RunConfig) -> RunRecord:
    subprocess.run(cli("train", written(config), "--quiet"), check=True, stdout=subprocess.DEVNULL)
    return read_run(Path(config.out) / config.name)


STEPPING = ("run_step", "stage_ready", "commit", "stage_committed", "evaluate", "save", "stage_saved", "seal")
"""kinds of log lines after which controllers are killed; ``evaluate`` is the order of a validation"""
EXCHANGING = ("commit", "settle", "evaluate", "save")
RECOVERING = ("worker_lost", "form", "linked", "worker_joined")
"""kinds of lines that follow the loss of a worker"""


class Campaign:
    """A run whose controllers are killed."""

    def __init__(self, config: RunConfig, rng: random.Random, kills: int) -> None:
        self.config, self.folder = config, Path(config.out) / config.name
        self.with_worker = self.with_standby = 0
        self._log: LogFollower | None = None
        self._rng, self._kills, self._killed_at, self._last = rng, kills, list[tuple[float, bool]](), -1
        self._exact = config.exchange.replicas == 1  # a stage copied from another replica is not the lost one
        self._moments = STEPPING + RECOVERING if self._exact else EXCHANGING

    def run(self) -> RunRecord:
        """Train, kill all controllers but the last, stop the run once it has saved its state; return its record."""
        process = subprocess.Popen(cli("train", written(self.config), "--quiet"))
        wait_until("first steps", lambda: _has_begun(self.folder))
        self._log = LogFollower(self.folder)
        for number in range(self._kills):
            self._kill(number)
        wait_until("controller", self._is_led)
        os.kill(leader_of(self.folder), signal.SIGTERM)
        wait_until("end of the run", lambda: _has_ended(self.folder))
        process.wait(120.0)
        return read_run(self.folder)

    def _kill(self, number: int) -> None:
        """Kill the controller at the moment that is next in turn."""
        moment = self._moments[number % len(self._moments)]
        wait_until("controller with a standby and all workers", self._is_whole)
        self._last = leader_of(self.folder)
        self._has_logged("")
        if moment in RECOVERING:
            self._kill_worker()
        wait_until(f"line of {moment}", lambda: self._has_logged(moment), pause=0.0005)
        time.sleep(self._rng.choice([0.0, self._rng.uniform(0.0, 0.02)]))
        if self._exact and number % 4 == 1 and moment not in RECOVERING:
            self._kill_worker()
        stands_by = number % 10 != 9
        if not stands_by:
            self.with_standby += 1
            for pid in run_folders.waiting_standbys(self.folder):
                os.kill(pid, signal.SIGKILL)
        self._killed_at.append((time.monotonic(), stands_by))
        os.kill(self._last, signal.SIGKILL)

    def gaps(self, record: RunRecord) -> list[float]:
        """Return the seconds from each kill with a standby to the next controller's first decision."""
        terms = [t for t, fact in record.history if isinstance(fact, e.LeaderStarted)]
        ordered = [t for t, fact in record.history if isinstance(fact, d.RunStep | d.Commit | d.Save | d.Form)]
        return [
            next(t for t in ordered if t > term) - killed
            for term, (killed, stood_by) in zip(terms, self._killed_at, strict=True)
            if stood_by
        ]

    def _has_logged(self, moment: str) -> bool:
        assert self._log is not None
        return moment in [_kind(fact) for _, fact in self._log.history()]

    def _kill_worker(self) -> None:
        self.with_worker += 1
        working = [worker for worker in state_file.read_state(self.folder).workers if worker.node is not None]
        os.kill(self._rng.choice(working).pid, signal.SIGKILL)

    def _is_led(self) -> bool:
        try:
            return leader_of(self.folder) != self._last and len(run_folders.waiting_standbys(self.folder)) > 0
        except (OSError, ValueError):
            return False

    def _is_whole(self) -> bool:
        expected = self.config.exchange.replicas * (self.config.pipeline.stages + 1) + self.config.fleet.spares
        return self._is_led() and len(state_file.read_state(self.folder).workers) == expected


def _kind(fact: e.Event | d.Decision) -> str:
    return "evaluate" if isinstance(fact, d.RunStep) and fact.mode == "evaluate" else fact.kind


def phases_at_failovers(record: RunRecord) -> Counter[str]:
    """Count the phases of replicas in which controllers were lost; with two replicas, each kill counts twice."""
    facts = [fact for _, fact in record.history]
    assert isinstance(facts[0], e.RunStarted)
    found, state = Counter[str](), RunState.start(facts[0])
    for fact in facts[1:]:
        if isinstance(fact, e.LeaderStarted):
            found.update(replica.phase for replica in state.live.values())
        state = apply(fact, state)
    return found


def losses(record: RunRecord) -> dict[tuple[int, int], float]:
    """Return (replica, step) → loss of each committed step, as it was computed last."""
    found, committed = dict[tuple[int, int], float](), set[tuple[int, int]]()
    for _, fact in record.history:
        if isinstance(fact, e.StageReady) and fact.mode == "train" and fact.loss is not None:
            found[fact.replica, fact.step] = fact.loss
        elif isinstance(fact, d.Commit):
            committed.add((fact.replica, fact.step))
    return {at: loss for at, loss in found.items() if at in committed}


def different_losses(record: RunRecord, calm: RunRecord) -> int:
    expected = losses(calm)
    return sum(loss != expected.get(at) for at, loss in losses(record).items())


def leader_of(folder: Path) -> int:
    """Return the process of the controller that holds the run's lock.

    :raises OSError:
    :raises ValueError: if none does.
    """
    return int((folder / run_folders.LOCK).read_text())


def written(config: RunConfig) -> str:
    file = RUNS / f"{config.name}.toml"
    file.write_text(recipe.dump(config))
    return str(file)


def _with_standby(config: RunConfig, standby: str) -> RunConfig:
    given = config.fleet.model_dump(exclude_unset=True) | {"standby": standby}
    return named(config.model_copy(update={"fleet": type(config.fleet).model_validate(given)}), config.name)


def named(config: RunConfig, name: str) -> RunConfig:
    """Return the configuration with a free folder of this name."""
    shutil.rmtree(RUNS / name, ignore_errors=True)
    return config.model_copy(update={"name": name})


def _has_ended(folder: Path) -> bool:
    if run_folders.is_held(folder):
        return False
    return any(isinstance(fact, d.Finish) for _, fact in read_run(folder).history)


def _has_begun(folder: Path) -> bool:
    try:
        return any(metric.step > 2 for metric in read_run(folder).trained)
    except UserError:
        return False


def _left(folder: Path) -> list[str]:
    workers = state_file.read_state(folder).workers
    return [w.worker for w in workers if w.start_ticks is not None and w.start_ticks == state_file.start_ticks(w.pid)]


# ---- machines

_READY, _DEPOSED = "ready to lead", "standing by again"
"""words that a machine prints"""


@benchmark("standby_machines", kills=Flag(30), seed=1, dim=Flag(64, "width of the model"))
def run_machines(args: Namespace) -> Measurement:
    """Kill the machine of a run's controller again and again: its process group, without workers.

    A standby follows the shared log in another directory, and a joined machine has all workers; all are processes of
    this machine. A gap is from the signal to the next committed step; fleet.lease_s is 1.
    Claims: median gap <= 3 s; the losses equal an undisturbed run's to the last bit; no sample is lost or used twice.
    """
    with _machines(args, "standby-killed") as machines:
        killed_at = [machines.kill_leader() for _ in range(args.kills)]
        record = machines.stopped()
    gaps = list(map(operator.sub, first_commits(record), killed_at))
    columns = {"max": max(gaps), "kills": len(gaps)}
    return [Row("kill to the next committed step, s", gaps, "0", Claim(high=3.0), columns), *_unchanged(record)]


@benchmark("standby_frozen", stops=Flag(100), seed=1, dim=Flag(64, "width of the model"))
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
    differing, made = different_losses(record, undisturbed(record)), len(losses(record))
    return [
        Row("steps with another loss", [differing], "0", Claim(high=0), {"of": made}),
        Row("samples lost or used twice", [len(prove_exactly_once(record))], "0", Claim(high=0)),
    ]


@benchmark("standby_log", repeats=Flag(5), steps=Flag(60), **MODEL_FLAGS)
def run_shared_log(args: Namespace) -> Measurement:
    """Step times with a log shared in a local folder and without, in turns. Claim: <= 1.03."""

    def side(kind: str) -> float:
        config = real_stages(args, f"log-{kind}", args.steps, spares=1, save_every=0)
        config = named(config, config.name) if kind == "off" else _shared(config, local=True)
        return median(step_seconds(finished(config), SKIP))

    folder, plain = interleaved([lambda: side("folder"), lambda: side("off")], args.repeats)
    columns = {"with, ms": 1e3 * median(folder), "without, ms": 1e3 * median(plain)}
    return [Row("step with a shared log / without", ratios(folder, plain), "1", Claim(high=1.03), columns)]


def _shared(config: RunConfig, local: bool = False) -> RunConfig:
    """Return the run with a log that two machines share; unless ``local``, all workers are elsewhere."""
    place = (RUNS / f"{config.name}-shared").absolute()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    key = place / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    ports = [free_port() for _ in range(2)]
    fleet = {
        "shared_log": str(place / "log"), "key": str(key), "host": "127.0.0.1", "port": ports[0],
        "standby_at": ", ".join(f"127.0.0.1:{port}" for port in ports), "local_workers": None if local else 0,
    }  # fmt: skip
    given = config.fleet.model_dump(exclude_unset=True) | fleet
    return named(config.model_copy(update={"fleet": type(config.fleet).model_validate(given)}), config.name)


@contextmanager
def _machines(args: Namespace, name: str) -> Iterator[_Machines]:
    """Yield a run that trains until it is stopped, with a standby that is ready."""
    with ExitStack() as running:
        machines = _Machines(_shared(endless(args, name, {}, spares=0)), random.Random(args.seed), running)
        machines.start()
        yield machines


@dataclass
class _Seat:
    """A machine that may lead: its latest process, and the folder from which it would lead."""

    at: str
    folder: Path
    process: subprocess.Popen[bytes]
    output: Path

    def has_printed(self, words: str) -> int:
        return self.output.read_text().count(words)


class _Machines:
    """A run on three machines, which are process groups: two that may lead, and one with all workers."""

    def __init__(self, config: RunConfig, rng: random.Random, running: ExitStack) -> None:
        self.config, self._rng, self._running = config, rng, running
        self._place = (RUNS / f"{config.name}-shared").absolute()
        self._term, self._begins = 1, 0
        self.deposed = 0
        """number of stopped controllers that stood by again"""

    def start(self) -> None:
        """Start all, and return once a standby is ready and the first step is committed."""
        (file := self._place / "run.toml").write_text(recipe.dump(self.config))
        (first, second), fleet = self.config.fleet.standby_addresses, self.config.fleet
        folder = (Path(self.config.out) / self.config.name).absolute()
        self._leader = self._seat(first, folder, "train", str(file))
        wait_until("shared log", (self._place / "log" / self.config.name / "files" / run_folders.CONFIG).exists)
        workers = "--workers", str(self.config.pipeline.stages + 1)
        self._begun(self._place / "workers", "join", first, *workers, "--key-file", str(fleet.key))
        self._standby = self._stand_by(second)
        log = LogFollower(folder)
        wait_until("first steps", lambda: any(isinstance(fact, d.Commit) for _, fact in log.history()))

    def kill_leader(self) -> float:
        """Kill the controller's machine at a random moment, and start a standby there; return when (s since 1970)."""
        killed_at, lost = self._lose(signal.SIGKILL), self._leader
        lost.process.wait()
        self._leader, self._standby = self._standby, self._stand_by(lost.at)
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
        self._leader.process.terminate()
        self._leader.process.wait(60.0)
        return read_run(self._leader.folder)

    def _stand_by(self, at: str) -> _Seat:
        """Start a standby, and wait until it is ready."""
        place = self._place / f"standby{self._term}"
        words = str(self._place / "log" / self.config.name), "--standby", "--at", at
        seat = self._seat(
            at, place / "runs" / self.config.name, "join", *words, "--key-file", str(self.config.fleet.key),
            place=place,
        )  # fmt: skip
        wait_until("standby", lambda: seat.has_printed(_READY) > 0)
        return seat

    def _seat(self, at: str, folder: Path, *words: str, place: Path | None = None) -> _Seat:
        process, output = self._begun(place or Path.cwd(), *words)
        return _Seat(at, folder, process, output)

    def _begun(self, place: Path, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a command in its own process group and directory; return it and the file with its output."""
        place.mkdir(exist_ok=True)
        self._begins += 1
        output = self._place / f"output-{self._begins}"
        with output.open("w") as file:
            process = subprocess.Popen(cli(*words), cwd=place, start_new_session=True, stdout=file, stderr=file)
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
    start(kills=run_kills, cost=run_cost, machines=run_machines, frozen=run_frozen, log=run_shared_log)
