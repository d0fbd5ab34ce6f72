"""A fake ``nvidia-smi``, and a worker that reports which of its devices are visible to it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

SEEN = ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


def pci(folder: Path, cpus: Sequence[str]) -> Path:
    """Return a folder that lists GPUs next to these CPUs, such as "0-3,8", as the kernel does."""
    for gpu, near in enumerate(cpus):
        (place := folder / "pci" / f"0000:{gpu:02x}:00.0").mkdir(parents=True)
        (place / "local_cpulist").write_text(near + "\n")
    return folder / "pci"


def nvidia_smi(folder: Path, gigabytes: Sequence[int], instances: Sequence[tuple[int, str]] = ()) -> str:
    """Return a PATH whose nvidia-smi lists GPUs of ``gigabytes`` GiB; ``instances`` (GPU, profile) divide some of them.

    A GPU of 0 GiB uses the machine's own memory.
    """
    divided = {gpu for gpu, _ in instances}
    listed, queried = [], []
    for gpu, size in enumerate(gigabytes):
        listed.append(f"GPU {gpu}: NVIDIA Made-up {size}GB (UUID: {uuid(gpu)})")
        queried.append(
            f"{gpu}, {uuid(gpu)}, {size << 10 if size else '[N/A]'}, {'Enabled' if gpu in divided else '[N/A]'}, "
            f"00000000:{gpu:02X}:00.0"
        )
        mine = [(number, profile) for number, (of, profile) in enumerate(instances) if of == gpu]
        listed += [f"  MIG {profile}     Device  {number}: (UUID: MIG-{number:08x})" for number, profile in mine]
    program = folder / "nvidia-smi"
    answers = {
        "-L": "\n".join(listed),
        "--query-gpu=index,uuid,memory.total,mig.mode.current,pci.bus_id": "\n".join(queried),
    }
    program.write_text(f"#!{sys.executable}\nimport sys\nprint({answers!r}[sys.argv[1]])\n")
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def worker(connection: Connection, worker: str, incarnation: int) -> None:
    """Report the visible devices and the CPUs, then wait until the fleet closes the connection."""
    import torch

    touched = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
    cpus = sorted(os.sched_getaffinity(0))
    connection.send_bytes(json.dumps([*(os.environ.get(name) for name in SEEN), touched, cpus]).encode())
    while not connection.poll(60.0):
        time.sleep(0.0)
