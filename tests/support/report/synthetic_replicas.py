"""Builders of minimal facts in the log of a fleet with several replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.decisions import Decision, Keep, Member, Rebuild
from planaria.control.facts.events import Event
from planaria.control.log.run_record import Metric, RunRecord
from planaria.report.live_page.frames import apply_patch
from planaria.report.live_page.log_fold import LogFold

SAMPLES = 8
"""of a replica's step"""
Facts = list[tuple[float, Event | Decision]]


def started(replicas: int = 3, steps: int = 10, **given: object) -> e.RunStarted:
    """Two stages a replica: nodes 2r and 2r + 1."""
    return e.RunStarted.model_validate(
        {
            "name": "x", "seed": 1, "stages": 1, "steps": steps, "first_step": 0, "replicas": replicas,
            "samples_per_step": SAMPLES * replicas, "nodes_by_replica": [[2 * r, 2 * r + 1] for r in range(replicas)],
            "wall_time": 0.0, "routes": [[0, 1, 0]], **given,
        }
    )  # fmt: skip


def form(
    replica: int, workers: str, generation: int = 1, outcome: str = "started", step: int = 0,
    rebuilt: dict[int, list[int]] | None = None,
) -> d.Form:  # fmt: skip
    """``workers``: one letter each for stages 0 and 1; ``rebuilt``: stage → donor nodes."""
    members = []
    for stage, worker in enumerate(workers):
        donors = (rebuilt or {}).get(stage)
        source = Keep() if donors is None else Rebuild(by="peer", donors=donors)
        members.append(Member(node=2 * replica + stage, stage=stage, worker=worker, source=source))
    return d.Form(
        replica=replica, generation=generation, step=step, outcome=outcome, members=members, links=[]  # type: ignore[arg-type]
    )  # fmt: skip


def joined(workers: str) -> list[Event | Decision]:
    return [e.WorkerJoined(worker=worker, incarnation=1, pid=1) for worker in workers]


def run_step(replica: int, step: int, block: int, generation: int = 1) -> d.RunStep:
    return d.RunStep(replica=replica, generation=generation, step=step, block=block)


def commit(replica: int, step: int, block: int, replicas: int = 3) -> d.Commit:
    return d.Commit(replica=replica, generation=1, step=step, progress=block // replicas)


def committed(worker: str, step: int) -> e.StageCommitted:
    return e.StageCommitted(worker=worker, stage=0, generation=1, step=step)


def ready(
    replica: int, step: int, loss: float | None, norm: float | None = 1.0, stage: int = 0, mode: e.Mode = "train"
) -> e.StageReady:
    return e.StageReady(
        worker="abcdefgh"[2 * replica + stage], stage=stage, generation=1, step=step, loss=loss, replica=replica,
        mode=mode, grad_norm=norm if mode == "train" else None,
    )  # fmt: skip


def linked(replica: int, stage: int, worker: str, generation: int = 1) -> e.Linked:
    return e.Linked(worker=worker, node=2 * replica + stage, stage=stage, generation=generation, link_s=0.1)


def lost(worker: str) -> e.WorkerLost:
    return e.WorkerLost(worker=worker, incarnation=1, cause="exit", detail="")


def meet(round: int, *members: int) -> d.BeginRound:
    return d.BeginRound(round=round, members=list(members), generations=[1] * len(members), links=[])


def settle(round: int, *members: int) -> d.Settle:
    return d.Settle(round=round, members=list(members), generations=[1] * len(members))


def made(worker: str, node: int, round: int, blocking: int = 0, ahead: int = 0, spread: float = 0.0) -> e.RoundApplied:
    return e.RoundApplied(
        worker=worker, node=node, stage=node % 2, generation=1, round=round, blocking_bytes=blocking,
        prefetched_bytes=ahead, spread=spread,
    )  # fmt: skip


def slow_worker(**changes: Any) -> d.SlowPartFound:
    """Worker b of stage 1 takes three times as long as its peers."""
    fields = {"fault": "slow worker", "nodes": [1], "workers": ["b"], "seconds": 0.06, "initial_s": 0.02}
    return d.SlowPartFound.model_validate({"replica": 0, "step": 9, "peer_median_s": 0.02, **fields, **changes})


def folded(facts: list[Event | Decision]) -> LogFold:
    """Return the live page's fold of these facts, a second apart; check that its frames lead to its state."""
    fold = LogFold(RunConfig())
    seen = fold.state
    for t, fact in timed(facts):
        if (frame := fold.apply(t, fact)) is not None:
            seen = apply_patch(seen, frame.change)
    assert seen == fold.state
    return fold


def record(facts: Facts, metrics: list[Metric] | None = None, works: list[e.WorkReport] | None = None) -> RunRecord:
    config = RunConfig(exchange=ExchangeConfig(replicas=3, kind="noloco"))
    return RunRecord(Path("x"), config, facts, [(0.0, work) for work in works or []], metrics or [])


def timed(facts: list[Event | Decision], start: float = 0.0) -> Facts:
    """A second apart."""
    return [(start + place, fact) for place, fact in enumerate(facts)]
