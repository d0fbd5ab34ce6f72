"""torchft's side of ``benchmarks.field``: one replica, a process that torchrun restarts when it dies.

Loop and time limits follow torchft's example (train_ddp.py): a quorum per update, which is applied if all agree to
commit; a returning replica gets the state of another. As documented, its DistributedDataParallel averages gradients,
and each replica reads the samples of its own number, which are skipped while it is away. Tuned: its manager averages
one flat tensor, and samples follow the batches committed so far, by rank among the participants.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel

from benchmarks.field_peer import Job, Trainer, job_of

HEARTBEATS_S = 0.5  # time within which every live replica has reported to the lighthouse


def main(path: str) -> None:
    job, place = job_of(path), int(os.environ["REPLICA_GROUP_ID"])
    trainer = Trainer(job, place)
    share = job.batch // job.ranks

    def state() -> dict[str, Any]:
        return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}

    def load(given: dict[str, Any]) -> None:
        trainer.model.load_state_dict(given["model"])
        trainer.optimizer.load_state_dict(given["optimizer"])

    # Without limits both wait 60 s, also for neighbours that gave up sooner.
    averages, others = (timedelta(seconds=limit) for limit in job.limits)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=averages),
        timeout=others,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"field_{place}",
        init_sync=False,  # all start with the same weights
    )
    module = trainer.model if job.tuned else DistributedDataParallel(manager, trainer.model)
    meet(Path(job.folder), place, job.ranks)
    while True:
        began = time.monotonic()
        manager.start_quorum()
        trainer.optimizer.zero_grad()
        loss = module(trainer.windows(first_of(job, manager, place, share), share))
        loss.backward()
        if job.tuned:
            average(manager, trainer.model)
        trainer.clip()
        if manager.should_commit():
            trainer.optimizer.step()
            step, taking_part = manager.current_step() - 1, manager.num_participants()
            upto = manager.batches_committed() * share if job.tuned else (step + 1) * job.batch
            own = {"loss": loss.item()} if manager.is_participating() else {}
            trainer.say(began=began, step=step, used=taking_part * share, upto=upto, **own)
        else:
            trainer.say(dropped=manager.current_step())


def average(manager: Manager, model: nn.Module) -> None:
    """Average all gradients over the participants as one tensor; after an error nothing is committed."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    manager.allreduce(flat).wait()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def meet(folder: Path, place: int, ranks: int) -> None:
    """At the first start, wait until all replicas have reported to the lighthouse."""
    ready = folder / f"ready-{place}"
    if ready.exists():
        return
    ready.touch()
    while len(list(folder.glob("ready-*"))) < ranks:
        time.sleep(0.05)
    time.sleep(HEARTBEATS_S)


def first_of(job: Job, manager: Manager, place: int, share: int) -> int:
    """Return the first sample of this replica's share; the results of a non-participant are ignored."""
    if not job.tuned:
        return manager.current_step() * job.batch + place * share
    return (manager.batches_committed() + (manager.participating_rank() or 0)) * share
