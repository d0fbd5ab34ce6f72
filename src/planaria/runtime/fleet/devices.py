"""The CUDA devices of a machine: which it has, which one a worker gets, and whether they are enough for a run.

``nvidia-smi`` reports them, not CUDA: the first question initialises CUDA, and a process that has initialised it cannot
fork workers that use it. The memory that a run's stages take is in ``runtime/engine/needs.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from planaria.common.errors import UserError

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_QUERY = ("--query-gpu=index,uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
_ANSWER_S = 60.0
"""a driver that is not kept loaded takes seconds to begin"""
UNKNOWN = 1 << 62
"""bytes of a device that has no memory of its own but the machine's: nobody is refused for it"""
_GPU = re.compile(r"GPU (\d+):")
_INSTANCE = re.compile(r"\s+MIG \S*?(\d+)gb\S*\s+Device\s+\d+:\s+\(UUID: (MIG-[\w/-]+)\)")
Name = tuple[str, int]
"""worker, incarnation"""


@dataclass(frozen=True)
class Device:
    """A GPU, or one instance of a GPU that is divided (MIG)."""

    name: str
    """as ``CUDA_VISIBLE_DEVICES`` names it"""
    memory: int
    """bytes"""


@dataclass(frozen=True)
class Inventory:
    """The CUDA devices of one machine."""

    devices: tuple[Device, ...] = ()
    lacks: str = ""
    """why there are none"""


@dataclass(frozen=True)
class Needs:
    """What the workers of a run need of the machines they are on; on CPUs, nothing."""

    stages: tuple[int, ...] = ()
    """bytes that each stage takes on a CUDA device, at least; empty where stages compute on CPUs"""
    sized: bool = False
    """does a worker get only stages for which its device has room?"""

    @property
    def cuda(self) -> bool:
        return bool(self.stages)

    def least(self, workers: int) -> int:
        """Bytes that so many workers may come to take on one device: any of them may become the largest stage, unless
        stages go where there is room for them."""
        return (min if self.sized else max)(self.stages) + (workers - 1) * min(self.stages)


ON_CPUS, NOT_ASKED = Needs(), Inventory()


def device_of(worker: str, devices: Sequence[Device], homes: Mapping[Name, str]) -> str:
    """The device of a worker that is about to start on a machine with these ``devices``, at least one.

    It is the one with the fewest other workers. ``homes`` has the device of every process there; all but a worker's
    newest count as dead, and are avoided only among devices that are equally good. Then the device with the most memory
    is taken, then the first. So workers have a device each while there are enough, and a worker that is started again
    gets one that is free.
    """
    newest = {name: max(n for other, n in homes if other == name) for name, _ in homes}
    others = Counter(home for (other, n), home in homes.items() if other != worker and n == newest[other])
    processes = Counter(homes.values())
    return min(devices, key=lambda device: (others[device.name], processes[device.name], -device.memory)).name


def lacking(needs: Needs, found: Inventory, workers: int) -> str:
    """Why so many workers cannot be on a machine with these devices; empty if they can."""
    if not needs.cuda:
        return ""
    if not found.devices:
        return f"has no CUDA device ({found.lacks})"
    homes: dict[Name, str] = {}
    for number in range(workers):
        homes[str(number), 1] = device_of(str(number), found.devices, homes)
    memory = {device.name: device.memory for device in found.devices}
    for device, crowd in Counter(homes.values()).items():
        if (least := needs.least(crowd)) > memory[device]:
            many = f"{crowd} workers" if crowd > 1 else "a worker"
            return (
                f"has {memory[device] / 1e9:.1f} GB on device {device}, and {many} may need {least / 1e9:.1f} GB there "
                "for weights, gradient and moments, besides activations"
            )
    return ""


def require_devices(called: str, needs: Needs, found: Inventory, workers: int, mend: str) -> None:
    """:raises UserError: when the machine ``called`` so cannot have so many workers of a run; ``mend`` is advice."""
    if workers and (why := lacking(needs, found, workers)):
        more = "" if not found.devices else "; more pipeline.stages make each smaller"
        raise UserError(f"train.device = 'cuda': {called} {why}: {mend}{more}")


def inventory(environ: Mapping[str, str] = os.environ) -> Inventory:
    """The devices that ``CUDA_VISIBLE_DEVICES`` leaves visible, in its order; all if it is not set."""
    if torch.version.cuda is None:
        return Inventory(lacks="its torch is built without CUDA")
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return Inventory(lacks="nvidia-smi, which would tell of one, is not on its PATH")
    try:
        listed, asked = (_output(program, *flags) for flags in (("-L",), _QUERY))
        gpus, instances = parse(listed, asked)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stdout", None) or str(error)
        return Inventory(lacks=f"nvidia-smi fails: {str(said).strip().partition(chr(10))[0][:200]}")
    shown = visible(gpus, instances, environ.get(VISIBLE), environ.get(ORDER) == "PCI_BUS_ID")
    there = len(instances) + len(gpus)
    return Inventory(shown, "" if shown else f"{VISIBLE} = {environ.get(VISIBLE)!r} shows none of its {there}")


def see_only(device: str) -> None:
    """Let this process see one device, as ``cuda:0``. In time only before it has asked CUDA anything."""
    os.environ[VISIBLE] = device


def parse(listed: str, asked: str) -> tuple[dict[int, Device], tuple[Device, ...]]:
    """Whole GPUs by index, and instances of divided ones, from what nvidia-smi says to ``-L`` and to the query.

    :raises ValueError: when a line is not as expected.
    """
    gpus: dict[int, Device] = {}
    divided: set[int] = set()
    for line in asked.splitlines():
        index, uuid, mebibytes, mode = (cell.strip() for cell in line.split(","))
        gpus[int(index)] = Device(uuid, int(mebibytes) << 20 if mebibytes.isdecimal() else UNKNOWN)
        if mode == "Enabled":
            divided.add(int(index))
    instances: list[Device] = []
    for line in listed.splitlines():
        if not _GPU.match(line) and (found := _INSTANCE.match(line)):
            instances.append(Device(found[2], int(found[1]) * 10**9))
    return {index: gpu for index, gpu in gpus.items() if index not in divided}, tuple(instances)


def visible(
    gpus: Mapping[int, Device], instances: tuple[Device, ...], chosen: str | None, by_bus: bool
) -> tuple[Device, ...]:
    """The devices that ``CUDA_VISIBLE_DEVICES`` = ``chosen`` shows, by CUDA's rules: the first entry that names none
    ends the list, one that is named twice empties it, and a UUID may be cut short.

    A number keeps its meaning, which is CUDA's: unless GPUs are numbered ``by_bus`` as nvidia-smi does, nobody can say
    here which one it is, and it is taken to have the memory of the smallest.
    """
    if chosen is None:
        return (*gpus.values(), *instances)
    shown: list[Device] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdecimal() and int(entry) in gpus:
            known = [gpus[int(entry)]] if by_bus else gpus.values()
            device = Device(entry, min(gpu.memory for gpu in known))
        else:
            matching = [
                d for d in (*gpus.values(), *instances) if entry[:4] in ("GPU-", "MIG-") and d.name.startswith(entry)
            ]
            if len(matching) != 1:
                break
            device = matching[0]
        if device.name in {other.name for other in shown}:
            return ()
        shown.append(device)
    return tuple(shown)


def _output(program: str, *flags: str) -> str:
    """:raises SubprocessError: when it fails, or takes too long; OSError when it cannot be started."""
    done = subprocess.run([program, *flags], capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    return done.stdout
