"""Which CUDA device a worker gets, and whether a machine's devices are enough for a run. Pure.

What a machine has is asked in ``runtime/fleet/inventory.py``; what a run's stages take is in
``runtime/engine/needs.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planaria.common.errors import UserError

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
