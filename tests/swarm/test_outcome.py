"""Outcomes of runs from hand-written records, and rates with confidence intervals."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.attacks import ATTACKS
from planaria.swarm.drill_arms import Drill, DrilledArm, DrillRun
from planaria.swarm.records.hit_tally import HitTally, tally, wilson_interval
from planaria.swarm.records.lines import (
    LOG,
    PEERS,
    POISON,
    SAMPLES,
    Evaluated,
    Finished,
    Log,
    LogRecord,
    PeerStarted,
    PoisonRecord,
    RoundDone,
    SampleRecord,
)
from planaria.swarm.records.outcome import ALL, RunOutcome, read_outcome
from planaria.trials.spread import spread
from support.swarm import peer_records
from support.swarm.peer_records import round_done


def started(name: str, attack: str = "none") -> PeerStarted:
    return peer_records.started(name, name * 2, attack, time=100.0)


def done(number: int, **changes: Any) -> RoundDone:
    return round_done(number, time=101.0 + number, weights=f"w{number}", **changes)


def evaluated(number: int, hits: int, watch: int = 0, alone: HitTally | None = None) -> Evaluated:
    return Evaluated(
        time=101.0 + number,
        round=number,
        accuracy=HitTally(hits=hits, eligible=10),
        alone=alone,
        tokens=5.0 + number,
        watch={"text": HitTally(hits=watch, eligible=10)},
    )


def write(run: Path, name: str, *records: LogRecord, samples: tuple[SampleRecord, ...] = ()) -> Path:
    folder = run / PEERS / name
    Log(folder / LOG).append(*records)
    Log(folder / SAMPLES).append(*samples)
    return folder


counter = itertools.count()


def sample(peer: str, layer: str = "", passed: tuple[str, ...] = (), index: int | None = None) -> SampleRecord:
    index = next(counter) if index is None else index
    return SampleRecord(
        peer=peer, round=0, problem=7, index=index, reward=1.0, passed=list(passed), layer=layer, reason="bad"
    )


def test_accuracy_and_success_are_means_of_honest_peers_last_evaluations(tmp_path: Path) -> None:
    write(tmp_path, "a", started("a"), evaluated(0, 0), done(0), evaluated(1, 4, 1), evaluated(2, 6, 3), Finished())
    write(tmp_path, "b", started("b"), evaluated(0, 0), done(0), evaluated(1, 8, 0), evaluated(2, 8, 10), Finished())
    write(tmp_path, "x", started("x", "text"), evaluated(2, 0, 10), Finished())
    found = read_outcome(tmp_path)
    assert found.accuracy(1) == pytest.approx(0.7) and found.accuracy(2) == pytest.approx((0.5 + 0.8) / 2)
    assert found.success("text", 2) == HitTally(hits=14, eligible=40) and found.worst("text", 1) == 1.0
    assert found.tokens(1) == 7 and found.rounds == 1
    assert [peer.name for peer in found.honest] == ["a", "b"] and all(peer.finished for peer in found.peers)


def test_stop_rates_and_false_positives_count_what_reached_a_layer(tmp_path: Path) -> None:
    samples = (
        *(sample("bb", passed=("support", "judge")) for _ in range(8)),
        sample("bb", "support"),
        sample("bb", "judge", ("support",)),
        *(sample("xx", "support", index=1000 + n) for n in range(3)),
        sample("xx", "judge", ("support",), index=1003),
        sample("xx", passed=("support", "judge"), index=1004),
        sample("xx", "support", index=2000),  # filler
        sample("xx", passed=("support", "judge"), index=2001),  # filler
        sample("aa", "support"),  # the peer's own
    )
    write(tmp_path, "a", started("a"), samples=samples)
    write(tmp_path, "b", started("b"))
    bad = write(tmp_path, "x", started("x", "text"), samples=(sample("aa", "support"),))
    Log(bad / POISON).append(*(PoisonRecord(round=0, problem=7, index=1000 + n) for n in range(5)))
    layers = read_outcome(tmp_path).layers
    assert layers["support"].stopped == HitTally(hits=3, eligible=5)
    assert layers["support"].misjudged == HitTally(hits=1, eligible=10)
    assert layers["judge"].stopped == HitTally(hits=1, eligible=2)
    assert layers["judge"].misjudged == HitTally(hits=1, eligible=9)
    assert layers[ALL].stopped == HitTally(hits=4, eligible=5)
    assert layers[ALL].misjudged == HitTally(hits=2, eligible=10)


def test_refusals_by_the_schedule_count_everything_received(tmp_path: Path) -> None:
    samples = (*(sample("bb", passed=("support",)) for _ in range(9)), sample("bb", "schedule"))
    write(tmp_path, "a", started("a"), samples=samples)
    write(tmp_path, "b", started("b"))
    layers = read_outcome(tmp_path).layers
    assert layers["schedule"].misjudged == HitTally(hits=1, eligible=10)
    assert layers["support"].misjudged == HitTally(hits=0, eligible=9)


def test_reasons_for_being_off_are_counted_without_their_numbers(tmp_path: Path) -> None:
    rounds = [done(n, off={"support": f"would refuse {n} %: the policies differ"}) for n in range(3)]
    judge = done(3, off={"judge": "task gym:chain_sum cannot check reasoning; name a model"})
    write(tmp_path, "a", started("a"), *rounds, judge)
    layers = read_outcome(tmp_path).layers
    assert layers["support"].off == {"the policies differ": 3}
    assert layers["judge"].off == {"task gym:chain_sum cannot check reasoning; name a model": 1}


def test_a_peer_that_stopped_early_is_unfinished(tmp_path: Path) -> None:
    write(tmp_path, "a", started("a"), evaluated(0, 5), done(0), Finished(reason="no quorum"))
    write(tmp_path, "b", started("b"), evaluated(0, 5), done(0), done(1))
    write(tmp_path, "c", started("c"), evaluated(0, 5), done(0), done(1), Finished())
    found = read_outcome(tmp_path)
    assert [peer.finished for peer in found.peers] == [False, False, True] and found.rounds == 2
    assert [peer.weights for peer in found.peers] == ["w0", "w1", "w1"]


def test_a_run_that_has_just_started_has_an_outcome(tmp_path: Path) -> None:
    write(tmp_path, "a", started("a"))
    write(tmp_path, "b", Finished(reason="no such model"))
    write(tmp_path, "c")
    assert read_outcome(tmp_path / "empty").peers == []
    found = read_outcome(tmp_path)
    assert [peer.name for peer in found.peers] == ["a"] and found.rounds == 0
    assert math.isnan(found.accuracy(4)) and math.isnan(found.tokens(4))
    assert found.success("text", 4) == HitTally() and found.worst("text", 4) is None
    assert RunOutcome.model_validate_json(found.model_dump_json()) == found


def test_peers_without_evaluations_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, "a", started("a"), evaluated(0, 5, 2))
    write(tmp_path, "b", started("b"))
    found = read_outcome(tmp_path)
    assert found.accuracy(4) == 0.5 and found.tokens(4) == 5 and found.success("text", 4).hits == 2
    assert found.success("math", 4) == HitTally() and found.worst("math", 4) is None, "not watched"


def test_a_restarted_peer_is_counted_once(tmp_path: Path) -> None:
    seen = (sample("bb", "support", index=1), sample("bb", passed=("support",), index=2))
    first = (started("a"), evaluated(0, 1), done(0), done(1), evaluated(2, 3))
    write(tmp_path, "a", *first, *first, done(2), evaluated(3, 5), Finished(), samples=(*seen, *seen))
    write(tmp_path, "b", started("b"))
    found = read_outcome(tmp_path)
    assert found.rounds == 3 and [point.round for point in found.peers[0].points] == [0, 2, 3]
    assert found.layers["support"].misjudged == HitTally(hits=1, eligible=2)


def test_the_last_evaluations_are_summed(tmp_path: Path) -> None:
    alone = HitTally(hits=1, eligible=10)
    write(tmp_path, "a", started("a"), evaluated(0, 1), evaluated(1, 2, 1, alone), evaluated(2, 3, 2, alone))
    (peer,) = read_outcome(tmp_path).peers
    point = peer.last(2)
    assert point.round == 2 and point.accuracy == HitTally(hits=5, eligible=20) and point.tokens == 6.5
    assert point.alone == HitTally(hits=2, eligible=20) and point.watch == {"text": HitTally(hits=3, eligible=20)}
    assert peer.last(1).alone == alone and peer.last(99).accuracy.eligible == 20


def test_a_drill_summarizes_its_seeds(tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        run = tmp_path / str(seed)
        write(run, "a", started("a"), evaluated(0, 2 * seed, seed), samples=(sample("bb", "support"), sample("bb")))
        write(run, "b", started("b"), evaluated(0, 2 * seed, 0))
        runs.append(DrillRun(seed=seed, outcome=read_outcome(run)))
    arm = DrilledArm(name="arm", control="", attackers=[], runs=runs)
    assert arm.accuracy(1) == pytest.approx((0.3, 0.2, 0.4))
    assert arm.success("text", 1) == pytest.approx((0.075, 0.05, 0.1)) and arm.worst("text", 1) == 0.2
    assert arm.pooled_success("text", 1) == HitTally(hits=3, eligible=40)
    assert arm.layer("support") == (HitTally(), HitTally(hits=2, eligible=2)) and arm.layer("none") == (
        HitTally(),
        HitTally(),
    )
    drill = Drill(name="d", last=1, watch=["text"], arms=[arm])
    assert drill.arm("arm") == arm and set(drill.layers()) == {"support", ALL}
    assert Drill.model_validate_json(drill.model_dump_json()) == drill
    assert spread([3.0]) == (3.0, 3.0, 3.0)


counts = st.integers(0, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # Known values of the score interval without continuity correction (R: prop.test(h, n, correct = FALSE)).
    [(0, 10, 0.0, 0.27753), (5, 10, 0.23659, 0.76341), (10, 10, 0.72247, 1.0), (1, 10, 0.01788, 0.40415)],
)
def test_the_interval_is_wilson_s(hits: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(hits, n) == pytest.approx((low, high), abs=1e-5)


@given(counts)
def test_the_interval_contains_the_rate_and_is_symmetric(counted: tuple[int, int]) -> None:
    hits, n = counted
    low, high = wilson_interval(hits, n)
    assert 0 <= low <= high <= 1
    if n:
        assert low <= hits / n <= high
        assert wilson_interval(n - hits, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_tallies_add_up_and_have_a_text() -> None:
    assert wilson_interval(0, 0) == (0, 1) and HitTally().rate is None and str(HitTally()) == "none eligible"
    assert HitTally().interval == (0, 1)
    added = HitTally(hits=1, eligible=4) + HitTally(hits=2, eligible=6)
    assert added == HitTally(hits=3, eligible=10) and added.rate == 0.3
    assert str(added) == "0.30 [0.11 … 0.60] of 10"


def test_only_eligible_texts_are_counted() -> None:
    texts = ["2+2=5;[5]", "2+2=4;[4]", "3+3=6;[6]"]
    assert tally(ATTACKS.make("math", {}), texts) == HitTally(hits=1, eligible=2)
