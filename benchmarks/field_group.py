"""The arm ``group`` of ``benchmarks.field``: one member of a group, a process that torchrun restarts when it dies.

The loop is that of torchft's arm, with ``planaria.host`` or ``planaria.join``, ``wrap`` and ``shard`` around it:
gradients are averaged in every step, and the blocks of absent members are computed by the others.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import planaria
from benchmarks.field_peer import Job, Trainer, job_of

KEY_S = 60.0  # limit for the host's start


class Windows(Dataset[Tensor]):
    """The samples of a job, in order."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        return self._trainer.samples

    def __getitem__(self, number: int) -> Tensor:
        return self._trainer.windows(number, 1)[0]


def main(path: str) -> None:
    job, place, port = job_of(path), int(os.environ["PLACE"]), int(os.environ["GROUP_PORT"])
    trainer = Trainer(job, place)
    trainer.optimizer.register_step_pre_hook(lambda *_: trainer.clip())  # of the averaged gradient
    group = _group(job, place, port)
    optimizer = group.wrap(trainer.optimizer, trainer.model, exchange="allreduce")
    losses: list[float] = []
    began = time.monotonic()
    for windows in group.shard(DataLoader(Windows(trainer), job.batch // job.ranks)):
        loss = trainer.model(windows)
        loss.backward()
        losses.append(loss.item())
        updates = group.progress
        optimizer.step()
        optimizer.zero_grad()
        if group.progress == updates:  # the update needs further blocks of this member
            continue
        step = group.progress - 1
        trainer.say(began=began, step=step, used=job.batch, upto=(step + 1) * job.batch, loss=sum(losses) / len(losses))
        losses, began = [], time.monotonic()


def _group(job: Job, place: int, port: int) -> planaria.Group:
    """Start the group in the first process of place 0; join it in all others."""
    key, hosted = Path(job.folder, "group.key"), Path(job.folder, "hosted")
    if place == 0 and not hosted.exists():
        hosted.touch()
        return planaria.host(port, key=key, out=job.folder, members=job.ranks)
    until = time.monotonic() + KEY_S
    while not key.exists() and time.monotonic() < until:  # a missing key is an error of join
        time.sleep(0.05)
    return planaria.join(f"127.0.0.1:{port}", key=key)
