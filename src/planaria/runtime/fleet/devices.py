"""The CUDA devices and the free memory of a machine, the devices of its workers, and whether they suffice for a run.

Devices are listed with ``nvidia-smi``, because a process that has initialised CUDA cannot fork workers that use it.
``runtime/preparation/requirements.py`` computes the memory of a run's stages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.names import WorkerId

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_QUERY = ("--query-gpu=index,uuid,memory.total,mig.mode.current,pci.bus_id", "--format=csv,noheader,nounits")
_PCI = Path("/sys/bus/pci/devices")
_ANSWER_S = 60.0
"""seconds; loading the driver may take several"""
UNKNOWN = 1 << 62
"""bytes of a device that shares the machine's memory; its limit is not checked"""
_GPU = re.compile(r"GPU (\d+):")
_INSTANCE = re.compile(r"\s+MIG \S*?(\d+)gb\S*\s+Device\s+\d+:\s+\(UUID: (MIG-[\w/-]+)\)")

_GROUPS = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""limit and usage of a control group, in version 2 and 1"""


@dataclass(frozen=True)
class Device:
    """A GPU, or an instance of a divided GPU (MIG)."""

    name: str
    """name in ``CUDA_VISIBLE_DEVICES``"""
    memory: int
    """bytes"""
    cpus: frozenset[int] = frozenset()
    """CPUs of its NUMA node; empty if unknown"""


@dataclass(frozen=True)
class Inventory:
    """The CUDA devices of one machine."""

    devices: tuple[Device, ...] = ()
    lacks: str = ""
    """why there are none"""


@dataclass(frozen=True)
class DeviceNeeds:
    """Device requirements of a run's workers; none on CPUs."""

    stages: tuple[int, ...] = ()
    """least bytes of each stage on a CUDA device; empty on CPUs"""
    sized: bool = False
    """whether a worker gets only stages that fit on its device"""

    @property
    def cuda(self) -> bool:
        return bool(self.stages)

    def min_memory(self, workers: int) -> int:
        """Return the bytes that ``workers`` workers may need on one device; each may hold the largest stage, unless
        stages are assigned by size.
        """
        return (min if self.sized else max)(self.stages) + (workers - 1) * min(self.stages)


ON_CPUS, NO_INVENTORY = DeviceNeeds(), Inventory()


def device_of(worker: str, devices: Sequence[Device], homes: Mapping[WorkerId, str]) -> str:
    """Return the device for a new worker on a machine with at least one.

    Prefers, in this order: fewest other live workers, fewest processes, most memory, first in the list. ``homes`` maps
    every process to its device; only a worker's newest process counts as live.
    """
    newest = {name: max(n for other, n in homes if other == name) for name, _ in homes}
    others = Counter(home for (other, n), home in homes.items() if other != worker and n == newest[other])
    processes = Counter(homes.values())
    return min(devices, key=lambda device: (others[device.name], processes[device.name], -device.memory)).name


def why_insufficient(needs: DeviceNeeds, devices: Inventory, workers: int) -> str:
    """Return why the devices of a machine cannot hold ``workers`` workers, or an empty string if they can."""
    if not needs.cuda:
        return ""
    if not devices.devices:
        return f"has no CUDA device ({devices.lacks})"
    homes: dict[WorkerId, str] = {}
    for number in range(workers):
        homes[WorkerId(str(number), 1)] = device_of(str(number), devices.devices, homes)
    memory = {device.name: device.memory for device in devices.devices}
    for device, count in Counter(homes.values()).items():
        if (least := needs.min_memory(count)) > memory[device]:
            many = f"{count} workers" if count > 1 else "a worker"
            return (
                f"has {memory[device] / 1e9:.1f} GB on device {device}, and {many} may need {least / 1e9:.1f} GB there "
                "for weights, gradient and moments, besides activations"
            )
    return ""


def require_devices(called: str, needs: DeviceNeeds, devices: Inventory, workers: int, advice: str) -> None:
    """Raise UserError if the machine ``called`` so cannot hold the workers; ``advice`` is appended."""
    if workers and (why := why_insufficient(needs, devices, workers)):
        more = "" if not devices.devices else "; more pipeline.stages make each smaller"
        raise UserError(f"train.device = 'cuda': {called} {why}: {advice}{more}")


