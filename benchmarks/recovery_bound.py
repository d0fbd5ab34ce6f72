"""The least time a recovery can take on this machine, part by part, each part measured by itself and at its best.

    T ≥ detect + decide + relink + 2 · S / B + redo of one microbatch

detect: a killed process of the same weight, doing nothing, until its fleet says so; decide: arithmetic, taken as 0;
relink: one new edge; 2 · S / B: the state of both donors through one gloo pair; redo: each of one
microbatch's passes at the fastest that the run ever did it, nothing else on the way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.pair import opened
from planaria.control import decisions as d
from planaria.control import events as e

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord
    from planaria.runtime.fleet.base import ControlLine

_PASSES = 5


def parts(record: RunRecord, state_bytes: int) -> dict[str, float]:
    """Seconds of each part, for stages of ``state_bytes`` in a run like ``record``'s."""
    with opened(state_bytes) as pair:
        relink = min(pair.link(f"again {n}") for n in range(_PASSES))
        pair.transfer("gloo", state_bytes, 1)  # first touches
        transfer = min(pair.transfer("gloo", state_bytes, 2) for _ in range(_PASSES))
    return {"detect": detect_s(), "relink": relink, "2S/B": transfer, "redo": redo_s(record)}


def proof_s() -> float:
    """The two ends of a new edge prove the run's key to each other; a part of relink."""
    with opened(1) as pair:
        return min(pair.prove(number) for number in range(_PASSES))


def redo_s(record: RunRecord) -> float:
    """One microbatch through all stages and back, every pass at its fastest."""
    fastest: dict[tuple[int, str, int], float] = {}
    for _, work in record.worked:
        for span in work.spans:
            if span.action in ("forward", "backward"):
                key = work.stage, span.action, span.hop
                fastest[key] = min(span.end - span.start, fastest.get(key, float("inf")))
    return sum(fastest.values())


def birth_s(record: RunRecord) -> float:
    """The fastest birth of a worker after the run had begun: from the decision to spawn it until it reported in."""
    asked: dict[str, float] = {}
    took: list[float] = []
    begun = False
    for t, fact in record.history:
        begun = begun or isinstance(fact, d.RunStep)
        if isinstance(fact, d.Spawn):
            asked[fact.worker] = t
        elif isinstance(fact, e.WorkerJoined) and begun:
            took.append(t - asked[fact.worker])
    return min(took)


def detect_s() -> float:
    """From SIGKILL to an idle worker until its fleet's death notice; the least of a few."""
    import signal

    from benchmarks import recovery_bound
    from planaria.runtime.engine import worker
    from planaria.runtime.fleet.base import Gone, Said
    from planaria.runtime.fleet.local import LocalFleet

    fleet = LocalFleet(recovery_bound.idle, [worker.__name__], heartbeat_s=10.0, missed=6)
    took = []
    for number in range(_PASSES):
        fleet.spawn(f"w{number}", 1)
        while not any(isinstance(notice, Said) for notice in fleet.poll(0.1)):
            pass
        began = time.monotonic()
        fleet.signal(f"w{number}", 1, signal.SIGKILL)
        while not any(isinstance(notice, Gone) for notice in fleet.poll(0.1)):
            pass
        took.append(time.monotonic() - began)
    fleet.close()
    return min(took)


def idle(connection: ControlLine, worker: str, incarnation: int) -> None:
    """A worker that says it is there, and nothing more."""
    connection.send_bytes(b"here")
    time.sleep(60.0)
