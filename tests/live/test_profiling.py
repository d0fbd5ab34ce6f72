"""``pipeline.layers = "auto"``: real workers are timed, and the stages of the run are sized to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import free_port

import planaria
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.runtime.prediction.profiling import with_layers, worker_capacities
from planaria.runtime.transport.listener import unreachable
from support.live.custom_families import SLOWER
from support.live.harness import apart, checked, ending, facts, inline, live, losses, pids, tiny
from support.waiting import until

pytestmark = pytest.mark.timeout(240)
LAYERS = {"layers": 12, "family": "support.live.custom_families:Slow"}
TIMED: dict[str, Any] = {"pipeline": {"layers": "auto"}, "recovery": {"strategy": "echo, checkpoint"}}


def spread(folder: Path, local_workers: int, **sections: Any) -> RunConfig:
    """Three block stages and the ends, with room for ``local_workers`` workers here."""
    folder.mkdir(exist_ok=True)
    (folder / "key").write_text("7b" * 32)
    (folder / "key").chmod(0o600)
    plain: dict[str, Any] = {
        "model": {"layers": 12},
        **TIMED,
        "fleet": {"local_workers": local_workers, "spares": 0, "port": free_port(), "key": str(folder / "key")},
        "network": {"emulate": "links", "latency_s": 0.01},
    }
    return tiny(folder, stages=3, **{**plain, **sections})


@contextmanager
def slow_machine(config: RunConfig, folder: Path, slower: float) -> Iterator[subprocess.Popen[str]]:
    """Run ``planaria join`` by address, with two workers whose layers take ``slower`` milliseconds more."""
    join = [sys.executable, "-m", "planaria", "join", f"127.0.0.1:{config.fleet.port}"]
    more = ["--key-file", str(config.fleet.key), "--cache", str(folder / "joiners"), "--workers", "2", "--allow-code"]
    environ = os.environ | {SLOWER: str(slower)}
    process = subprocess.Popen([*join, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def holders(record: RunRecord) -> dict[int, str]:
    """Stage → the machine on which it is, by the newest formation."""
    where = {fact.worker: fact.host for fact in facts(record, d.Spawn)}
    return {m.stage: where[m.worker] for m in facts(record, d.Form)[-1].members}


@pytest.mark.slow
def test_a_slow_machine_gets_small_stages_also_after_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    config = spread(tmp_path, local_workers=2, train={"steps": 30}, model=LAYERS)
    with live(config, flags=["--allow-code"]) as run:
        listens(config.fleet.port)
        with slow_machine(config, tmp_path, slower=10) as machine:
            before = run.wait_until(lambda record: len(facts(record, d.Commit)) > 3, 120)
            kill(before, stage=3)
            assert run.end(120) == (0, "")
            output, _ = machine.communicate(timeout=60)
    assert "timed; the run starts next; trying again for" in output and output.endswith("the run is over\n")
    record = checked(run.folder)
    sizes = list(record.config.pipeline.layers or ())
    assert len(sizes) == 3 and sum(sizes) == 12 and sizes[2] <= 2, sizes
    paces = {fact.worker: fact.layer_s for fact in facts(record, e.WorkerJoined)}
    hosts = {fact.worker: fact.host for fact in facts(record, d.Spawn)}
    assert all((paces[w] > 0.01) == bool(hosts[w]) for w in paces), paces
    assert {stage: bool(host) for stage, host in holders(record).items()} == {0: True, 1: False, 2: False, 3: True}
    assert ending(record).outcome == "finished" and len(facts(record, e.WorkerLost)) == 1
    assert apart(losses(record), inline(record)[0]) == 0.0


def listens(port: int) -> None:
    """Wait until a process listens there."""
    until(lambda: not unreachable(f"127.0.0.1:{port}"), 60.0)


def kill(record: RunRecord, stage: int) -> None:
    member = next(m for m in facts(record, d.Form)[-1].members if m.stage == stage)
    os.kill(pids(record)[member.worker], signal.SIGKILL)


@pytest.mark.slow
def test_equal_machines_have_nearly_equal_stages(tmp_path: Path) -> None:
    config = tiny(tmp_path, steps=4, model={"layers": 10}, **TIMED)
    output: list[str] = []
    run = planaria.train(config, progress=False, notify=output.append)
    record = checked(run.folder)
    sizes = list(record.config.pipeline.layers or ())
    assert (len(sizes), sum(sizes)) == (4, 10) and max(sizes) <= 4, sizes
    assert any(line.startswith(f"stages of {sizes} layers (pipeline.layers)") for line in output)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"], "nothing is left of the timing"
    planaria.train(run.folder, resume=True, settings={"pipeline.layers": "auto", "train.steps": 6}, progress=False)
    trained = losses(checked(run.folder))
    assert sorted(trained) == [*range(6)]
    assert apart({step: trained[step] for step in range(4)}, inline(record)[0]) <= 1e-5


def test_one_process_has_even_stages(tmp_path: Path) -> None:
    config = tiny(tmp_path, steps=2, model={"layers": 10}, **TIMED | {"recovery": {"strategy": "checkpoint"}})
    run = planaria.train(config, engine="inline", progress=False)
    assert list(run.config.pipeline.layers or ()) == [3, 3, 2, 2]


def test_a_run_that_no_machine_joins_leaves_nothing(tmp_path: Path) -> None:
    fleet = {"local_workers": 1, "port": free_port(), "key": str(tmp_path / "key"), "join_s": 0.5}
    why = r"1 of 4 workers are here, and no machine .* \(fleet.join_s\); nothing was written"
    with pytest.raises(RunStopped, match=why):
        planaria.train(spread(tmp_path, local_workers=1, fleet=fleet), progress=False)
    assert not [*(tmp_path / "runs").iterdir()]


@pytest.mark.slow
def test_a_signal_ends_the_timing_and_leaves_nothing(tmp_path: Path) -> None:
    config = spread(tmp_path, local_workers=1)
    with live(config) as run:
        listens(config.fleet.port)
        run.process.terminate()
        code, errors = run.end()
    assert (code, errors) == (1, "planaria: stopped by SIGTERM while the machines were timed; nothing was written\n")
    assert not [*(tmp_path / "runs").iterdir()]


@pytest.mark.parametrize(
    ("sections", "output"),
    [
        ({"fleet": {"local_workers": 1, "spares": 0}}, "set fleet.port and fleet.key"),
        ({"exchange": {"replicas": 2}, "recovery": {"strategy": "checkpoint"}}, "is for one replica"),
        ({"network": {"emulate": True, "forward_s": [0.1] * 5, "backward_s": [0.1] * 5}}, "times real passes"),
        (
            {"recovery": {"strategy": "checkfree"}},
            "a block stage from others of the same size; these have pipeline.layers = 'auto'",
        ),
    ],
)
def test_untimable_runs_are_refused_before_a_worker_starts(
    tmp_path: Path, sections: dict[str, Any], output: str
) -> None:
    with pytest.raises(UserError, match=output):
        planaria.train(tiny(tmp_path, **TIMED | sections), progress=False)


def test_workers_that_share_a_device_share_its_memory() -> None:
    model = {"vocab": 512, "dim": 256, "layers": 12, "hidden": 1024}
    pipeline = {"stages": 3, "layers": "auto"}
    config = RunConfig.model_validate({"model": model, "train": {"device": "cuda"}, "pipeline": pipeline})
    layer = 16 * (4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256)
    big, small = ("g1", timed("a", 9 * layer)), ("", timed("b", 9 * layer))
    found = worker_capacities(config, [big, small, small])
    assert [machine.most for machine in found] == [9, 4, 4]
    assert [machine.ends for machine in found] == [True] * 3
    assert with_layers(config, (7, 4, 1)).model.block_layers == (7, 4, 1)


def timed(device: str, memory: int) -> e.WorkerJoined:
    return e.WorkerJoined(worker="w", incarnation=1, pid=1, device=device, memory=memory, layer_s=1.0)
