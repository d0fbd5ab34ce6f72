"""Random histories of a run."""

from __future__ import annotations

import random
from functools import cache

from support.control.open_replicas import OpenReplicas
from support.control.replica_steps import started

KINDS = [("noloco", 1), ("diloco", 2), ("local", None)]


@cache
def troubled(seed: int) -> OpenReplicas:
    """Return simulated replicas after a random history of faults."""
    rng = random.Random(seed)
    kind, every = rng.choice(KINDS)
    replicas = rng.choice([1, 2, 3])
    sim = OpenReplicas(
        started(
            replicas,
            rng.choice([1, 2, 3]),
            {"kind": kind, "options": {"every": every} if every else {}},
            more=rng.choice([0, 1]) if replicas > 1 else 0,
            steps=6,
            spares=rng.randrange(3),
            replace=rng.random() < 0.7,
            save_every=rng.choice([0, 2]),
            recovery={"strategy": rng.choice(["checkfree", "checkfree, checkpoint", "checkpoint"])},
        )
    )
    for _ in range(400):
        if sim.run.over:
            break
        if pending := sim.pending():
            sim.work(rng.choice(pending))
        elif sim.mail:
            sim.deliver(0)
        if rng.random() < 0.06 and sim.alive:
            _trouble(sim, rng)
    return sim


def _trouble(sim: OpenReplicas, rng: random.Random) -> None:
    worker, there = rng.choice(list(sim.alive)), [h for h in sim.machines if sim.workers_of(h)]
    match rng.choice(["dies", "breaks", "leaves", "joins", "goes", "grace", "patience"]):
        case "dies":
            sim.lose(worker)
        case "breaks" if sim.alive[worker].node >= 0:
            sim.break_edge(worker, rng.randrange(4))
        case "leaves":
            sim.drain(worker)
        case "joins" if len(sim.machines) < 3:
            sim.join(rng.randint(1, 3))
        case "goes" if there:
            rng.choice([sim.leave, sim.vanish])(rng.choice(there))
        case "grace" if sim.suspicious():
            sim.expire_grace(sim.suspicious()[0])
        case "patience" if sim.impatient():
            sim.lose_patience(sim.impatient()[0])
