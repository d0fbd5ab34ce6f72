"""Reports with the sections that few runs have, beside those of ``every_page``: together they build every part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.measurements import EdgeTravelTimes, PassDurations
from planaria.control.facts.run_started import Recut, RunShape
from planaria.control.log.run_record import RunRecord
from planaria.exchange.coded.coded_facts import CloseRound, ResultsSent
from planaria.lab.experts.experts_results import FittedWeights
from planaria.lab.report import comparison, experts_report
from planaria.planner.schedule import EdgeLoad, SeveralPaths
from planaria.report.run import report, schedule_page
from planaria.report.run.schedule_figures import step_of
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.lines import VoteSummary
from planaria.swarm.repair.repair_results import MASK, Repaired, StrategyResult, TextMeasurements
from planaria.swarm.report import drill_report, swarm_report
from support.report import compression_facts, every_page, failover_facts, holder_facts, trust_facts
from support.report import synthetic_replicas as r
from support.report.synthetic_comparison import HELD, Manner, compared, raced_exchanges

ROUNDS = 24
"""coded steps: enough for the report to compare schemes"""


def bodies(folder: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield (report, sections) of each page; swarms write their logs to ``folder``."""
    yield "run", report.body(resumed())
    yield (
        "run",
        report.body(trust_facts.record(*trust_facts.FACTS, trust_facts.compared(5, {0: 1.0}, {"krum": {0: 0.5}}))),
    )
    yield "run", report.body(coded())
    yield "run", report.body(failover_facts.record((1.0, failover_facts.led(2)), (2.0, failover_facts.commit(0))))
    yield "swarm", voted(folder)
    yield "drill", drill_report.body(every_page.drilled().model_copy(update={"repairs": [repaired()]}))
    yield "experts", experts_report.body(every_page.mixed().model_copy(update={"worst": weighed()}))
    yield "schedule", routed()
    found = compared(HELD | {"tuned": Manner({}, workers=9)})
    searched = found.model_copy(update={"search": found.arms[:1]})
    yield "comparison", comparison.body(searched)
    yield "comparison", comparison.body(raced_exchanges())
    unpriced = searched.arms[0].model_copy(update={"step_s": 0.0})
    yield "comparison", comparison.body(searched.model_copy(update={"arms": [unpriced, *searched.arms[1:]]}))


def resumed() -> RunRecord:
    """Three replicas that compress, in a fleet of another shape with snapshots, a slow
    worker and a machine that joins."""
    was, now = (
        RunShape(stages=stages, ends_layers=0, vocab=257, replicas=3, exchange="allreduce") for stages in (2, 1)
    )
    recut = Recut(checkpoint="step-000004", was=was, now=now, notes=["moments averaged"])
    recovery = {"strategy": "snapshot, checkfree"}
    begin = r.started(recut=recut, recovery=recovery)
    facts = [
        begin, *r.joined("abcdef"),
        *(r.form(replica, "abcdef"[2 * replica : 2 * replica + 2]) for replica in range(3)),
        *(fact for _, fact in holder_facts.HERE[-5:]), *compression_facts.FACTS, gauged(8), r.slow_worker(),
        d.HandOverSlowStage(replica=0, step=9, node=1, worker="b", step_s=0.5, predicted_s=0.2, cost_s=1.0), gauged(12),
    ]  # fmt: skip
    every = every_page.replicated()
    history = [*every.history, *((100.0 + t, fact) for t, fact in enumerate(facts))]
    exchange = {"replicas": 3, "compress": "econtrol:top5%"}
    config = RunConfig.model_validate({"exchange": exchange, "recovery": recovery})
    return RunRecord(Path("x"), config, history, [(101.0, worked("a", 0.0))], every.metrics)


def gauged(step: int) -> e.WorkerMeasurements:
    """Two steps of stage 0, which receives from stage 1."""
    return e.WorkerMeasurements(
        worker="a", node=0, stage=0, generation=1, step=step, steps=2, seconds=0.8,
        passes={"forward": PassDurations(count=8, median_s=0.01), "backward": PassDurations(count=8, median_s=0.02)},
        waited={1: 0.1}, flows={1: EdgeTravelTimes(frames=8, low_s=0.001, high_s=0.002)},
    )  # fmt: skip


