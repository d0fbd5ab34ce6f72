"""Repeated kills of a run's controller: the gap until the next one leads, losses, and the cost of a standby."""

from __future__ import annotations

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
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.field_systems import free_port
from benchmarks.fleet_run import MODEL_FLAGS, finished, real_stages, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Row, benchmark, interleaved, ratios, start
from benchmarks.standby import named
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.logs import EVENTS, RunRecord, read_run
from planaria.report.run.ledger import prove_exactly_once
from planaria.runtime.engine import run_folders

SKIP = 5


@benchmark("standby_machines", kills=Flag(8), seed=1, **MODEL_FLAGS)
def run_machines(given: Namespace) -> Measurement:
    """Kill the machine of a run's controller: the controller's process group, without workers, while a standby follows
    the shared log in another directory and a joined machine has all workers. Both are processes of this machine.

    A gap is from the signal to the next committed step; fleet.lease_s is 1. Claims: median gap <= 3 s; the losses equal
    an undisturbed run's to the last bit; no sample is lost or used twice.
    """
    rng, steps = random.Random(given.seed), 160
    calm = finished(named(real_stages(given, "standby-calm", steps, spares=0, save_every=0), "standby-calm"))
    gaps, differing, unproven = list[float](), 0, 0
    for number in range(given.kills):
        config = _shared(real_stages(given, f"standby-{number}", steps, spares=0, save_every=0))
        killed_at, record = _lost_and_led_elsewhere(config, rng)
        (led_at, started), *_ = [(t, f) for t, f in record.history if isinstance(f, e.LeaderStarted)]
        committed = next(t for t, f in record.history if t > led_at and isinstance(f, d.Commit))
        gaps.append(started.wall_time + committed - led_at - killed_at)
        differing += sum(a.loss != b.loss for a, b in zip(calm.trained, record.trained, strict=True))
        unproven += len(prove_exactly_once(record))
    return [
        Row("kill to the next committed step, s", gaps, "0", Claim(high=3.0), {"max": max(gaps), "kills": len(gaps)}),
        Row("steps with another loss", [differing], "0", Claim(high=0)),
        Row("samples lost or used twice", [unproven], "0", Claim(high=0)),
    ]


@benchmark("standby_frozen", stops=Flag(10), seed=1, **MODEL_FLAGS)
def run_frozen(given: Namespace) -> Measurement:
    """Stop the controller of a run (SIGSTOP) on machines as in standby_machines, and wake it once another one leads.

    Claims: each woken controller exits with one line; the losses equal an undisturbed run's to the last bit, so that no
    order of its was obeyed; no sample is lost or used twice.
    """
    rng, steps = random.Random(given.seed), 160
    calm = finished(named(real_stages(given, "standby-calm", steps, spares=0, save_every=0), "standby-calm"))
    exited, differing, unproven = 0, 0, 0
    for number in range(given.stops):
        config = _shared(real_stages(given, f"standby-{number}", steps, spares=0, save_every=0))
        left, record = _frozen_and_led_elsewhere(config, rng)
        exited += left
        differing += sum(a.loss != b.loss for a, b in zip(calm.trained, record.trained, strict=True))
        unproven += len(prove_exactly_once(record))
    return [
        Row("woken controllers that exited / all", [exited / given.stops], "1", Claim(low=1), {"stops": given.stops}),
        Row("steps with another loss", [differing], "0", Claim(high=0)),
        Row("samples lost or used twice", [unproven], "0", Claim(high=0)),
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
    """Return the run with a shared log and one standby; unless ``local``, its workers are on machines that join."""
    place = (RUNS / f"{config.name}-shared").absolute()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    key = place / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    fleet = {
        "shared_log": str(place / "log"), "key": str(key), "port": free_port(),
        "standby_at": f"127.0.0.1:{free_port()}", "local_workers": None if local else 0,
    }  # fmt: skip
    given = config.fleet.model_dump(exclude_unset=True) | fleet
    return named(config.model_copy(update={"fleet": type(config.fleet).model_validate(given)}), config.name)


@dataclass(frozen=True)
class _Machines:
    """A run on three machines, each a process group of this one."""

    leader: subprocess.Popen[str]
    worker: subprocess.Popen[str]
    standby: subprocess.Popen[str]
    record: Path
    """folder from which the standby leads"""

    def end(self) -> RunRecord:
        """Wait for the end of the run; return the standby's record."""
        self.standby.communicate()
        self.worker.wait()
        self.leader.wait()
        return read_run(self.record)


def _trained_for_a_while(config: RunConfig, rng: random.Random) -> _Machines:
    """Start the run, its workers and its standby, and return at a random moment after twenty steps."""
    place, at, name = (RUNS / f"{config.name}-shared").absolute(), config.fleet.standby_at, config.name
    file, folder = place / "run.toml", Path(config.out) / name
    file.write_text(recipe.dump(config))
    words, key = [sys.executable, "-m", "planaria"], ["--key-file", str(config.fleet.key)]
    train = [*words, "train", str(file), "--quiet"]
    leader = subprocess.Popen(train, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not (place / "log" / name / "files" / run_folders.CONFIG).exists():
        time.sleep(0.2)
    join = [*words, "join", f"127.0.0.1:{config.fleet.port}", "--workers", str(config.pipeline.stages + 1)]
    worker = subprocess.Popen([*join, *key], cwd=place, stdout=subprocess.DEVNULL, text=True)
    lead = [*words, "join", str(place / "log" / name), "--standby", "--at", at, *key]
    standby = subprocess.Popen(lead, cwd=place, stdout=subprocess.PIPE, text=True)
    assert standby.stdout is not None and "ready to lead" in standby.stdout.readline()
    while len([*read_run(folder).trained]) < 20:
        time.sleep(0.2)
    time.sleep(rng.uniform(0.0, 2.0))
    return _Machines(leader, worker, standby, place / "runs" / name)


def _lost_and_led_elsewhere(config: RunConfig, rng: random.Random) -> tuple[float, RunRecord]:
    """Train, and kill the controller at a random moment; return when (s since 1970), and the next one's record."""
    machines = _trained_for_a_while(config, rng)
    killed_at = time.time()
    os.killpg(machines.leader.pid, signal.SIGKILL)
    return killed_at, machines.end()


def _frozen_and_led_elsewhere(config: RunConfig, rng: random.Random) -> tuple[bool, RunRecord]:
    """Train, stop the controller at a random moment, and wake it once another one has committed a step.

    Returns whether it then exited with one line, and the other one's record.
    """
    machines = _trained_for_a_while(config, rng)
    os.killpg(machines.leader.pid, signal.SIGSTOP)
    while not (machines.record / EVENTS).exists() or not _has_committed(read_run(machines.record)):
        time.sleep(0.2)
    os.killpg(machines.leader.pid, signal.SIGCONT)
    _, errors = machines.leader.communicate(timeout=60.0)
    return machines.leader.returncode == 1 and errors.count("\n") == 1, machines.end()


def _has_committed(record: RunRecord) -> bool:
    """Return whether a controller other than the first has committed a step."""
    kinds = [type(fact) for _, fact in record.history if isinstance(fact, e.LeaderStarted | d.Commit)]
    return e.LeaderStarted in kinds and d.Commit in kinds[kinds.index(e.LeaderStarted) :]


if __name__ == "__main__":
    start(machines=run_machines, frozen=run_frozen, log=run_shared_log)
