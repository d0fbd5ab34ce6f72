"""A machine's devices by a fake ``nvidia-smi``, the devices that workers see, and runs refused for lack of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from planaria.common.errors import UserError
from planaria.config.schema import FleetConfig, RunConfig
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet import spawner
from planaria.runtime.fleet.base import Reported, Workplace
from planaria.runtime.fleet.devices import UNKNOWN, Device, DeviceNeeds, Inventory, inventory
from planaria.runtime.fleet.local import LocalFleet
from planaria.runtime.fleet.process import WorkerProcess
from planaria.runtime.fleet.process_pool import PoolConfiguration, ProcessPool
from planaria.runtime.preparation.config_checks import check, require_device
from support.live import fake_nvidia_smi
from support.live.fake_nvidia_smi import nvidia_smi, pci, uuid
from support.waiting import until

GIB = 1 << 30

FORKING = [
    "planaria.runtime.api.training",
    "planaria.runtime.engine.machine_service",
    "planaria.swarm.commands.swarm",
    "planaria.swarm.commands.drill",
]
"""what commands have imported before they fork their server"""


@pytest.fixture(autouse=True)
def _with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built with CUDA, on a machine without CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def found(tmp_path: Path, gigabytes: list[int], *instances: tuple[int, str], **environ: str) -> Inventory:
    return inventory({"PATH": nvidia_smi(tmp_path, gigabytes, instances), **environ}, tmp_path / "no such bus")


def test_all_devices_are_found_by_their_uuids(tmp_path: Path) -> None:
    assert found(tmp_path, [80, 24]) == Inventory((Device(uuid(0), 80 * GIB), Device(uuid(1), 24 * GIB)))
    assert found(tmp_path, [0]).devices == (Device(uuid(0), UNKNOWN),), "it uses the machine's memory"


def test_the_users_choice_keeps_its_order_and_names(tmp_path: Path) -> None:
    """CUDA's own numbers count from the fastest device, which is not known here: the smallest memory is assumed."""
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    chosen = found(tmp_path, [80, 24, 24], CUDA_VISIBLE_DEVICES="2,0", **by_bus)
    assert chosen.devices == (Device("2", 24 * GIB), Device("0", 80 * GIB))
    named = found(tmp_path, [80, 24, 24], CUDA_VISIBLE_DEVICES=f"{uuid(1)},GPU-00000000")
    assert named.devices == (Device(uuid(1), 24 * GIB), Device(uuid(0), 80 * GIB))
    assert found(tmp_path, [80, 24], CUDA_VISIBLE_DEVICES="0").devices == (Device("0", 24 * GIB),)


@pytest.mark.parametrize(
    ("chosen", "left"), [("", []), ("-1", []), ("0,-1,1", ["0"]), ("0,9,1", ["0"]), ("1,1", []), ("GPU-0", [])]
)
def test_lists_of_devices_follow_cudas_rules(tmp_path: Path, chosen: str, left: list[str]) -> None:
    shown = found(tmp_path, [80, 80], CUDA_VISIBLE_DEVICES=chosen)
    assert [device.name for device in shown.devices] == left
    assert left or f"CUDA_VISIBLE_DEVICES = {chosen!r} shows none of its 2" in shown.lacks


def test_instances_of_a_divided_gpu_replace_it(tmp_path: Path) -> None:
    divided = ((0, "3g.20gb"), (0, "1g.5gb+me"))
    shown = found(tmp_path, [40, 40], *divided)
    assert shown.devices == (
        Device(uuid(1), 40 * GIB),
        Device("MIG-00000000", 20 * 10**9),
        Device("MIG-00000001", 5 * 10**9),
    )
    assert found(tmp_path, [40], *divided, CUDA_VISIBLE_DEVICES="MIG-00000001").devices == shown.devices[2:]
    assert not found(tmp_path, [40], *divided, CUDA_VISIBLE_DEVICES="0").devices, "the whole of it cannot be had"


