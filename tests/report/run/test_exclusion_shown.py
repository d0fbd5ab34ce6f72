"""Excluded workers do not count as dead, and slow parts are shown while they last: lines, timeline, live page."""

from __future__ import annotations

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.report.live_page.captions import Captions
from planaria.report.live_page.log_fold import LogFold
from planaria.report.observe import prometheus
from planaria.report.run.recoveries import FaultsSummary, faults_summary, recoveries
from planaria.report.run.summary import RunFacts, verdict
from planaria.report.worker_assignments import WorkerAssignments
from support.report import synthetic_replicas as r

AWAY = d.ExcludeMember(
    member=1, workers=["c", "d"], strikes=2, reason="the updates of replica 1 were invalid in 2 rounds"
)  # fmt: skip
LIE = e.FaultInjected(worker="c", node=2, signal="corrupt_update", step=1, moment="")
BEGIN: list[e.Event | d.Decision] = [
    r.started(2), *(d.Spawn(worker=worker, incarnation=1) for worker in "abcdfg"), *r.joined("abcdfg"),
    r.form(0, "ab"), r.form(1, "cd", 2), LIE, r.run_step(1, 1, 1, 2), AWAY,
    r.lost("c"), r.lost("d"),
]  # fmt: skip
REBUILT: list[e.Event | d.Decision] = [
    r.form(1, "fg", 3, "recovered", 1, rebuilt={0: [0], 1: [1]}), r.linked(1, 0, "f", 3), r.linked(1, 1, "g", 3),
]  # fmt: skip
LEFT = d.Disband(replica=1, workers=[], reason="no worker is left")


def shown(*facts: e.Event | d.Decision) -> LogFold:
    return r.folded([*facts])


def test_the_timeline_counts_exclusions_and_ignores_byzantine_faults() -> None:
    record = r.record(r.timed([*BEGIN, *REBUILT]))
    (timing,) = recoveries(record)
    assert timing.causes == ("excluded", "excluded") and timing.deaths == 0
    assert timing.workers == ("c", "d") and timing.new_workers == {2: "f", 3: "g"}
    assert timing.fault_t is None and timing.notice is None, "training continued meanwhile"
    found = faults_summary(record)
    assert (found.deaths, found.excluded, found.spares_lost) == (0, 2, 0)


def test_a_later_death_under_an_excluded_workers_name_counts() -> None:
    again = d.Spawn(worker="c", incarnation=2)
    trained = d.Commit(replica=1, generation=3, step=1, progress=1)
    there = [*BEGIN, *REBUILT, trained, again, *r.joined("c"), r.form(1, "cg", 4, "handed over", 1), r.lost("c")]
    assert [timing.causes for timing in recoveries(r.record(r.timed(there)))][-1][-1] == "exit"


@pytest.mark.parametrize(
    ("deaths", "excluded", "summary"),
    [
        (0, 1, "1 worker was excluded; 1 recovery succeeded"),
        (0, 2, "2 workers were excluded; 1 recovery succeeded"),
        (1, 2, "1 worker died and 2 workers were excluded; 1 recovery succeeded"),
        (0, 0, "No worker died, but connections broke; 1 recovery succeeded"),
    ],
)
def test_the_verdict_on_a_run_counts_deaths_and_exclusions(deaths: int, excluded: int, summary: str) -> None:
    facts = RunFacts("finished", 9, 9, 1.0, faults=FaultsSummary(0, deaths, excluded, outcomes={"recovered": 1}))
    assert summary in verdict(facts).summary


def test_an_exclusion_is_in_the_caption_the_workers_and_the_recovery() -> None:
    state = shown(*BEGIN[:-2]).state
    caption = "Replica 1 excluded: the updates of replica 1 were invalid in 2 rounds; workers that leave: c, d."
    assert state["caption"] == {"tone": "loss", "text": caption}
    assert [worker for worker, info in state["workers"].items() if info.get("excluded")] == ["c", "d"]
    assert shown(*BEGIN, *REBUILT).state["recoveries"]["1"]["causes"] == ["excluded", "excluded"]
    state = shown(*BEGIN, *REBUILT, d.Spawn(worker="c", incarnation=2)).state
    assert "excluded" not in state["workers"]["c"], "another process of that name"


def test_a_disbanded_replica_leaves_its_workers_as_spares() -> None:
    state = shown(*BEGIN, LEFT).state
    assert state["caption"]["text"] == "Replica 1 disbanded: no worker is left; spares now: none."
    assert list(state["replicas"]) == ["0"] and state["recoveries"]["1"]["outcome"] == "disbanded"
    some = shown(*BEGIN, LEFT.model_copy(update={"workers": ["c"]})).state
    assert some["caption"]["text"].endswith("; spares now: c.")


def test_verdicts_have_captions() -> None:
    captions = Captions(WorkerAssignments(), 4)
    assert captions.caption(r.slow_worker()) == ("slow", "Stage 1 (b) is 3.0 times slower than its peers.")
    cleared = d.Cleared(replica=0, step=12, fault="slow worker", nodes=[1])
    assert captions.caption(cleared) == ("note", "Stage 1: its worker is no longer slow.")


DATA = d.SlowPartFound(
    replica=0, step=11, fault="slow data", nodes=[0], workers=["a"], seconds=0.5, initial_s=0.01, peer_median_s=0.0
)
HANDOVER = d.HandOverSlowStage(replica=0, step=12, node=1, worker="b", step_s=0.4, predicted_s=0.2, cost_s=1.0)
SLOW: list[e.Event | d.Decision] = [*r.joined("ab"), r.slow_worker(), DATA, HANDOVER]


def slow_page(*facts: e.Event | d.Decision) -> LogFold:
    return r.folded([r.started(1), *facts])


def test_a_verdict_is_shown_with_its_evidence_and_its_action_until_it_is_cleared() -> None:
    slow = slow_page(*SLOW).state["slow"]
    assert list(slow) == ["slow worker 1", "slow data 0"]
    assert slow["slow worker 1"]["what"] == "stage 1 (b) is 3.0 times slower than its peers"
    assert slow["slow worker 1"]["evidence"].startswith("a microbatch's passes take 60.0 ms, 20.0 ms at first")
    assert "b hands it to a spare" in slow["slow worker 1"]["action"]
    assert "action" not in slow["slow data 0"], "the action was about the worker"
    cleared = d.Cleared(replica=0, step=20, fault="slow worker", nodes=[1])
    assert list(slow_page(*SLOW, cleared).state["slow"]) == ["slow data 0"]
    assert slow_page(*SLOW, r.started(1)).state["slow"] == {}, "another part of the run begins with none"


def test_metrics_show_slow_parts_and_count_verdicts_and_actions() -> None:
    tally = slow_page(*SLOW).tally
    printed = prometheus.exposition({"mine": tally})
    assert 'planaria_slow_times{run="mine",class="slow worker",nodes="1",workers="b"} 3.0' in printed
    assert 'planaria_slow_times{run="mine",class="slow data",nodes="0",workers="a"} 50.0' in printed
    assert 'planaria_verdicts_total{run="mine",class="slow worker"} 1' in printed
    assert 'planaria_verdicts_total{run="mine",class="slow host"} 0' in printed
    assert 'planaria_slowness_actions_total{run="mine",action="hand_over_slow_stage"} 1' in printed
    tally.apply(99.0, d.Cleared(replica=0, step=20, fault="slow worker", nodes=[1]))
    assert 'class="slow worker",nodes' not in prometheus.exposition({"mine": tally})
