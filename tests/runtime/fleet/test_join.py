"""Machines that join a run from outside: what they bring, what they leave behind, and how they go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import Live, apart, checked, ending, facts, live, losses, tiny, training

from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.lab.inline.engine import InlineEngine
from processes import Command

FOREVER = 10_000
PACE: dict[str, Any] = {"emulate": "links", "latency_s": 0.02}
"""steps must not fly: a machine takes seconds to import what it needs, and a test reads the whole log many times"""


@contextmanager
def guest(folder: Path, workers: int = 2, patience: float = 30.0) -> Iterator[Command]:
    """``planaria join`` as a process; killed at the end if it is still there."""
    process = Command("join", folder, f"--workers={workers}", f"--patience={patience:g}")
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def growing(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Two replicas of two processes each, with nodes for a third."""
    exchange = {"replicas": 2, "most": 3, "kind": "noloco", "options": {"every": 4}}
    return tiny(folder, stages=1, steps=FOREVER, exchange=exchange, checkpoint={"every": 20}, network=PACE, **sections)


def settled(record: RunRecord, replica: int) -> int:
    """Rounds in which the replica met others."""
    return sum(replica in s.members and len(s.members) > 1 for s in facts(record, d.Settle))


def disbanded(record: RunRecord) -> list[int]:
    return [fact.replica for fact in facts(record, d.Disband)]


def committed(record: RunRecord, replica: int) -> int:
    return sum(fact.replica == replica for fact in facts(record, d.Commit))


def stopped(run: Live) -> RunRecord:
    """The record of the run, which is asked to stop."""
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.end()
    assert code == 1, errors
    return checked(run.folder)


@pytest.mark.slow
def test_a_machine_brings_a_replica_and_takes_it_along_when_it_leaves(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: committed(record, 0) > 3)
        with guest(run.folder) as machine:
            run.wait_until(lambda record: settled(record, 2) >= 2)
            os.killpg(machine.pid, signal.SIGINT)  # as a terminal does: workers hear it too
            out, errors = machine.communicate(timeout=30)
            assert (machine.returncode, errors) == (0, ""), errors
            assert out.startswith("welcome in run as g1; getting ready\njoined\n") and out.endswith("\nleft\n"), out
        record = run.wait_until(lambda record: 2 in disbanded(record))
        before = committed(record, 0)
        run.wait_until(lambda record: committed(record, 0) > before + 4)
        record = stopped(run)
    assert [fact.replica for fact in facts(record, d.Found)] == [2]
    assert len(facts(record, d.Release)) == 2
    (left,) = facts(record, e.HostLeft)
    assert left.detail == "leaves (SIGINT)"
    copy = next(form for form in facts(record, d.Form) if form.replica == 2)
    assert all(isinstance(m.source, d.Rebuild) and m.source.by == d.PEER for m in copy.members)


def holder(record: RunRecord, stage: int) -> str:
    """Who stands at a stage since the last formation."""
    latest: d.Form = facts(record, d.Form)[-1]
    return next(m.worker for m in latest.members if m.stage == stage)


def since(record: RunRecord) -> int:
    """Steps committed since the last formation."""
    latest = [type(fact) for _, fact in reversed(record.history)]
    return latest[: latest.index(d.Form)].count(d.Commit)


def joined(record: RunRecord) -> dict[str, int]:
    """Worker → its process, latest incarnation."""
    return {fact.worker: fact.pid for fact in facts(record, e.WorkerJoined)}


def unharmed(config: RunConfig, steps: int) -> dict[int, float]:
    """Losses of the first steps, in one process."""
    dataset = prepare(config.data, config.model.vocab)
    streams = [Stream(dataset, split, config.model.context, config.seed) for split in ("train", "validation")]
    engine = InlineEngine(config, *streams)
    return {result.step: result.loss for result in (engine.train_step() for _ in range(steps))}


