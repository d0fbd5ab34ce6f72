"""Machines that join a run over a network: slow and lossy links, hosts that are cut off, and regular leaves."""

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

from planaria.cli.commands.check import replay_run
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.runtime.fleet.joining import read_run_address
from support.live import keyless_client
from support.live.harness import (
    Live,
    RunRecord,
    checked,
    commits,
    ending,
    facts,
    live,
    newest,
    resume,
    rounds,
    tiny,
    validation_losses,
)
from support.live.keyless_client import FRAME
from support.netns import CUT_OFF, FINE, Host, NotAllowedError, Weather, network, output_of

pytestmark = pytest.mark.timeout(300)
FOREVER = 10_000
GUEST = 2
"""the replica that is founded once a machine has joined"""
LONG_S = 150.0
"""for a machine to join: on a busy one, importing torch alone takes half a minute, twice"""
PACE_S = 0.04
"""one way between neighbouring workers: a step takes at least four times as long, on a fast machine as on a slow one"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """The controller's host, and two for joined machines."""
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
        exchange={
            "replicas": 2,
            "max_replicas": 3,
            "kind": "noloco",
            "options": {"every": 3, "bits": 8},
            "patience_s": 5.0,
        },
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


def stop(run: Live) -> None:
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == (1, "planaria: stopped by SIGTERM\n")


def assert_keyless_client_gets_no_answer(host: Host, addresses: list[str]) -> None:
    """Try the whole protocol without the key."""
    command = [*host.prefix, sys.executable, keyless_client.__file__, *addresses]
    reported = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert len(reported) == len(addresses) * 5 and all(entry["bytes"] == 0 for entry in reported), reported


def assert_nothing_in_clear(capture: Path, key: bytes) -> None:
    """Search all traffic: states, activations, updates, orders and reports."""
    seen = capture.read_bytes().replace(FRAME, b"")  # of the keyless client
    assert len(seen) > 500_000 and seen.count(b"\x16\x03\x01") > 4, "handshakes, and much after them"
    words = [b"PLNR", b'"kind"', b"run_step", b"stage_ready", b"checkpoints", key, key.hex().encode()]
    assert [word for word in words if word in seen] == []


def assert_the_lost_are_ignored(record: RunRecord) -> None:
    """Check that no report of a worker counts once it is lost; machines that rejoin have new workers."""
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
    with live(three(tmp_path, home, steps=160), home.prefix) as run, joined(run, abroad) as machine:
        assert run.end(LONG_S) == (0, "")
        assert output_of(machine)[-1] == "the run is over"
    assert abroad.link(FINE) > 0, "packets were lost"
    record = checked(run.folder)
    assert ending(record).outcome == "finished" and not facts(record, e.WorkerLost)
    assert rounds(record, GUEST) >= 2 and commits(record, GUEST) >= 6
    first, *_, last = validation_losses(record).values()
    assert last < first


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_lost_and_rejoins(tmp_path: Path, hosts: list[Host]) -> None:
    home, abroad, keyless_host = hosts
    with live(three(tmp_path, home, missed_heartbeats=8), home.prefix) as run, joined(run, abroad) as machine:
        early = run.wait_until(lambda record: rounds(record, GUEST) >= 1, LONG_S)
        address = read_run_address(run.folder)
        assert_keyless_client_gets_no_answer(keyless_host, [address.at, *(j.at for j in facts(early, e.WorkerJoined))])
        before = run.wait_until(lambda record: rounds(record, GUEST) > rounds(early, GUEST))
        abroad.link(CUT_OFF)
        alone = run.wait_until(lambda record: len(facts(record, e.WorkerLost)) >= 2, LONG_S)
        run.wait_until(lambda record: rounds(record, 0) > rounds(alone, 0) + 1)
        abroad.link(FINE)
        again = run.wait_until(lambda record: rounds(record, GUEST) > rounds(before, GUEST), LONG_S)
        assert len(facts(again, e.HostJoined)) > len(facts(before, e.HostJoined))
        abroad.link(CUT_OFF)
        stop(run)
        assert output_of(machine)[-1] == "the run is over", "though no message could reach it"
    assert_nothing_in_clear(tmp_path / "capture", bytes.fromhex(address.key))
    assert_the_lost_are_ignored(checked(run.folder))
    assert "same final state" in replay_run(run.folder)
    record = resume(run.folder, train__steps=str(newest(run.folder).step + 5), fleet__host="127.0.0.1")
    assert ending(record).outcome == "finished"


@pytest.mark.slow
def test_an_outage_shorter_than_the_heartbeat_limit_loses_no_worker(tmp_path: Path, hosts: list[Host]) -> None:
    home, abroad, _ = hosts
    with live(three(tmp_path, home), home.prefix) as run, joined(run, abroad) as machine:
        before = run.wait_until(lambda record: rounds(record, GUEST) >= 1, LONG_S)
        home.link(CUT_OFF)
        time.sleep(0.7)
        assert home.link(FINE) > 0, "packets were lost"
        run.wait_until(lambda record: rounds(record, GUEST) > rounds(before, GUEST) + 1)
        stop(run)
        assert output_of(machine)[-1] == "the run is over"
    record = checked(run.folder)
    assert not facts(record, e.WorkerLost) and not facts(record, e.HostLeft)
    assert len(facts(record, d.Form)) == 3, "each replica was formed once"


@pytest.mark.slow
def test_a_leaving_machine_hands_over_to_another_over_the_network(tmp_path: Path, hosts: list[Host]) -> None:
    home, abroad, other = hosts
    for host in (abroad, other):
        host.link(Weather(latency_s=0.02))
    with live(three(tmp_path, home), home.prefix) as run, joined(run, abroad) as leaver:
        run.wait_until(lambda record: commits(record, GUEST) > 0, LONG_S)
        with joined(run, other) as heir:
            run.wait_until(lambda record: len(facts(record, e.WorkerJoined)) == 8, LONG_S)
            leaver.send_signal(signal.SIGTERM)
            assert output_of(leaver)[-1] == "left"
            left = run.wait_until(lambda record: len(facts(record, e.WorkerLost)) == 2)
            run.wait_until(lambda record: commits(record, GUEST) > commits(left, GUEST) + 5)
            stop(run)
            assert output_of(heir)[-1] == "the run is over"
    record = checked(run.folder)
    handed = [m for form in facts(record, d.Form) for m in form.members if isinstance(m.source, d.Handover)]
    assert {member.node for member in handed} == {4, 5}
    assert not facts(record, d.Disband)