def worked(worker: str, start: float) -> e.WorkReport:
    """A microbatch's passes at stage 0."""
    spans = [
        e.Span(action=action, microbatch=0, hop=hop, start=start + begin, end=start + begin + 0.01)
        for action, hop, begin in (("forward", 0, 0.0), ("backward", 0, 0.02))
    ]
    return e.WorkReport(
        worker=worker, node=0, stage=0, generation=1, step=0, spans=spans, sent_bytes={1: 9}, peak_bytes=10**8
    )


def coded() -> RunRecord:
    """Four replicas of one block stage whose coded steps continue without a straggler."""
    config = RunConfig(exchange=ExchangeConfig(replicas=4, coded={"scheme": "gc", "stragglers": 1}))
    columns = [[2 * replica, 2 * replica + 1] for replica in range(4)]
    stages = [[column[stage] for column in columns] for stage in (0, 1)]
    facts: list[e.Event | d.Decision] = [
        r.started(replicas=4, steps=ROUNDS, nodes_by_replica=columns, arrangement=stages, exchange=config.exchange)
    ]
    for step in range(ROUNDS):
        facts.append(d.RunStep(generation=1, step=step))
        facts += [
            ResultsSent(worker="w", node=node, stage=node % 2, generation=1, step=step, round=0)
            for replica in range(3)
            for node in columns[replica]
        ]
        facts.append(CloseRound(generation=1, step=step, round=0, counted=[0, 1, 2]))
    works = [(float(step), worked("w", float(step))) for step in range(ROUNDS)]
    return RunRecord(Path("x"), config, r.timed(facts), works, [])


def voted(folder: Path) -> Iterator[str]:
    """A swarm that learns by votes, issues receipts and draws ahead of learning."""
    votes = VoteSummary(groups=4, labelled=3, share=0.6, right=HitTally(hits=2, eligible=3))
    _, outcome = every_page.swarmed(
        folder, agreed=votes, staleness={0: 3, 1: 5}, stale={"id2": 1},
        stats={"ess": 0.9, "ratio_p99": 1.2, "clipped": 0.1},
    )  # fmt: skip
    voting = {"name": "voters", "task": {"reward": "consensus"}, "receipts": {"committee": "all"}}
    voting |= {"rounds": {"ahead": 1}}
    return swarm_report.body(folder, SwarmConfig.model_validate(voting), outcome)


def repaired() -> Repaired:
    """A peer that a mask repaired."""
    before, after = (TextMeasurements(success={"text": HitTally(hits=hits, eligible=50)}) for hits in (40, 0))
    strategies = [StrategyResult(by=MASK, after=after)]
    return Repaired(arm="attacked", limit=0.02, trusted=9, own=3, benign=9, before=before, strategies=strategies)


def weighed() -> FittedWeights:
    """Weights of two experts for their worst domain."""
    losses = {prior: {"code": 2.0, "tables": 2.5} for prior in ("uniform", "worst")}
    return FittedWeights(
        experts=["code-M", "tables-M"], tokens=64, texts=20, floor=0.01, weights=[0.4, 0.6],
        prices={"code": 0.3, "tables": 0.7}, value=2.4, bound=2.39, residual=1e-5, tolerance=1e-4, certified=True,
        solver="primal-dual", passes=12.0, held_out=losses, test=losses,
    )  # fmt: skip


def routed() -> Iterator[str]:
    """A schedule whose sites are joined by several paths."""
    plan = every_page.planned()
    edges = [EdgeLoad(source=0, target=2, path="north", size=10**6, rate=1e6)]
    paths = SeveralPaths(links={"north": 1e6}, edges=edges, largest_s=1.0, least_s=0.9, cut=["north"])
    plan = plan.model_copy(update={"paths": paths})
    return schedule_page.body(plan, step_of(plan))
