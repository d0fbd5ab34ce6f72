"""Machines that join a run across a network: slow and lossy links, hosts that are cut off, and polite goodbyes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import Live, RunRecord, checked, ending, facts, live, resume, tiny, validation_losses
from netns import CUT_OFF, FINE, Host, NotAllowedError, Weather, network
from stranger import FRAME

from planaria.cli.commands.replay import replay_run
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.fleet.joining import read_door

pytestmark = pytest.mark.timeout(300)
FOREVER = 10_000
GUEST = 2
"""the replica that is founded once a machine has joined"""
LONG_S = 150.0
"""for what includes that a machine joins: on a busy one, torch alone takes half a minute to import, twice"""
PACE_S = 0.04
"""one way between neighbouring workers: a step takes at least four times as long, on a fast machine as on a slow one"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """The controller's host, and two for guests."""
    try:
        with network(3, tmp_path / "capture") as hosts:
            yield hosts
    except NotAllowedError as error:
        pytest.skip(str(error))


def three(folder: Path, home: Host, steps: int = FOREVER, **fleet: Any) -> RunConfig:
    """Two replicas at home and room for a third, meeting in pairs."""
    return tiny(
        folder,
        stages=1,
        steps=steps,
        exchange={"replicas": 2, "most": 3, "kind": "noloco", "options": {"every": 3, "bits": 8}, "patience_s": 5.0},
        fleet={"host": home.address, "spares": 0, **fleet},
        network={"emulate": "links", "latency_s": PACE_S},
        train={"steps": steps, "eval_every": 50, "eval_microbatches": 2},
    )


