"""What is slow is on the page and in the metrics as long as it is, with its evidence and what is done about it."""

from __future__ import annotations

import synthetic_replicas as r

from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.report.live_page.frames import apply_patch
from planaria.report.live_page.log_fold import LogFold
from planaria.report.observe import prometheus

WORKER = d.SlowPartFound(
    replica=0, step=9, fault="slow worker", nodes=[1], workers=["b"], seconds=0.06, initial_s=0.02, peer_median_s=0.02
)
DATA = d.SlowPartFound(
    replica=0, step=11, fault="slow data", nodes=[0], workers=["a"], seconds=0.5, initial_s=0.01, peer_median_s=0.0
)
DEED = d.HandOverSlowStage(replica=0, step=12, node=1, worker="b", step_s=0.4, predicted_s=0.2, cost_s=1.0)
FACTS: list[e.Event | d.Decision] = [*r.joined("ab"), WORKER, DATA, DEED]


def told(*facts: e.Event | d.Decision) -> LogFold:
    story = LogFold(RunConfig())
    seen = story.opening().change
    for t, fact in enumerate([r.started(1), *facts]):
        if (frame := story.take(float(t), fact)) is not None:
            seen = apply_patch(seen, frame.change)
    assert seen == story.state, "frames lead to the state"
    return story


def test_a_verdict_is_shown_with_its_evidence_and_its_deed_until_it_is_cleared() -> None:
    slow = told(*FACTS).state["slow"]
    assert list(slow) == ["slow worker 1", "slow data 0"]
    assert slow["slow worker 1"]["what"] == "stage 1 (b) is 3.0 times slower than its peers"
    assert slow["slow worker 1"]["evidence"].startswith("a microbatch's passes take 60.0 ms, 20.0 ms at first")
    assert "b hands it to a spare" in slow["slow worker 1"]["deed"]
    assert "deed" not in slow["slow data 0"], "the deed was about the worker"
    cleared = d.Cleared(replica=0, step=20, fault="slow worker", nodes=[1])
    assert list(told(*FACTS, cleared).state["slow"]) == ["slow data 0"]
    assert told(*FACTS, r.started(1)).state["slow"] == {}, "another part of the run begins with none"


def test_metrics_tell_what_is_slow_and_count_verdicts_and_deeds() -> None:
    tally = told(*FACTS).tally
    said = prometheus.exposition({"mine": tally})
    assert 'planaria_slow_times{run="mine",class="slow worker",nodes="1",workers="b"} 3.0' in said
    assert 'planaria_slow_times{run="mine",class="slow data",nodes="0",workers="a"} 50.0' in said
    assert 'planaria_verdicts_total{run="mine",class="slow worker"} 1' in said
    assert 'planaria_verdicts_total{run="mine",class="slow host"} 0' in said
    assert 'planaria_deeds_total{run="mine",deed="hand_over_slow_stage"} 1' in said
    tally.take(99.0, d.Cleared(replica=0, step=20, fault="slow worker", nodes=[1]))
    assert 'class="slow worker",nodes' not in prometheus.exposition({"mine": tally})
