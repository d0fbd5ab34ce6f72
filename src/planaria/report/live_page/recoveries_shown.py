"""A recovery as the page tells it: five phases, and how long each took."""

from __future__ import annotations

from collections.abc import Callable

from planaria.report.live_page.frames import Json
from planaria.report.run.recovery_timing import RecoveryTiming


def shown(timing: RecoveryTiming, seconds: Callable[[float], float]) -> Json:
    """The phases that are over, with their seconds; ``seconds`` turns the clock's time into the run's.

    noticed: from the fault to its notice; replaced: until the replica is formed anew; linked: until its members hold
    their edges; rebuilt: what transferring and computing the lost state took of the time until all were linked; redone:
    until the first microbatch is through again.
    """
    over: dict[str, float | None] = {"noticed": timing.notice, "replaced": timing.decide}
    if timing.linked_t is not None and timing.formed_t is not None:
        whole = timing.linked_t - timing.formed_t
        rebuilt = min(whole, timing.transfer + timing.rebuild)
        over |= {"linked": whole - rebuilt, "rebuilt": rebuilt, "redone": timing.redo}
    phases = {name: round(took, 4) for name, took in over.items() if took is not None}
    started = timing.lost_t if timing.fault_t is None else timing.fault_t
    found: Json = {
        "began": round(seconds(started), 4),
        "lost": round(seconds(timing.lost_t), 4),
        "where": timing.where,
        "nodes": list(timing.nodes),
        "workers": list(timing.workers),
        "causes": list(timing.causes),
        "heirs": {str(node): worker for node, worker in timing.heirs.items()},
        "step": timing.step,
        "outcome": timing.outcome,
        "attempts": timing.attempts,
        "phases": phases,
        "bytes": timing.transfer_bytes,
    }
    if timing.formed_t is not None:
        found["formed"] = round(seconds(timing.formed_t), 4)
    if timing.linked_t is not None:
        found["linked"] = round(seconds(timing.linked_t), 4)
    if timing.total is not None and timing.finished_t is not None:
        found |= {"ended": round(seconds(timing.finished_t), 4), "total": round(timing.total, 4)}
    return found
