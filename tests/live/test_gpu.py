"""Tests that need a CUDA device (``make test-gpu``); elsewhere they are skipped. docs/gpu.md lists devices tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planaria.control.facts import events as e
from planaria.faults.trace import Fault
from planaria.runtime.fleet.devices import VISIBLE, Device, inventory
from support.live.harness import (
    apart,
    ending,
    facts,
    folder_of,
    in_one_process,
    inline,
    losses,
    outcomes,
    resume,
    tiny,
    train,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
CLOSE, ROUNDED = 1e-3, 5e-2
"""largest relative difference of losses: of fp32 on another device, and of bf16"""
ON_GPU: dict[str, Any] = {"device": "cuda"}


@pytest.fixture(autouse=True)
def devices() -> tuple[Device, ...]:
    found = inventory()
    if not found.devices:
        pytest.skip(f"this machine has no CUDA device: {found.lacks}")
    return found.devices


@pytest.fixture
def one(devices: tuple[Device, ...], monkeypatch: pytest.MonkeyPatch) -> str:
    """The machine has one device."""
    monkeypatch.setenv(VISIBLE, devices[0].name)
    return devices[0].name


def test_torch_sees_the_devices_that_were_found(devices: tuple[Device, ...]) -> None:
    """One at a time, as a worker does: of instances of a divided GPU, a process can have one."""
    for device in devices:
        program = (
            f"import json, os; os.environ[{VISIBLE!r}] = {device.name!r}; import torch; "
            "print(json.dumps([torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory]))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        count, memory = json.loads(done.stdout)
        assert count == 1 and memory == pytest.approx(device.memory, rel=0.15)


def test_workers_have_a_device_each_while_there_are_enough(tmp_path: Path, devices: tuple[Device, ...]) -> None:
    record = train(tiny(tmp_path, stages=3, steps=8, train=ON_GPU), [Fault(step=3, stage=2)])
    first = [fact.device for fact in facts(record, e.WorkerJoined) if fact.incarnation == 1]
    assert len(set(first)) == min(len(first), len(devices)) and set(first) <= {device.name for device in devices}
    assert outcomes(record) == ["started", "recovered"]


def test_losses_equal_those_of_a_cpu(tmp_path: Path) -> None:
    on_gpu = train(tiny(tmp_path / "gpu", steps=12, train=ON_GPU))
    on_cpu = train(tiny(tmp_path / "cpu", steps=12))
    assert apart(losses(on_gpu), losses(on_cpu)) <= CLOSE


def test_the_fleet_and_the_inline_engine_have_equal_losses(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, steps=12, train=ON_GPU))
    assert apart(losses(record), inline(record)[0]) <= CLOSE


def test_a_worker_that_is_killed_on_the_one_gpu_is_rebuilt(tmp_path: Path, one: str) -> None:
    record = train(tiny(tmp_path, steps=12, train=ON_GPU), [Fault(step=6, stage=2, moment="commit")])
    assert {fact.device for fact in facts(record, e.WorkerJoined)} == {one}
    assert outcomes(record) == ["started", "recovered"] and ending(record).outcome == "finished"
    assert apart(losses(record), inline(record)[0]) <= CLOSE


def test_a_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    config = tiny(tmp_path, steps=6, train=ON_GPU)
    train(config)
    on_gpu = losses(resume(folder_of(config), train__steps="12"))
    at_once = losses(train(tiny(tmp_path / "at_once", steps=12, train=ON_GPU)))
    assert apart(on_gpu, at_once) <= CLOSE


@pytest.mark.parametrize("engine", ["fleet", "inline"])
def test_bf16_differs_by_its_rounding(tmp_path: Path, engine: str) -> None:
    run = train if engine == "fleet" else in_one_process
    one, other = (
        losses(run(tiny(tmp_path / precision, steps=12, train={**ON_GPU, "precision": precision})))
        for precision in ("fp32", "bf16")
    )
    assert apart(one, other) <= ROUNDED and one != other


@pytest.mark.parametrize("engine", ["fleet", "inline"])
def test_bf16_copies_of_matrices_change_no_loss(tmp_path: Path, engine: str) -> None:
    run, bf16 = (train if engine == "fleet" else in_one_process), {**ON_GPU, "precision": "bf16"}
    one, other = (
        losses(run(tiny(tmp_path / str(copies), steps=12, train={**bf16, "bf16_weights": copies})))
        for copies in (False, True)
    )
    assert one == other


@pytest.mark.parametrize("engine", ["fleet", "inline"])
def test_compiled_stages_give_the_same_losses(tmp_path: Path, engine: str) -> None:
    run, plain = (
        train if engine == "fleet" else in_one_process,
        {"stages": 2, "steps": 6, "fleet": {"missed_heartbeats": 400}},
    )
    one, other = (
        losses(run(tiny(tmp_path / str(compiled), **plain, train={**ON_GPU, "compile": compiled})))
        for compiled in (False, True)
    )
    assert apart(one, other) <= CLOSE