def test_what_a_leaving_machine_has_is_handed_over_exactly(tmp_path: Path) -> None:
    """It got its stage by a rollback, which is exact too: all losses are those of a run that nothing happened to."""
    exact: dict[str, Any] = {"recovery": {"strategy": "checkpoint"}, "checkpoint": {"every": 5}, "fleet": {"spares": 0}}
    exact["network"] = PACE
    with live(tiny(tmp_path, stages=2, steps=FOREVER, **exact)) as run:
        run.wait_until(lambda record: len(losses(record)) > 3)
        with guest(run.folder, workers=1) as machine:
            record = run.wait_until(lambda record: "w3" in joined(record))
            os.kill(joined(record)[holder(record, 1)], signal.SIGKILL)
            run.wait_until(lambda record: holder(record, 1) == "w3" and since(record) > 2)
            machine.send_signal(signal.SIGTERM)
            assert machine.wait(30) == 0
            run.wait_until(lambda record: holder(record, 1) != "w3" and since(record) > 5)
        record = stopped(run)
    (handed,) = [form for form in facts(record, d.Form) if form.outcome == "handed over"]
    assert [m.source for m in handed.members if m.stage == 1] == [d.Handover(worker="w3")]
    found = losses(record)
    assert apart(found, unharmed(record.config, len(found))) == 0.0


@pytest.mark.slow
def test_a_machine_that_vanishes_costs_the_run_only_what_it_brought(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: committed(record, 0) > 3)
        with guest(run.folder) as machine:
            run.wait_until(lambda record: committed(record, 2) > 5)
            machine.kill()
            run.wait_until(lambda record: 2 in disbanded(record))
        before = len(facts(run.wait_until(lambda _: True), d.Commit))
        run.wait_until(lambda record: len(facts(record, d.Commit)) > before + 8)
        record = stopped(run)
    assert not facts(record, d.Release)
    assert {lost.worker for lost in facts(record, e.WorkerLost)} >= {"w5", "w6"}
    at_home = [spawn.worker for spawn in facts(record, d.Spawn) if not spawn.host]
    assert len(at_home) == 5, "the run's own machines have no room for a third replica"


@pytest.mark.slow
def test_a_worker_that_dies_is_born_again_on_the_machine_where_it_was(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: committed(record, 0) > 3)
        with guest(run.folder) as machine:
            record = run.wait_until(lambda record: committed(record, 2) > 5)
            os.kill(joined(record)["w6"], signal.SIGKILL)
            record = run.wait_until(lambda record: sum(s.host == "g1" for s in facts(record, d.Spawn)) == 3)
            run.wait_until(lambda record: sum(j.worker == "w6" for j in facts(record, e.WorkerJoined)) == 2)
            assert machine.poll() is None
            record = stopped(run)
    assert [(s.worker, s.incarnation) for s in facts(record, d.Spawn) if s.host] == [("w5", 1), ("w6", 1), ("w6", 2)]


@pytest.mark.slow
def test_a_run_that_ends_sends_its_guests_home(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: committed(record, 0) > 0)
        with guest(run.folder) as machine:
            run.wait_until(lambda record: len(facts(record, e.HostJoined)) == 1)
            record = stopped(run)
            out, errors = machine.communicate(timeout=30)
    assert (machine.returncode, errors) == (0, ""), errors
    assert out.endswith("the run is over\n"), out
    assert not (run.folder / "door.json").exists()
    assert ending(record).outcome == "stopped"


@pytest.mark.slow
def test_a_machine_calls_a_run_again_that_was_killed_and_joins_it_when_it_is_resumed(tmp_path: Path) -> None:
    with ExitStack() as ending_last:
        with live(growing(tmp_path)) as run:
            run.wait_until(lambda record: len(facts(record, d.Seal)) > 0)
            machine = ending_last.enter_context(guest(run.folder))
            run.wait_until(lambda record: committed(record, 2) > 0)
            run.process.kill()
            run.end()
        assert machine.poll() is None
        with training(run.folder, "--resume", str(run.folder)) as run:
            run.wait_until(lambda record: len(facts(record, d.Found)) == 2)
            stopped(run)
        out, _ = machine.communicate(timeout=10)
    assert machine.returncode == 0 and "calling it again" in out and out.endswith("the run is over\n"), out


@pytest.mark.slow
def test_a_machine_gives_up_a_run_that_does_not_come_back(tmp_path: Path) -> None:
    with live(growing(tmp_path)) as run:
        run.wait_until(lambda record: committed(record, 0) > 0)
        with guest(run.folder, patience=1.0) as machine:
            run.wait_until(lambda record: len(facts(record, e.HostJoined)) == 1)
            run.process.kill()
            _, errors = machine.communicate(timeout=30)
    assert machine.returncode == 1
    assert errors == f"planaria: {run.folder}: the run has not answered for 1 s\n"
