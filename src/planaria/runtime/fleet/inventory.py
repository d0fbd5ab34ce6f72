"""The CUDA devices of this machine, asked of ``nvidia-smi``; and how a process comes to see one of them alone.

CUDA itself is not asked. A process that has initialised it cannot fork workers that use it, and the first question
initialises it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

import torch

from planaria.runtime.fleet.devices import Device, Inventory

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_QUERY = ("--query-gpu=index,uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
_ANSWER_S = 60.0
"""a driver that is not kept loaded takes seconds to begin"""
UNKNOWN = 1 << 62
"""bytes of a device that has no memory of its own but the machine's: nobody is refused for it"""
_GPU = re.compile(r"GPU (\d+):")
_INSTANCE = re.compile(r"\s+MIG \S*?(\d+)gb\S*\s+Device\s+\d+:\s+\(UUID: (MIG-[\w/-]+)\)")


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