@contextmanager
def joined(run: Live, host: Host) -> Iterator[subprocess.Popen[str]]:
    """``planaria join`` on a host, once the run trains; killed at the end if it is still there."""
    run.wait_until(lambda record: commits(record, 0) > 0, LONG_S)
    command = [*host.prefix, sys.executable, "-m", "planaria", "join", str(run.folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def last_word(guest: subprocess.Popen[str]) -> str:
    """Wait for a guest to end as it should; the last line that it wrote."""
    said, _ = guest.communicate(timeout=60)
    assert guest.returncode == 0, said
    return said.splitlines()[-1]


def stop(run: Live) -> None:
    """Enough was seen."""
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == (1, "planaria: stopped by SIGTERM\n")


def commits(record: RunRecord, replica: int) -> int:
    return sum(commit.replica == replica for commit in facts(record, d.Commit))


def rounds(record: RunRecord, replica: int) -> int:
    """Rounds of the exchange in which this replica met another."""
    return sum(replica in settle.members and len(settle.members) > 1 for settle in facts(record, d.Settle))


def assert_no_stranger_gets_in(host: Host, addresses: list[str]) -> None:
    """One with the whole protocol in his hands, but not the key."""
    command = [*host.prefix, sys.executable, str(Path(__file__).with_name("stranger.py")), *addresses]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert len(told) == len(addresses) * 5 and all(way["said"] == 0 for way in told), told


def assert_nothing_in_clear(capture: Path, key: bytes) -> None:
    """Everything that crossed the network: states, activations, offers, orders and reports."""
    seen = capture.read_bytes().replace(FRAME, b"")  # the stranger's own
    assert len(seen) > 500_000 and seen.count(b"\x16\x03\x01") > 4, "handshakes, and much after them"
    words = [b"PLNR", b'"kind"', b"run_step", b"stage_ready", b"checkpoints", key, key.hex().encode()]
    assert [word for word in words if word in seen] == []


def assert_the_lost_are_ignored(record: RunRecord) -> None:
    """No word of a worker counts once it is lost; those of machines that come again are new ones."""
    lost: set[str] = set()
    for _, fact in record.history:
        match fact:
            case e.WorkerLost(worker=worker):
                lost.add(worker)
            case e.Linked(worker=worker) | e.StageReady(worker=worker) | e.StageCommitted(worker=worker):
                assert worker not in lost
    assert lost


@pytest.mark.slow
def test_a_replica_behind_a_slow_and_lossy_link_takes_part(tmp_path: Path, hosts: list[Host]) -> None:
    home, abroad, _ = hosts
    abroad.link(Weather(latency_s=0.02, jitter_s=0.005, loss=0.01))
    with live(three(tmp_path, home, steps=160), home.prefix) as run, joined(run, abroad) as guest:
        assert run.end(LONG_S) == (0, "")
        assert last_word(guest) == "the run is over"
    assert abroad.link(FINE) > 0, "packets were lost"
    record = checked(run.folder)
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerLost)
    assert rounds(record, GUEST) >= 2 and commits(record, GUEST) >= 6
    first, *_, last = validation_losses(record).values()
    assert last < first


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_done_without_and_joins_again(tmp_path: Path, hosts: list[Host]) -> None:
    home, abroad, stranger = hosts
    with live(three(tmp_path, home, missed=8), home.prefix) as run, joined(run, abroad) as guest:
        early = run.wait_until(lambda record: rounds(record, GUEST) >= 1, LONG_S)
        door = read_door(run.folder)
        assert_no_stranger_gets_in(stranger, [door.at, *(j.at for j in facts(early, e.WorkerJoined))])
        before = run.wait_until(lambda record: rounds(record, GUEST) > rounds(early, GUEST))
        abroad.link(CUT_OFF)
        alone = run.wait_until(lambda record: len(facts(record, e.WorkerLost)) >= 2, LONG_S)
        run.wait_until(lambda record: rounds(record, 0) > rounds(alone, 0) + 1)
        abroad.link(FINE)
        again = run.wait_until(lambda record: rounds(record, GUEST) > rounds(before, GUEST), LONG_S)
        assert len(facts(again, e.HostJoined)) > len(facts(before, e.HostJoined))
        abroad.link(CUT_OFF)
        stop(run)
        assert last_word(guest) == "the run is over", "though nobody could tell it so"
    assert_nothing_in_clear(tmp_path / "capture", bytes.fromhex(door.key))
    assert_the_lost_are_ignored(checked(run.folder))
    assert "same final state" in replay_run(run.folder)
    saved = CheckpointStore(run.folder / "checkpoints").newest()
    assert saved is not None
    record = resume(run.folder, train__steps=str(saved.step + 5), fleet__host="127.0.0.1")
    assert ending(record).outcome == "finished"


@pytest.mark.slow
def test_a_link_that_is_gone_for_less_than_heartbeats_last_costs_nobody(tmp_path: Path, hosts: list[Host]) -> None:
    home, abroad, _ = hosts
    with live(three(tmp_path, home), home.prefix) as run, joined(run, abroad) as guest:
        before = run.wait_until(lambda record: rounds(record, GUEST) >= 1, LONG_S)
        home.link(CUT_OFF)
        time.sleep(0.7)
        assert home.link(FINE) > 0, "packets were lost"
        run.wait_until(lambda record: rounds(record, GUEST) > rounds(before, GUEST) + 1)
        stop(run)
        assert last_word(guest) == "the run is over"
    record = checked(run.folder)
    assert not facts(record, e.WorkerLost) and not facts(record, e.HostLeft)
    assert len(facts(record, d.Form)) == 3, "each replica was formed once"


@pytest.mark.slow
def test_a_machine_that_leaves_hands_over_to_another_across_the_network(tmp_path: Path, hosts: list[Host]) -> None:
    home, abroad, other = hosts
    for host in (abroad, other):
        host.link(Weather(latency_s=0.02))
    with live(three(tmp_path, home), home.prefix) as run, joined(run, abroad) as leaver:
        run.wait_until(lambda record: commits(record, GUEST) > 0, LONG_S)
        with joined(run, other) as heir:
            run.wait_until(lambda record: len(facts(record, e.WorkerJoined)) == 8, LONG_S)
            leaver.send_signal(signal.SIGTERM)
            assert last_word(leaver) == "left"
            left = run.wait_until(lambda record: len(facts(record, e.WorkerLost)) == 2)
            run.wait_until(lambda record: commits(record, GUEST) > commits(left, GUEST) + 5)
            stop(run)
            assert last_word(heir) == "the run is over"
    record = checked(run.folder)
    handed = [m for form in facts(record, d.Form) for m in form.members if isinstance(m.source, d.Handover)]
    assert {member.node for member in handed} == {4, 5}
    assert not facts(record, d.Disband)
