"""torchrun's side of ``benchmarks.field``: DistributedDataParallel over gloo, restarted from its newest checkpoint.

Rank 0 writes weights and moments every so many updates, whole or not at all. When a rank dies, torch's elastic agent
ends the others and starts all again, and they go on from there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.field_peer import Trainer, job_of


def main(path: str) -> None:
    job = job_of(path)
    dist.init_process_group("gloo")
    rank, share = dist.get_rank(), job.batch // dist.get_world_size()
    trainer = Trainer(job, rank)
    step = restored(trainer)
    module = DistributedDataParallel(trainer.model)
    while True:
        began = time.monotonic()
        trainer.optimizer.zero_grad()
        loss = module(trainer.windows(step * job.batch + rank * share, share))
        loss.backward()
        trainer.clip()
        trainer.optimizer.step()
        trainer.say(began=began, step=step, used=job.batch, upto=(step + 1) * job.batch, loss=loss.item())
        step += 1
        if rank == 0 and step % job.save_every == 0:
            save(trainer, step)


def file_of(trainer: Trainer) -> Path:
    return Path(trainer.job.folder, "checkpoint.pt")


def restored(trainer: Trainer) -> int:
    """Take up the newest checkpoint, if there is one; the number of updates in it."""
    if not (file := file_of(trainer)).exists():
        return 0
    saved = torch.load(file, weights_only=True)
    trainer.model.load_state_dict(saved["model"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def save(trainer: Trainer, step: int) -> None:
    began, file = time.monotonic(), file_of(trainer)
    unfinished = file.with_suffix(".unfinished")
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(), "step": step}
    torch.save(state, unfinished)
    os.replace(unfinished, file)  # noqa: PTH105
    trainer.say(saved=time.monotonic() - began)
