"""Lines, progress and figures of several replicas, which must not be mixed up."""

from __future__ import annotations

import io

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event
from planaria.control.log.run_record import StepMetric
from planaria.report.observe.progress import Progress
from planaria.report.run.event_lines import Narrator
from planaria.report.run.gantt import death_figure, ordinary_step
from planaria.report.run.naming import Naming
from planaria.report.run.recoveries import faults_summary, recoveries
from planaria.report.run.stage_holders import holdings
from support.report import synthetic_replicas as r

BEGIN: list[Event | Decision] = [
    r.started(3), *r.joined("abcdefg"), r.form(0, "ab"), r.form(1, "cd"), r.form(2, "ef"),
]  # fmt: skip


def line_texts(*facts: Event | Decision) -> list[str]:
    narrator = Narrator()
    lines = [narrator.describe(t, fact) for t, fact in r.timed([*BEGIN, *facts])]
    return [line.text for line in lines if line]


def test_a_member_of_another_replica_is_not_a_spare() -> None:
    assert line_texts(r.lost("f"), r.lost("a"), r.lost("g")) == [
        "worker f (stage 1 of replica 2) lost: process ended",
        "worker a (stage 0 of replica 0) lost: process ended",
        "worker g (spare) lost: process ended",
    ]


def test_a_stage_is_rebuilt_from_another_replica_or_from_its_own() -> None:
    again = r.form(2, "eg", 2, "recovered", rebuilt={1: [1]})
    assert line_texts(r.lost("f"), again, r.linked(2, 1, "g", generation=2)) == [
        "worker f (stage 1 of replica 2) lost: process ended",
        "stage 1 of replica 2 rebuilt in g from replica 0 in 2.00 s",
    ]
    assert line_texts(again, r.linked(0, 1, "b", generation=2), r.linked(2, 1, "g", generation=1)) == [], (
        "of others, or older"
    )


def test_a_rebuilt_stage_names_the_step_of_its_donor() -> None:
    again = r.form(2, "eg", 2, "recovered", rebuilt={1: [1]})
    committed = [d.Commit(replica=0, generation=1, step=step, progress=step) for step in (5, 6, 7)]
    lines = line_texts(*committed[:2], r.lost("f"), again, committed[2], r.linked(2, 1, "g", generation=2))
    assert lines[1] == "stage 1 of replica 2 rebuilt in g from replica 0 (at step 7) in 3.00 s"


def test_overlapping_faults_of_two_replicas_are_distinguished() -> None:
    lines = line_texts(
        r.lost("f"),
        r.lost("c"),
        r.form(2, "eg", 2, "recovered", rebuilt={1: [1]}),
        r.form(1, "gd", 2, "recovered", rebuilt={0: [0]}),
        r.linked(1, 0, "g", generation=2),
        r.linked(2, 1, "g", generation=2),
    )
    assert lines[2:] == [
        "stage 0 of replica 1 rebuilt in g from replica 0 in 3.00 s",
        "stage 1 of replica 2 rebuilt in g from replica 0 in 5.00 s",
    ]


def test_a_worker_of_a_resumed_run_is_distinct_from_a_released_one_of_that_name() -> None:
    lines = line_texts(d.Release(worker="f"), *BEGIN, r.lost("f"), r.lost("g"), d.Spawn(worker="g", incarnation=2))
    assert lines == [
        "worker f (stage 1 of replica 2) lost: process ended",
        "worker g (spare) lost: process ended",
    ]


def test_events_of_whole_replicas_have_lines() -> None:
    copied = r.form(1, "cd", 2, "recovered", rebuilt={0: [4], 1: [5]})
    assert line_texts(
        d.Adopt(replica=1, reason="others settled round 3 without it"),
        copied,
        r.linked(1, 1, "d", generation=2),
        r.linked(1, 0, "c", generation=2),
        d.Disband(replica=1, workers=["c", "d"], reason="no worker is left"),
        d.ReplicaRestarted(replica=1),
        r.form(0, "ab", 2, "rolled back", step=4),
        d.Unrecoverable(replica=0, lost=[1], reason="no worker has it"),
    ) == [
        "replica 1 catches up with another: others settled round 3 without it",
        "replica 1 rebuilt as a copy of replica 2",
        "replica 1 disbanded: no worker is left; spares now: c, d",
        "replica 1 starts as a copy of another",
        "replica 0 rolled back to step 4",
        "stage 1 of replica 0 cannot be rebuilt: no worker has it",
    ]


def test_an_edge_is_named_with_its_replica() -> None:
    other = e.EdgeBroken(worker="e", node=4, peer=5, generation=1, detail="")
    own = e.EdgeBroken(worker="a", node=0, peer=1, generation=1, detail="")
    forms = r.form(2, "ef", 2, "relinked"), r.form(0, "ab", 2, "relinked")
    up = [
        r.linked(replica, stage, worker, 2)
        for replica, workers in ((2, "ef"), (0, "ab"))
        for stage, worker in enumerate(workers)
    ]
    assert line_texts(other, own, *forms, *up) == [
        "broken edge 0–1 of replica 2 replaced",
        "broken edge 0–1 of replica 0 replaced",
    ]


def test_a_round_with_missing_members_has_a_line() -> None:
    groups = d.DrawGroups(round=4, groups=[[0, 2], [1]])
    patience = e.RoundWaitExpired(replica=0, round=4, in_round=False)
    assert line_texts(groups, r.settle(4, 1), r.meet(4, 0, 2), r.settle(4, 0, 2)) == []
    assert line_texts(groups, patience, r.settle(4, 0)) == [
        "round 4: replica 0 continued alone without replica 2 (late or not received)"
    ]
    assert line_texts(r.settle(4, 1)) == ["round 4: replica 1 continued alone without replicas 0, 2 (absent)"]


