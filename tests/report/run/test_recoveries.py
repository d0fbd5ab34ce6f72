from __future__ import annotations

from pathlib import Path

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Commit, Decision, Form, Keep, Member, Rebuild, RunStep, Unrecoverable
from planaria.control.facts.events import (
    EdgeBroken,
    Event,
    FaultInjected,
    Linked,
    RunStarted,
    Span,
    WorkerJoined,
    WorkerLost,
    WorkReport,
)
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.report.run.recoveries import faults_summary, recoveries
from planaria.report.run.stage_holders import StageStay, holdings
from support.report.synthetic_run import DECIDE, LINK, NOTICE, REBUILD, TRANSFER, Synthesis


def record(*history: tuple[float, Event | Decision], works: list[WorkReport] | None = None) -> RunRecord:
    return RunRecord(Path("x"), RunConfig(), list(history), [(w.spans[-1].end, w) for w in works or []], [])


def started(first: int = 0) -> RunStarted:
    return RunStarted(name="x", seed=1, stages=2, steps=9, first_step=first, samples_per_step=4, wall_time=0.0)


def form(generation: int, workers: str, outcome: str = "recovered", step: int = 3, rebuilt: int | None = None) -> Form:
    members = [
        Member(node=s, stage=s, worker=w, source=Rebuild(by="checkfree", donors=[0]) if s == rebuilt else Keep())
        for s, w in enumerate(workers)
    ]
    return Form(generation=generation, step=step, outcome=outcome, members=members, links=[])  # type: ignore[arg-type]


def linked(generation: int, stage: int, worker: str, **seconds: float) -> Linked:
    return Linked(worker=worker, node=stage, stage=stage, generation=generation, **{"link_s": 0.1, **seconds})  # type: ignore[arg-type]


def lost(worker: str) -> WorkerLost:
    return WorkerLost(worker=worker, incarnation=0, cause="exit", detail="")


def fault(worker: str, signal: str = "SIGKILL") -> FaultInjected:
    return FaultInjected(worker=worker, node=1, signal=signal, step=3, moment="")


def work(generation: int, end: float, action: str = "backward", hop: int = 0) -> WorkReport:
    span = Span(action=action, microbatch=0, hop=hop, start=end - 0.1, end=end)  # type: ignore[arg-type]
    return WorkReport(worker="a", node=0, stage=0, generation=generation, step=3, spans=[span], sent_bytes={})


BEGIN = [(0.0, started()), (1.0, form(1, "abc", "started", 0)), (2.0, RunStep(generation=1, step=3))]
LINKED = [
    (13.0, linked(2, 0, "a")),
    (13.1, linked(2, 2, "c")),
    (13.5, linked(2, 1, "d", transfer_s=0.4, rebuild_s=0.2)),
]


def test_a_recovery_is_split_at_its_moments(tmp_path: Path) -> None:
    first, second = recoveries(read_run(Synthesis(tmp_path).write()))
    assert (first.step, first.stages, first.workers, first.new_workers) == (12, (2,), ("w2",), {2: "w5"})
    assert (second.step, second.stages, second.generation, second.outcome) == (27, (3,), 3, "recovered")
    assert first.notice == pytest.approx(NOTICE)
    assert first.decide == pytest.approx(DECIDE)
    assert (first.relink, first.transfer, first.rebuild) == (LINK, TRANSFER, REBUILD)
    assert first.redo is not None and first.total is not None and first.finished_t is not None
    assert first.total == pytest.approx(first.finished_t - first.fault_t)
    parts = first.notice + first.decide + first.relink + first.transfer + first.rebuild + first.redo
    assert first.total == pytest.approx(parts, abs=0.02)


def test_without_a_known_fault_the_clock_starts_at_the_notice(tmp_path: Path) -> None:
    first, _ = recoveries(read_run(Synthesis(tmp_path, faults_known=False).write()))
    assert first.notice is None
    assert first.total == pytest.approx(first.finished_t - first.lost_t)


def test_the_first_microbatch_of_the_new_generation_counts() -> None:
    works = [work(1, 12.9), work(2, 14.5), work(2, 14.2), work(2, 14.0, "forward", 0)]
    (timing,) = recoveries(record(*BEGIN, (10.0, lost("b")), (11.0, form(2, "adc")), *LINKED, works=works))
    assert (timing.linked_t, timing.finished_t) == (13.5, 14.2)
    assert timing.redo == pytest.approx(0.7)


def test_in_a_validation_the_head_ends_a_microbatch() -> None:
    works = [work(2, 14.0, "forward", 0), work(2, 14.3, "forward", 3), work(2, 19.0)]
    evaluate = (13.6, RunStep(generation=2, step=3, mode="evaluate"))
    (timing,) = recoveries(record(*BEGIN, (10.0, lost("b")), (11.0, form(2, "adc")), *LINKED, evaluate, works=works))
    assert timing.finished_t == 14.3