def inventory(environ: Mapping[str, str] = os.environ, pci: Path = _PCI) -> Inventory:
    """Return the devices visible by ``CUDA_VISIBLE_DEVICES``, in its order; all if it is unset.

    :param pci: folder where the kernel lists the devices of the PCI bus
    """
    import torch  # slow, and the supervisor of a run's workers does without it

    if torch.version.cuda is None:
        return Inventory(lacks="its torch is built without CUDA")
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return Inventory(lacks="nvidia-smi is not on its PATH")
    try:
        listed, queried = (_output(program, *flags) for flags in (("-L",), _QUERY))
        gpus, instances = parse(listed, queried, pci)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        output = getattr(error, "stdout", None) or str(error)
        return Inventory(lacks=f"nvidia-smi fails: {str(output).strip().partition(chr(10))[0][:200]}")
    shown = visible(gpus, instances, environ.get(VISIBLE), environ.get(ORDER) == "PCI_BUS_ID")
    total = len(instances) + len(gpus)
    return Inventory(shown, "" if shown else f"{VISIBLE} = {environ.get(VISIBLE)!r} shows none of its {total}")


def use_only(name: str, devices: Sequence[Device]) -> None:
    """Make the device ``name`` of ``devices`` visible to this process, as ``cuda:0``, and run on the CPUs next to it.

    Memory that the process allocates then lies there too. CPUs that this process may not use stay excluded. Call it
    before the process uses CUDA. An empty name changes nothing.
    """
    if not name:
        return
    os.environ[VISIBLE] = name
    near = next((device.cpus for device in devices if device.name == name), frozenset[int]())
    if allowed := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def parse(listed: str, queried: str, pci: Path = _PCI) -> tuple[dict[int, Device], tuple[Device, ...]]:
    """Parse ``nvidia-smi -L`` and the query into undivided GPUs by index and instances of divided ones.

    :raises ValueError: if a line is invalid.
    """
    gpus: dict[int, Device] = {}
    divided: set[int] = set()
    for line in queried.splitlines():
        index, uuid, mebibytes, mode, bus = (cell.strip() for cell in line.split(","))
        memory = int(mebibytes) << 20 if mebibytes.isdecimal() else UNKNOWN
        gpus[int(index)] = Device(uuid, memory, _cpus_near(pci, bus))
        if mode == "Enabled":
            divided.add(int(index))
    instances: list[Device] = []
    whole = Device("", 0)
    for line in listed.splitlines():
        if gpu := _GPU.match(line):
            whole = gpus.get(int(gpu[1]), whole)
        elif match := _INSTANCE.match(line):
            instances.append(Device(match[2], int(match[1]) * 10**9, whole.cpus))
    return {index: gpu for index, gpu in gpus.items() if index not in divided}, tuple(instances)


def _cpus_near(pci: Path, bus: str) -> frozenset[int]:
    """Return the CPUs of the NUMA node of the device at ``bus`` ("00000000:17:00.0"), or an empty set."""
    domain, _, place = bus.lower().partition(":")
    try:
        listed = (pci / f"{domain[-4:]}:{place}" / "local_cpulist").read_text(encoding="ascii").strip()
        ranges = [part.partition("-") for part in listed.split(",") if part]
        return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()


def visible(
    gpus: Mapping[int, Device], instances: tuple[Device, ...], chosen: str | None, by_bus: bool
) -> tuple[Device, ...]:
    """Return the devices that ``CUDA_VISIBLE_DEVICES`` = ``chosen`` shows by CUDA's rules: the first unknown entry ends
    the list, a repeated one empties it, and a UUID may be abbreviated.

    Unless GPUs are numbered ``by_bus``, as in nvidia-smi, a number may mean any of them, so the smallest memory counts,
    and only CPUs next to all of them.
    """
    if chosen is None:
        return (*gpus.values(), *instances)
    shown: list[Device] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdecimal() and int(entry) in gpus:
            candidates = [gpus[int(entry)]] if by_bus else list(gpus.values())
            near = frozenset.intersection(*(gpu.cpus for gpu in candidates))
            device = Device(entry, min(gpu.memory for gpu in candidates), near)
        else:
            matching = [
                d for d in (*gpus.values(), *instances) if entry[:4] in ("GPU-", "MIG-") and d.name.startswith(entry)
            ]
            if len(matching) != 1:
                break
            device = matching[0]
        if device.name in {earlier.name for earlier in shown}:
            return ()
        shown.append(device)
    return tuple(shown)


def _output(program: str, *flags: str) -> str:
    """Run the program and return its output; SubprocessError or OSError if that fails."""
    done = subprocess.run([program, *flags], capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    return done.stdout


def free_memory(meminfo: Path = Path("/proc/meminfo"), groups: Path = _GROUPS) -> int:
    """Return the bytes that new processes can use here, swap space included; 0 if the system does not report them."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        free = sum(int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError, IndexError):
        return 0
    return min([free, *_within_groups(groups)])


def _within_groups(groups: Path) -> Iterator[int]:
    """Yield what the limits of this process's control groups leave."""
    for limit, usage in _LIMITS:
        with suppress(OSError, ValueError):  # none, or "max"
            yield max(0, int((groups / limit).read_text()) - int((groups / usage).read_text()))