def test_a_line_has_the_run_step_that_its_replica_executes() -> None:
    narrator = Narrator()
    for t, fact in r.timed([*BEGIN, r.run_step(0, 8, 24), r.run_step(2, 7, 17)]):
        narrator.describe(t, fact)
    lines = [narrator.describe(60.0, r.lost(worker)) for worker in "bfg"]
    assert [line and line.step for line in lines] == [8, 5, 0]


def test_the_bar_counts_the_steps_of_all_replicas_and_never_decreases() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start(10, 0)
    for t, fact in r.timed(BEGIN):
        progress.on_fact(t, fact)
    shown = []
    for block, (replica, step) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (1, 1)]):
        progress.on_fact(100.0 + block, r.commit(replica, step, block))
        progress.on_metric(StepMetric(t=0.0, step=step, loss=2.0, tokens_per_s=1.0, grad_norm={}))
        shown.append(progress._done)
    assert shown == [0, 0, 1, 1, 1, 2]
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "2/10"] and "6 workers, 1 spare" in lines[0]


def work(replica: int, stage: int, worker: str, end: float, generation: int = 1, step: int = 0) -> e.WorkReport:
    span = e.Span(action="backward", microbatch=0, hop=0, start=end - 0.5, end=end)
    return e.WorkReport(
        worker=worker, node=2 * replica + stage, stage=stage, generation=generation, step=step, spans=[span],
        sent_bytes={},
    )  # fmt: skip


OVERLAP: r.Facts = [
    *r.timed(BEGIN), (20.0, r.run_step(0, 3, 9)), (20.1, r.run_step(2, 5, 17)),
    (21.0, r.lost("f")), (21.5, r.lost("a")),
    (22.0, r.form(2, "eg", 2, "recovered", step=5, rebuilt={1: [1]})),
    (22.1, r.form(0, "gb", 2, "recovered", step=3, rebuilt={0: [2]})),
    (23.0, r.linked(2, 0, "e", 2)), (23.1, r.linked(0, 0, "g", 2)), (23.2, r.linked(0, 1, "b", 2)),
    (24.0, r.linked(2, 1, "g", 2)),
]  # fmt: skip


def test_recoveries_of_two_replicas_at_the_same_time_are_two() -> None:
    works = [
        work(1, 0, "c", 22.3, generation=2),
        work(0, 0, "g", 26.0, generation=2),
        work(2, 0, "e", 27.0, generation=2),
    ]
    first, second = recoveries(r.record(OVERLAP, works=works))
    assert (first.replica, first.where, first.step, first.workers) == (2, "stage 1 of replica 2", 5, ("f",))
    assert (second.replica, second.where, second.step, second.workers) == (0, "stage 0 of replica 0", 3, ("a",))
    assert (first.linked_t, first.finished_t, second.linked_t, second.finished_t) == (24.0, 27.0, 23.2, 26.0)
    assert first.outcome == second.outcome == "recovered"
    assert (faults_summary(r.record(OVERLAP)).deaths, faults_summary(r.record(OVERLAP)).spares_lost) == (2, 0)


def test_a_commit_of_another_replica_does_not_end_a_recovery() -> None:
    facts = [*OVERLAP[:-1], (23.5, r.commit(1, 0, 1)), (23.6, r.lost("e"))]
    first, _ = recoveries(r.record(facts))
    assert first.workers == ("f", "e"), "a death during a recovery belongs to it"


def test_a_disbanded_replica_has_no_further_recovery() -> None:
    disbanded = (21.7, d.Disband(replica=2, workers=["e"], reason=""))
    facts = [*OVERLAP[:-6], disbanded, (25.0, r.lost("e"))]
    timings = recoveries(r.record(facts))
    assert [(timing.replica, timing.outcome) for timing in timings] == [(2, "disbanded"), (0, "unfinished")]
    assert faults_summary(r.record(facts)).spares_lost == 1, "by then it was one"


def test_holders_of_one_replica_end_with_its_formations_only() -> None:
    facts = [*OVERLAP, (25.0, d.Disband(replica=1, workers=["c", "d"], reason="")), (30.0, r.run_step(0, 3, 9))]
    held = {(h.where, h.worker): (h.start, h.end) for h in holdings(r.record(facts))}
    assert held["replica 0 · stage 1", "b"] == (8.0, 30.0)
    assert held["replica 2 · stage 1", "f"] == (10.0, 21.0) and held["replica 2 · stage 1", "g"] == (22.0, 30.0)
    assert held["replica 1 · stage 0", "c"] == (9.0, 25.0)


def test_the_gantt_shows_one_replica_at_a_time() -> None:
    works = [work(replica, stage, f"{replica}{stage}", 19.5) for replica in range(3) for stage in range(2)]
    later = [work(2, 0, "e", 24.5, generation=2), work(1, 0, "c", 24.5, step=1)]
    record = r.record(OVERLAP, works=[*works, *later])
    assert len({work.node // 2 for work in ordinary_step(record)}) == 1 and len(ordinary_step(record)) == 2
    rows = set(death_figure(record, recoveries(record)[0]).layout.yaxis.categoryarray)
    assert rows == {"20 · stage 0", "21 · stage 1", "f · stage 1", "e · stage 0", "g · stage 1"}


def test_names_of_nodes_of_several_replicas() -> None:
    naming = Naming(r.started(3))
    assert naming.name([5, 2, 4]) == "stage 0 of replica 1 and stages 0, 1 of replica 2"
    assert (naming.row(5), naming.transit(4, 5), naming.edge(4, 5)) == (
        "replica 2 · stage 1",
        "replica 2 · 0 → 1",
        "0–1",
    )
    assert naming.nodes(1) == {2, 3}