def test_a_death_during_a_recovery_belongs_to_it() -> None:
    again = [(14.0, lost("c")), (15.0, form(3, "ade")), *((16.0, linked(3, s, w)) for s, w in enumerate("ade"))]
    facts = [*BEGIN, (9.5, fault("b")), (10.0, lost("b")), (11.0, form(2, "adc")), *LINKED[:2], *again]
    (timing,) = recoveries(record(*facts, works=[work(3, 17.0)]))
    assert (timing.workers, timing.stages, timing.attempts) == (("b", "c"), (1, 2), 2)
    assert (timing.notice, timing.decide, timing.redo, timing.total) == (0.5, 5.0, 1.0, 7.5)
    assert timing.new_workers == {1: "d", 2: "e"}


@pytest.mark.parametrize("evidence", ["spans", "commit"])
def test_a_death_after_the_first_microbatch_is_another_recovery(evidence: str) -> None:
    commit = [(13.8, Commit(generation=2, step=3, progress=3))] if evidence == "commit" else []
    works = [work(2, 13.7)] if evidence == "spans" else []
    facts = [*BEGIN, (10.0, lost("b")), (11.0, form(2, "adc")), *LINKED, *commit, (14.0, lost("c"))]
    first, second = recoveries(record(*facts, works=works))
    assert (first.outcome, second.outcome) == ("recovered", "unfinished")
    assert (second.workers, second.decide, second.total) == (("c",), None, None)


def test_a_spares_death_needs_no_recovery() -> None:
    facts = record(*BEGIN, (3.0, WorkerJoined(worker="s", incarnation=0, pid=1)), (4.0, lost("s")))
    assert recoveries(facts) == []
    assert (faults_summary(facts).deaths, faults_summary(facts).spares_lost) == (0, 1)


def test_a_worker_that_thawed_died_of_something_else() -> None:
    facts = [*BEGIN, (3.0, fault("b", "SIGSTOP")), (4.0, fault("b", "SIGCONT")), (10.0, lost("b"))]
    assert recoveries(record(*facts))[0].fault_t is None
    assert recoveries(record(*BEGIN, (3.0, fault("b", "SIGSTOP")), (10.0, lost("b"))))[0].notice == 7.0


def test_a_broken_edge_without_a_death_is_a_relink() -> None:
    edge = EdgeBroken(worker="a", node=0, peer=1, generation=1, detail="")
    links = [(12.0, linked(2, s, w)) for s, w in enumerate("abc")]
    facts = record(*BEGIN, (10.0, edge), (11.0, form(2, "abc", "relinked")), *links, works=[work(2, 13.0)])
    (timing,) = recoveries(facts)
    assert (timing.outcome, timing.stages, timing.workers, timing.decide) == ("relinked", (0, 1), (), 1.0)
    assert faults_summary(facts).deaths == 0


def test_unrecoverable_and_unfinished_recoveries() -> None:
    cannot = (10.5, Unrecoverable(lost=[1], reason="neighbours"))
    assert recoveries(record(*BEGIN, (10.0, lost("b")), cannot))[0].outcome == "cannot"
    formed = [*BEGIN, (10.0, lost("b")), (11.0, form(2, "adc")), *LINKED[:2]]
    (timing,) = recoveries(record(*formed))
    assert (timing.outcome, timing.linked_t, timing.total) == ("unfinished", None, None)


@pytest.mark.slow
def test_a_rollback_reports_its_target_step(tmp_path: Path) -> None:
    synthetic = read_run(Synthesis(tmp_path, deaths={27: 3}, rollbacks={27: 20}).write())
    (timing,) = recoveries(synthetic)
    assert (timing.step, timing.resumed_step, timing.outcome) == (27, 20, "rolled back")
    summary = faults_summary(synthetic)
    assert (summary.injected, summary.deaths, dict(summary.outcomes)) == (1, 1, {"rolled back": 1})


ENDS = "stage 0 (ends)"


def test_holdings_follow_the_formations() -> None:
    facts = [*BEGIN, (10.0, lost("b")), (11.0, form(2, "adc")), (20.0, started(3)), (21.0, form(1, "xyz", "started"))]
    held = holdings(record(*facts, (30.0, RunStep(generation=1, step=3))))
    assert held == [
        StageStay(0, ENDS, "a", 1.0, 11.0), StageStay(0, ENDS, "x", 21.0, 30.0),
        StageStay(1, "stage 1", "b", 1.0, 10.0), StageStay(1, "stage 1", "d", 11.0, 11.0),
        StageStay(1, "stage 1", "y", 21.0, 30.0),
        StageStay(2, "stage 2", "c", 1.0, 11.0), StageStay(2, "stage 2", "z", 21.0, 30.0),
    ]  # fmt: skip
