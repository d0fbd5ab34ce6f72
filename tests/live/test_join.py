"""Machines that join a run from outside: their workers, their remains and their departure."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from support.live.harness import (
    apart,
    commits,
    facts,
    inline_losses,
    live,
    losses,
    pids,
    rounds,
    tiny,
    training,
)
from support.live.joined_machines import FOREVER, PACE, holders, joined_machine, since, stopped


def growing(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Two replicas of two processes each, with nodes for a third."""
    exchange = {"replicas": 2, "max_replicas": 3, "kind": "noloco", "options": {"every": 4}}
    return tiny(folder, stages=1, steps=FOREVER, exchange=exchange, checkpoint={"every": 20}, network=PACE, **sections)


def disbanded(record: RunRecord) -> list[int]:
    return [fact.replica for fact in facts(record, d.Disband)]


@pytest.mark.slow
def test_a_machine_brings_a_replica_and_takes_it_away(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: commits(record, 0) > 3)
        with joined_machine(run.folder) as machine:
            run.wait_until(lambda record: rounds(record, 2) >= 2)
            os.killpg(machine.pid, signal.SIGINT)  # as a terminal does: workers receive it too
            out, errors = machine.communicate(timeout=30)
            assert (machine.returncode, errors) == (0, ""), errors
            assert out.startswith("joined run as g1; starting workers\njoined\n") and out.endswith("\nleft\n"), out
        record = run.wait_until(lambda record: 2 in disbanded(record))
        before = commits(record, 0)
        run.wait_until(lambda record: commits(record, 0) > before + 4)
        record = stopped(run)
    assert [fact.replica for fact in facts(record, d.ReplicaRestarted)] == [2]
    assert len(facts(record, d.Release)) == 2
    (left,) = facts(record, e.HostLeft)
    assert left.detail == "leaves (SIGINT)"
    copy = next(form for form in facts(record, d.Form) if form.replica == 2)
    assert all(isinstance(m.source, d.Rebuild) and m.source.by == d.PEER for m in copy.members)


def test_a_leaving_machine_hands_its_stage_over_exactly(tmp_path: Path) -> None:
    """It got its stage by a rollback, which is exact too: all losses equal those of an undisturbed run."""
    exact: dict[str, Any] = {"recovery": {"strategy": "checkpoint"}, "checkpoint": {"every": 5}, "fleet": {"spares": 0}}
    exact["network"] = PACE
    with live(tiny(tmp_path, stages=2, steps=FOREVER, **exact)) as run:
        run.wait_until(lambda record: len(losses(record)) > 3)
        with joined_machine(run.folder, workers=1) as machine:
            record = run.wait_until(lambda record: "w3" in pids(record))
            os.kill(pids(record)[holders(record)[1]], signal.SIGKILL)
            run.wait_until(lambda record: holders(record)[1] == "w3" and since(record) > 2)
            machine.send_signal(signal.SIGTERM)
            assert machine.wait(30) == 0
            run.wait_until(lambda record: holders(record)[1] != "w3" and since(record) > 5)
        record = stopped(run)
    (handed,) = [form for form in facts(record, d.Form) if form.outcome == "handed over"]
    assert [m.source for m in handed.members if m.stage == 1] == [d.Handover(worker="w3")]
    found = losses(record)
    assert apart(found, inline_losses(record.config, len(found))) == 0.0


@pytest.mark.slow
def test_a_lost_machine_costs_the_run_only_its_own_replica(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: commits(record, 0) > 3)
        with joined_machine(run.folder) as machine:
            run.wait_until(lambda record: commits(record, 2) > 5)
            machine.kill()
            run.wait_until(lambda record: 2 in disbanded(record))
        before = commits(run.wait_until(lambda _: True))
        run.wait_until(lambda record: commits(record) > before + 8)
        record = stopped(run)
    assert not facts(record, d.Release)
    assert {lost.worker for lost in facts(record, e.WorkerLost)} >= {"w5", "w6"}
    at_home = [spawn.worker for spawn in facts(record, d.Spawn) if not spawn.host]
    assert len(at_home) == 5, "the run's own machines have no room for a third replica"


@pytest.mark.slow
def test_a_dead_worker_restarts_on_its_machine(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: commits(record, 0) > 3)
        with joined_machine(run.folder) as machine:
            record = run.wait_until(lambda record: commits(record, 2) > 5)
            os.kill(pids(record)["w6"], signal.SIGKILL)
            record = run.wait_until(lambda record: sum(s.host == "g1" for s in facts(record, d.Spawn)) == 3)
            run.wait_until(lambda record: sum(j.worker == "w6" for j in facts(record, e.WorkerJoined)) == 2)
            assert machine.poll() is None
            record = stopped(run)
    assert [(s.worker, s.incarnation) for s in facts(record, d.Spawn) if s.host] == [("w5", 1), ("w6", 1), ("w6", 2)]


@pytest.mark.slow
def test_a_machine_rejoins_a_killed_run_once_it_is_resumed(tmp_path: Path) -> None:
    with ExitStack() as ending_last:
        with live(growing(tmp_path)) as run:
            run.wait_until(lambda record: len(facts(record, d.Seal)) > 0)
            machine = ending_last.enter_context(joined_machine(run.folder))
            run.wait_until(lambda record: commits(record, 2) > 0)
            run.process.kill()
            run.end()
        assert machine.poll() is None
        with training(run.folder, "--resume", str(run.folder)) as run:
            run.wait_until(lambda record: len(facts(record, d.ReplicaRestarted)) == 2)
            stopped(run)
        out, _ = machine.communicate(timeout=10)
    assert machine.returncode == 0 and "trying again" in out and out.endswith("the run is over\n"), out


@pytest.mark.slow
def test_a_machine_gives_up_a_run_that_is_not_resumed(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: commits(record, 0) > 0)
        with joined_machine(run.folder, patience=1.0) as machine:
            run.wait_until(lambda record: len(facts(record, e.HostJoined)) == 1)
            run.process.kill()
            _, errors = machine.communicate(timeout=30)
    assert machine.returncode == 1
    assert errors == f"planaria: {run.folder}: the run has not answered for 1 s\n"
