"""Partitions of a run whose log is at a quorum of holders: one side commits, and the run continues without help."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import CONFIG, EVENTS, read_run
from support.live.harness import checked, facts, in_one_process, losses, tiny
from support.live.holders import written_key
from support.netns import FINE, Host, NotAllowedError, Weather, network
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PARTITIONS = 10
HOLDER_PORT, LEADER_PORT = 7010, 7020
LIMIT_S = 60.0
OUTPUT = "output"
"""file with a command's output"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        with network(3) as hosts:
            yield hosts
    except NotAllowedError as error:
        pytest.skip(str(error))


class Candidate:
    """A process that may lead, and the folder from which it leads."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, folder: Path) -> None:
        self.process, self.folder, self._output = process, folder, output

    def position(self) -> tuple[int, int]:
        """Return the highest term of a controller in its log, and the number of commits."""
        if not all((self.folder / name).exists() for name in (CONFIG, EVENTS)):
            return 0, 0
        record = read_run(self.folder)
        terms = [fact.term for fact in facts(record, e.LeaderStarted)]
        return max(terms, default=1), len(facts(record, d.Commit))

    def __repr__(self) -> str:
        return f"{self.folder} {self.position()} {self.process.poll()}\n{self._output.read_text()}"


class PartitionedNetwork:
    """Two hosts that may lead, a third with all workers, and a holder of the log on each."""

    def __init__(self, folder: Path, hosts: list[Host], running: ExitStack) -> None:
        self.folder, self.hosts, self._running = folder, hosts, running
        key = written_key(folder / "key")
        self._key = "--key-file", str(key)
        self.url = "quorum://" + ",".join(f"{host.address}:{HOLDER_PORT}" for host in hosts)
        fleet = {
            "local_workers": 0, "spares": 0, "host": hosts[0].address, "port": LEADER_PORT, "key": str(key),
            "lease_s": 1.0, "orphan_s": 60.0, "missed_heartbeats": 120, "shared_log": self.url,
            "standby_at": ", ".join(f"{host.address}:{LEADER_PORT}" for host in hosts[:2]),
        }  # fmt: skip
        slow = {"emulate": "links", "latency_s": 0.02}
        self.config = tiny(folder, stages=2, steps=1_000_000, fleet=fleet, network=slow, optim={"schedule": "constant"})
        self.candidates = list[Candidate]()

    def start(self) -> None:
        for number in range(3):
            self._start_command(
                number, f"holder{number}", "join", f"{self.url}/run", "--hold", self._address(number, HOLDER_PORT)
            )
        file = self.folder / "run.toml"
        file.write_text(recipe.dump(self.config))
        first = self._start_candidate(
            0, "first", Path(self.config.out) / "run", "train", str(file), "--quiet", key=False
        )
        until(lambda: (first.folder / EVENTS).exists(), LIMIT_S, shown=first)
        self._start_command(2, "workers", "join", self._address(0, LEADER_PORT), "--workers", "3")
        words = "join", f"{self.url}/run", "--standby", "--at", self._address(1, LEADER_PORT)
        self._start_candidate(1, "standby", self.folder / "standby" / "runs" / "run", *words)
        self.train_on(3)

    def leading(self) -> int:
        """Return the host that leads, or led last."""
        return max((candidate.position(), host) for host, candidate in enumerate(self.candidates))[1]

    def train_on(self, steps: int) -> None:
        """Wait for more commits than any log has now."""
        goal = steps + max(candidate.position()[1] for candidate in self.candidates)
        until_s = time.monotonic() + LIMIT_S
        while max(candidate.position()[1] for candidate in self.candidates) < goal:
            if time.monotonic() > until_s or any(candidate.process.poll() is not None for candidate in self.candidates):
                raise AssertionError("\n".join(map(repr, self.candidates)))
            time.sleep(0.1)

    def stop(self) -> Path:
        """Stop the run at the machine that leads; return its folder."""
        while True:
            leader = self.candidates[self.leading()]
            leader.process.send_signal(signal.SIGTERM)
            leader.process.wait(LIMIT_S)
            if facts(read_run(leader.folder), d.Finish):
                return leader.folder
            self.candidates.remove(leader)

    def _start_candidate(self, host: int, name: str, folder: Path, *words: str, key: bool = True) -> Candidate:
        self.candidates.append(
            Candidate(self._start_command(host, name, *words, key=key), self.folder / name / OUTPUT, folder)
        )
        return self.candidates[-1]

    def _address(self, host: int, port: int) -> str:
        return f"{self.hosts[host].address}:{port}"

    def _start_command(self, host: int, name: str, *words: str, key: bool = True) -> subprocess.Popen[bytes]:
        """Start a command on a host in its own directory; wait until a holder or a standby is ready."""
        (self.folder / name).mkdir()
        with (output := self.folder / name / OUTPUT).open("w") as file:
            process = subprocess.Popen(
                [*self.hosts[host].prefix, sys.executable, "-m", "planaria", *words, *(self._key if key else ())],
                cwd=output.parent, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        if {"--hold", "--standby"} & {*words}:
            ready = "holding", "ready to lead"
            until(lambda: any(words in output.read_text() for words in ready), LIMIT_S, shown=output)
        return process


@pytest.mark.parametrize("seed", range(10))
def test_only_one_side_of_a_partition_commits(tmp_path: Path, hosts: list[Host], seed: int) -> None:
    """Two commits of one step would change the losses compared to a run without partitions."""
    rng = random.Random(seed)
    with ExitStack() as running:
        net = PartitionedNetwork(tmp_path, hosts, running)
        net.start()
        for _ in range(PARTITIONS):
            leader = net.leading()
            cut = net.hosts[rng.choice([leader, leader, 1 - leader, 2])]
            time.sleep(rng.uniform(0.0, 1.0))
            cut.link(Weather(loss=1.0, lossy=rng.choice(["both", "in", "out"])))
            time.sleep(rng.uniform(0.2, 5.0))
            cut.link(FINE)
            net.train_on(20)
        record = checked(net.stop())
    assert not facts(record, e.WorkerLost)
    found = losses(record)
    plain = net.config.model_dump(exclude_unset=True, exclude={"fleet", "network"})
    calm = RunConfig.model_validate(plain | {"train": {**plain["train"], "steps": max(found) + 1}})
    assert found == losses(in_one_process(calm))
    terms = [fact.term for fact in facts(record, e.LeaderStarted)]
    assert terms == [*range(2, 2 + len(terms))]
