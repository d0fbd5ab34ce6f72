"""Partitions of a run whose log is at a quorum of holders: only one side commits, and the run continues."""

from __future__ import annotations

import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from netns import FINE, Host, NotAllowedError, Weather, network

from harness import checked, facts, in_one_process, losses, tiny
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.logs import CONFIG, LogFollower, read_run
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PARTITIONS = 10
HOLDER, LEADER, STANDBY = 7010, 7020, 7030
"""ports"""
LIMIT_S = 60.0


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        with network(3) as hosts:
            yield hosts
    except NotAllowedError as error:
        pytest.skip(str(error))


class Seat:
    """A process that leads the run or stands by, and its copy of the log."""

    def __init__(self, process: subprocess.Popen[str], host: int, folder: Path) -> None:
        self.process, self.host, self.folder = process, host, folder
        self.commits = self.term = 0
        self._log: LogFollower | None = None
        self._output: tuple[str, str] | None = None

    def look(self) -> None:
        """Count the commits in its log, and note the highest term of a controller."""
        if self._log is None:
            if not (self.folder / CONFIG).exists():
                return
            self._log = LogFollower(self.folder)
        for _, fact in self._log.history():
            self.commits += isinstance(fact, d.Commit)
            self.term = fact.term if isinstance(fact, e.LeaderStarted) else self.term

    def errors(self) -> str:
        """Wait for its end; return its error output."""
        if self._output is None:
            self._output = self.process.communicate(timeout=LIMIT_S)
        return self._output[1]

    def state(self) -> tuple[object, ...]:
        """Return its progress, and its output if it has ended."""
        return self.folder, self.term, self.commits, self.errors() if self.process.poll() is not None else "running"


class Internet:
    """Two hosts that can lead, a third with all workers, and a holder of the log on each."""

    def __init__(self, folder: Path, hosts: list[Host], running: ExitStack) -> None:
        self.folder, self.hosts, self._running = folder, hosts, running
        key = folder / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        self._key = "--key-file", str(key)
        self.url = "quorum://" + ",".join(f"{host.address}:{HOLDER}" for host in hosts)
        fleet = {
            "local_workers": 0, "spares": 0, "host": hosts[0].address, "port": LEADER, "key": str(key),
            "lease_s": 1.0, "orphan_s": 60.0, "missed_heartbeats": 120, "shared_log": self.url,
            "standby_at": ", ".join(f"{host.address}:{STANDBY}" for host in hosts[:2]),
        }  # fmt: skip
        slow = {"emulate": "links", "latency_s": 0.02}
        self.config = tiny(folder, stages=2, steps=1_000_000, fleet=fleet, network=slow, optim={"schedule": "constant"})
        self.seats = list[Seat]()
        """all that led or stood by"""

    def start(self) -> None:
        for number in range(3):
            self._begun(number, f"holder{number}", "join", f"{self.url}/run", "--hold", self._at(number, HOLDER))
        file = self.folder / "run.toml"
        file.write_text(recipe.dump(self.config))
        process = self._begun(0, "first", "train", str(file), "--quiet", key=False)
        self.leader = self._seat(process, 0, Path(self.config.out) / "run")
        until(lambda: (self.leader.folder / "events.jsonl").exists(), LIMIT_S, shown="the run has not begun")
        self._begun(2, "workers", "join", self._at(0, LEADER), "--workers", "3")
        self.stand_by(1)
        self.train_on(3)

    def stand_by(self, host: int) -> None:
        """Start a standby on a host, and wait until it is ready."""
        name = f"standby{len(self.seats)}"
        process = self._begun(host, name, "join", f"{self.url}/run", "--standby", "--at", self._at(host, STANDBY))
        self.standby = self._seat(process, host, self.folder / name / "runs" / "run")

    def train_on(self, steps: int) -> None:
        """Wait for more steps under whichever controller leads, and seat another standby if it is a new one."""
        begun = time.monotonic()
        before = {seat: seat.commits for seat in (self.leader, self.standby)}
        while self.standby.term <= self.leader.term or self.standby.commits - before[self.standby] < steps:
            for seat in before:
                seat.look()
            ended = [seat.process.poll() is not None for seat in before]
            if self.leader.commits - before[self.leader] >= steps and not any(ended):
                return
            if all(ended) or time.monotonic() - begun > LIMIT_S:
                raise AssertionError([seat.state() for seat in before])
            time.sleep(0.05)
        errors = self.leader.errors()
        assert self.leader.process.returncode in (1, -signal.SIGTERM) and errors.count("planaria: ") == 1, errors
        free, self.leader = self.leader.host, self.standby
        self.stand_by(free)

    def stop(self) -> None:
        """Stop the run; a controller may have lost its lease in the last partition, and be replaced first."""
        self.leader.process.send_signal(signal.SIGTERM)
        while not self.leader.errors().endswith("planaria: stopped by SIGTERM\n"):
            self.train_on(3)
            self.leader.process.send_signal(signal.SIGTERM)

    def _seat(self, process: subprocess.Popen[str], host: int, folder: Path) -> Seat:
        self.seats.append(Seat(process, host, folder))
        return self.seats[-1]

    def _at(self, host: int, port: int) -> str:
        return f"{self.hosts[host].address}:{port}"

    def _begun(self, host: int, name: str, *words: str, key: bool = True) -> subprocess.Popen[str]:
        """Start a command on a host in its own directory; wait for its first line, if it will print one."""
        (self.folder / name).mkdir()
        process = subprocess.Popen(
            [*self.hosts[host].prefix, sys.executable, "-m", "planaria", *words, *(self._key if key else ())],
            cwd=self.folder / name,
            stdout=(self.folder / name / "output").open("w") if name == "workers" else subprocess.PIPE,
            stderr=subprocess.STDOUT if name == "workers" else subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._running.callback(process.communicate)
        self._running.callback(process.kill)
        if {"--hold", "--standby"} & {*words}:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "holding" in line or "ready to lead" in line, (line, process.poll())
        return process


@pytest.mark.parametrize("seed", range(10))
def test_only_one_side_of_a_partition_commits(tmp_path: Path, hosts: list[Host], seed: int) -> None:
    rng = random.Random(seed)
    with ExitStack() as running:
        internet = Internet(tmp_path, hosts, running)
        internet.start()
        for _ in range(PARTITIONS):
            cut = internet.hosts[rng.choice([internet.leader.host, internet.leader.host, internet.standby.host, 2])]
            time.sleep(rng.uniform(0.0, 1.0))
            cut.link(Weather(loss=1.0, lossy=rng.choice(["both", "in", "out"])))
            time.sleep(rng.uniform(0.2, 5.0))
            cut.link(FINE)
            internet.train_on(20)
        internet.stop()
    record = checked(internet.leader.folder)
    made = {(fact.generation, fact.step) for fact in facts(record, d.Commit)}
    for seat in internet.seats:
        committed = facts(read_run(seat.folder), e.StageCommitted) if (seat.folder / "events.jsonl").exists() else []
        assert {(fact.generation, fact.step) for fact in committed} <= made, seat.folder
    assert not facts(record, e.WorkerLost)
    found = losses(record)
    plain = internet.config.model_dump(exclude_unset=True, exclude={"fleet", "network"})
    calm = RunConfig.model_validate(plain | {"train": {**plain["train"], "steps": max(found) + 1}})
    assert found == losses(in_one_process(calm))
    assert {fact.term for fact in facts(record, e.LeaderStarted)} == set(range(2, internet.leader.term + 1))
