"""torchft's side of ``benchmarks.field``: one replica, a process that torchrun starts again when it dies.

The loop is that of torchft's own example: a quorum for every update, its DistributedDataParallel, and the update taken
where all agree to commit; a replica that comes back is given the state of another. Samples are given out in one of two
ways. As torchft's sampler does, each replica has the share of its own number, which nobody uses while it is away. Or by
what the manager counts: the next batches after those that were committed, by rank among the replicas that take part.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torchft import Manager, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel

from benchmarks.field_peer import Job, Trainer, job_of

HEARTBEATS_S = 0.5
"""in which a replica that is there has said so to the lighthouse"""


def main(path: str) -> None:
    job, place = job_of(path), int(os.environ["REPLICA_GROUP_ID"])
    trainer = Trainer(job, place)
    share = job.batch // job.ranks

    def state() -> dict[str, Any]:
        return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}

    def load(given: dict[str, Any]) -> None:
        trainer.model.load_state_dict(given["model"])
        trainer.optimizer.load_state_dict(given["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"field_{place}",
        init_sync=False,  # all begin with the same weights
    )
    module = DistributedDataParallel(manager, trainer.model)
    meet(Path(job.folder), place, job.ranks)
    while True:
        began = time.monotonic()
        manager.start_quorum()
        trainer.optimizer.zero_grad()
        loss = module(trainer.windows(first_of(job, manager, place, share), share))
        loss.backward()
        trainer.clip()
        if manager.should_commit():
            trainer.optimizer.step()
            step, taking_part = manager.current_step() - 1, manager.num_participants()
            upto = manager.batches_committed() * share if job.by_committed else (step + 1) * job.batch
            own = {"loss": loss.item()} if manager.is_participating() else {}
            trainer.say(began=began, step=step, used=taking_part * share, upto=upto, **own)
        else:
            trainer.say(dropped=manager.current_step())


def meet(folder: Path, place: int, ranks: int) -> None:
    """In a first life, wait until all have told the lighthouse that they are there: or some would begin alone."""
    ready = folder / f"ready-{place}"
    if ready.exists():
        return
    ready.touch()
    while len(list(folder.glob("ready-*"))) < ranks:
        time.sleep(0.05)
    time.sleep(HEARTBEATS_S)


def first_of(job: Job, manager: Manager, place: int, share: int) -> int:
    """The first sample of this replica's share. One that does not take part computes too, and nothing comes of it."""
    if not job.by_committed:
        return manager.current_step() * job.batch + place * share
    return (manager.batches_committed() + (manager.participating_rank() or 0)) * share
