"""Dismissed workers do not count as dead in lines, the timeline and the live page."""

from __future__ import annotations

import pytest
import synthetic_replicas as r

from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.report.live_page.captions import Captions
from planaria.report.live_page.frames import apply_patch
from planaria.report.live_page.log_fold import LogFold
from planaria.report.run.recovery_timeline import faults_summary, recoveries
from planaria.report.run.run_verdict import RunFacts, verdict

AWAY = d.ExcludeMember(
    member=1, workers=["c", "d"], strikes=2, reason="the updates of replica 1 were invalid in 2 rounds"
)  # fmt: skip
LIE = e.FaultInjected(worker="c", node=2, signal="lie", step=1, moment="")
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
    story = LogFold(RunConfig())
    seen = story.opening().change
    for t, fact in r.timed(list(facts)):
        if (frame := story.take(t, fact)) is not None:
            seen = apply_patch(seen, frame.change)
    assert seen == story.state, "frames lead to the state"
    return story


def test_the_timeline_counts_them_as_sent_away_and_their_lies_as_no_fault_that_was_noticed() -> None:
    record = r.record(r.timed([*BEGIN, *REBUILT]))
    (timing,) = recoveries(record)
    assert timing.causes == ("sent away", "sent away") and timing.deaths == 0
    assert timing.workers == ("c", "d") and timing.new_workers == {2: "f", 3: "g"}
    assert timing.fault_t is None and timing.notice is None, "training continued meanwhile"
    found = faults_summary(record)
    assert (found.deaths, found.sent_away, found.spares_lost) == (0, 2, 0)


def test_a_death_is_one_still_and_so_is_that_of_an_earlier_bearer_of_the_name() -> None:
    again = d.Spawn(worker="c", incarnation=2)
    trained = d.Commit(replica=1, generation=3, step=1, progress=1)
    there = [*BEGIN, *REBUILT, trained, again, *r.joined("c"), r.form(1, "cg", 4, "handed over", 1), r.lost("c")]
    assert [timing.causes for timing in recoveries(r.record(r.timed(there)))][-1][-1] == "exit"


@pytest.mark.parametrize(
    ("deaths", "away", "summary"),
    [
        (0, 1, "1 worker was sent away; outcome"),
        (0, 2, "2 workers were sent away; outcome"),
        (1, 2, "1 worker died and 2 workers were sent away; outcome"),
        (0, 0, "No worker died, but connections broke; outcome"),
    ],
)
def test_the_verdict_on_a_run_says_which(deaths: int, away: int, summary: str) -> None:
    facts = RunFacts("finished", 9, 9, 1.0, deaths=deaths, sent_away=away, outcomes={"recovered": 1})
    assert summary in verdict(facts).summary


def test_the_page_says_it_in_a_sentence_at_the_workers_and_at_the_recovery() -> None:
    state = shown(*BEGIN[:-2]).state
    caption = "The updates of replica 1 were invalid in 2 rounds: its workers are sent away."
    assert state["caption"] == {"tone": "loss", "text": caption}
    assert [worker for worker, info in state["workers"].items() if info.get("away")] == ["c", "d"]
    assert shown(*BEGIN, *REBUILT).state["recoveries"]["1"]["causes"] == ["sent away", "sent away"]
    state = shown(*BEGIN, *REBUILT, d.Spawn(worker="c", incarnation=2)).state
    assert "away" not in state["workers"]["c"], "another process of that name"


def test_a_disbanded_replica_leaves_its_workers_as_spares() -> None:
    state = shown(*BEGIN, LEFT).state
    assert state["caption"]["text"] == "Replica 1 is disbanded: no worker is left."
    assert list(state["replicas"]) == ["0"] and state["recoveries"]["1"]["outcome"] == "disbanded"
    some = shown(*BEGIN, LEFT.model_copy(update={"workers": ["c"]})).state
    assert some["caption"]["text"].endswith("Its workers are spares now.")


def test_verdicts_have_captions() -> None:
    captions = Captions(shown(*BEGIN).members, 4)
    captions.caption(r.started(1))
    blamed = d.SlowPartFound(
        replica=0,
        step=9,
        fault="slow worker",
        nodes=[1],
        workers=["b"],
        seconds=0.06,
        initial_s=0.02,
        peer_median_s=0.02,
    )
    assert captions.caption(blamed) == ("slow", "Stage 1 (b) is 3.0 times slower than its peers.")
    cleared = d.Cleared(replica=0, step=12, fault="slow worker", nodes=[1])
    assert captions.caption(cleared) == ("note", "Stage 1: its worker is no longer slow.")