def test_the_cpus_next_to_each_device_are_read_from_the_kernel(tmp_path: Path) -> None:
    near, bus = [frozenset({0, 1, 2, 3, 8}), frozenset({4, 5})], pci(tmp_path, ["0-3,8", "4-5", ""])
    path = nvidia_smi(tmp_path, [80, 80, 80, 80], [(0, "3g.20gb")])
    shown = inventory({"PATH": path}, bus).devices
    assert [device.cpus for device in shown] == [near[1], frozenset(), frozenset(), near[0]], (
        "an instance has its GPU's"
    )
    by_bus = inventory({"PATH": path, "CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, bus)
    assert by_bus.devices[0].cpus == near[1]
    assert not inventory({"PATH": path, "CUDA_VISIBLE_DEVICES": "1"}, bus).devices[0].cpus, "it may be any of them"
    (bus / "0000:01:00.0" / "local_cpulist").write_text("nonsense")
    assert not inventory({"PATH": path}, bus).devices[0].cpus


def test_the_reason_for_no_device_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nvidia-smi is not on its PATH" in inventory({"PATH": str(tmp_path)}).lacks
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'; exit 9\n")
    program.chmod(0o755)
    assert inventory({"PATH": str(tmp_path)}).lacks == "nvidia-smi fails: NVIDIA-SMI has failed: no driver"
    program.write_text("#!/bin/sh\necho nonsense\n")
    assert inventory({"PATH": f"{tmp_path}:{os.environ['PATH']}"}).lacks.startswith("nvidia-smi fails: ")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert inventory({"PATH": str(tmp_path)}).lacks == "its torch is built without CUDA"


# ---- what workers see


@contextmanager
def fleet_on(devices: tuple[Device, ...] = ()) -> Iterator[LocalFleet]:
    fleet = LocalFleet(
        fake_nvidia_smi.worker, ["torch", fake_nvidia_smi.__name__], FleetConfig(heartbeat_s=10.0), devices
    )
    try:
        yield fleet
    finally:
        fleet.close(patience_s=0.0)


def reported(fleet: LocalFleet, workers: int) -> dict[str, list[object]]:
    """Return the devices that each of ``count`` workers reports."""
    output: dict[str, list[object]] = {}

    def poll() -> None:
        output.update({n.worker: json.loads(n.text) for n in fleet.poll(0.1) if isinstance(n, Reported)})

    until(lambda: len(output) >= workers, 60.0, poll, output)
    return output


@pytest.mark.slow
def test_each_local_worker_has_its_own_device_and_the_cpus_next_to_it(tmp_path: Path) -> None:
    """CUDA is not initialised. A device without CPUs that this process may use leaves them as they are."""
    usable = sorted(os.sched_getaffinity(0))
    bus = pci(tmp_path, [str(usable[0]), f"{usable[-1]},{usable[-1] + 1000}", str(usable[-1] + 1000)])
    devices = inventory({"PATH": nvidia_smi(tmp_path, [80, 80, 80])}, bus).devices
    expected = {
        f"w{number}": [uuid(number), "1", False, cpus]
        for number, cpus in enumerate(([usable[0]], [usable[-1]], usable))
    }
    with fleet_on(devices) as fleet:
        for worker in expected:
            fleet.spawn(worker, 1)
        assert reported(fleet, 3) == expected
        fleet.signal("w1", 1, signal.SIGKILL)
        fleet.spawn("w1", 2)
        assert reported(fleet, 1) == {"w1": expected["w1"]}
    with fleet_on() as fleet:
        fleet.spawn("w0", 1)
        assert reported(fleet, 1)["w0"][0] is None, "without devices the environment is left as it is"


class Unforked:
    """Starts no process; it records the commands."""

    def __init__(self) -> None:
        self.runs: list[tuple[object, ...]] = []
        self.folders = set[Path | None]()

    def prepare(self, preload: list[str]) -> None: ...

    def spawn(
        self, name: str, run: object, preload: list[str], cwd: Path | None = None, start_s: float = 0.0
    ) -> WorkerProcess:
        self.runs.append(run.args)
        self.folders.add(cwd)
        child = WorkerProcess(name)
        child.record_start(os.getpid())
        return child


def test_a_pools_workers_get_free_or_reserved_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = Unforked()
    monkeypatch.setattr("planaria.runtime.fleet.process_pool.spawner", lambda: forks)
    monkeypatch.setattr("planaria.runtime.fleet.process._exit_code", lambda pid: None)
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, [80, 80]))
    before = Path.cwd()
    pool = ProcessPool(
        PoolConfiguration(lambda *_: Workplace(fake_nvidia_smi.worker, tmp_path), [], "", b"", DeviceNeeds((1,)))
    )
    assert len(pool.facts().devices.devices) == 2
    for worker in ("w0", "w1"):
        pool.start(worker, 1)
    pool.start("w1", 2)
    pool.start("w2", 1, uuid(0))
    assert [run[3].args[0] for run in forks.runs] == [uuid(0), uuid(1), uuid(1), uuid(0)]
    assert forks.folders == {tmp_path} and Path.cwd() == before, "relative paths of this process stay valid"


@pytest.mark.slow
def test_the_imports_of_workers_do_not_initialise_cuda() -> None:
    """One call in the fork server, or in a command that forks it, would break CUDA in every worker."""
    program = (
        "import sys, torch, traceback\n"
        "def caught(*_): traceback.print_stack(); sys.exit('CUDA was asked')\n"
        "torch.version.cuda = '13.0'\n"
        "torch.cuda._is_compiled = lambda: True\n"
        "torch.cuda._device_count_nvml = lambda: 1\n"
        "for name in ('getDeviceCount', 'init', 'getDevice', 'getCurrentRawStream'):\n"
        "    setattr(torch._C, '_cuda_' + name, caught)\n"
        f"for name in {PRELOAD + FORKING!r}: __import__(name)\n"
        "assert torch.cuda.is_available(), 'answered without CUDA'\n"
    )
    environ = {**os.environ, **spawner._NO_CUDA}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- refusals


def on_cuda(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"train": {"device": "cuda"}, **sections})


def test_devices_are_checked_where_workers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local fleet asks this machine, a Ray cluster its nodes, and an engine in this process torch."""
    monkeypatch.setenv("PATH", str(tmp_path))
    lacks = r"has no CUDA device .nvidia-smi.*: use 'cpu', .*fleet.local_workers = 0.*or fleet.kind = 'ray'"
    with pytest.raises(UserError, match=lacks):
        check(on_cuda())
    check(on_cuda(fleet={"kind": "ray"}))
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, [8]))
    check(on_cuda())
    large = {"dim": 4096, "hidden": 11008, "heads": 32, "layers": 32}
    with pytest.raises(UserError, match=r"this machine has 8\.6 GB on device GPU-.*, and 6 workers may need .* GB"):
        check(on_cuda(model=large))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="this machine has no CUDA device; use 'cpu'"):
        check(on_cuda(engine="inline"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_device(on_cuda())
