"""Who is slow is found from what workers measure, and nobody is blamed without cause."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.diagnosis import verdicts
from planaria.control.gauges import EVERY, Flow, Gauged, Gauges, Pair, Passes
from planaria.control.steering import Verdict, after

STAGES = 5
"""the ends among them"""
PASS_S, WAY_S = 0.03, 0.001
ONSET = 7
"""reports of a healthy run, before anything is slow"""
HERE = tuple((node, "") for node in range(STAGES))


def ring() -> list[Pair]:
    """The edges of a pipeline, in both directions."""
    around = [(node, (node + 1) % STAGES) for node in range(STAGES)]
    return around + [(b, a) for a, b in around]


def measured(
    reports: int,
    seed: int = 0,
    slow: Mapping[int, float] | None = None,
    later: Mapping[Pair, float] | None = None,
    lost: Mapping[Pair, float] | None = None,
    clocks: Mapping[int, float] | None = None,
    first: int = 0,
    gauges: Gauges | None = None,
    read: Mapping[int, float] | None = None,
) -> Gauges:
    """What workers measure: ``slow`` ones take so many times as long; activations over edges come so many seconds
    ``later``, or a tenth of them does (``lost``); ``clocks`` run ahead by so much; a step's batches take so many
    seconds to be ``read``. With noise that is one-sided."""
    noise, gauges = random.Random(seed), gauges or Gauges()
    slow, later, lost, clocks, read = slow or {}, later or {}, lost or {}, clocks or {}, read or {}
    for report in range(first, first + reports):
        for node in range(STAGES):
            seconds = PASS_S * slow.get(node, 1.0) * (1 + noise.expovariate(10))
            flows = {}
            for source, target in ring():
                if target == node:
                    way = WAY_S * (1 + noise.expovariate(3)) + later.get((source, target), 0.0)
                    skew = clocks.get(target, 0.0) - clocks.get(source, 0.0)
                    high = way * (2 + noise.expovariate(0.5)) + lost.get((source, target), 0.0)
                    flows[source] = Flow(frames=16, low_s=way + skew, high_s=high + skew)
            gauges = gauges.heard(
                Gauged(
                    worker=f"w{node}", node=node, stage=node, generation=1, step=EVERY * (report + 1) - 1, steps=EVERY,
                    seconds=EVERY * 0.5, waited={}, flows=flows,
                    read_s=read.get(node, 0.0) * (1 + noise.expovariate(10)),
                    passes={"forward": Passes(count=16, median_s=seconds / 3),
                            "backward": Passes(count=16, median_s=2 * seconds / 3)},
                )
            )  # fmt: skip
    return gauges


def found(gauges: Gauges, hosts: tuple[tuple[int, str], ...] = HERE) -> set[tuple[str, tuple[int, ...]]]:
    return {(verdict.fault, verdict.nodes) for verdict in verdicts(gauges, hosts, (), frozenset())}


@given(seed=st.integers(0, 1 << 30))
def test_nobody_is_blamed_for_noise(seed: int) -> None:
    assert found(measured(12, seed)) == set()


@given(
    seed=st.integers(0, 1 << 30), node=st.integers(0, STAGES - 1), times=st.floats(2, 8), edge=st.sampled_from(ring())
)
def test_a_slow_worker_and_a_slow_link_at_once_are_told_apart(seed: int, node: int, times: float, edge: Pair) -> None:
    gauges = measured(5, seed, {node: times}, {edge: 0.03}, first=ONSET, gauges=measured(ONSET, seed))

    assert found(gauges) == {("slow worker", (node,)), ("slow link", edge)}


@pytest.mark.parametrize("node", range(STAGES))
def test_a_node_whose_edges_are_all_slow_one_way_is_blamed_for_that_side(node: int) -> None:
    sent = {pair: 0.05 for pair in ring() if pair[0] == node}
    heard = {pair: 0.05 for pair in ring() if pair[1] == node}

    assert found(measured(12, later=sent)) == set(), "slow from the first, so no change"
    assert found(measured(3, later=sent, first=ONSET, gauges=measured(ONSET))) == {("slow sender", (node,))}
    assert found(measured(3, later=heard, first=ONSET, gauges=measured(ONSET))) == {("slow receiver", (node,))}


@given(seed=st.integers(0, 1 << 30), skew=st.lists(st.floats(-3, 3), min_size=STAGES, max_size=STAGES))
def test_clocks_of_several_machines_change_nothing(seed: int, skew: list[float]) -> None:
    """One direction of an edge becomes slow on machines whose clocks differ by seconds."""
    clocks, hosts = dict(enumerate(skew)), tuple((node, f"h{node}") for node in range(STAGES))
    gauges = measured(
        3, seed, later={(2, 3): 0.03}, clocks=clocks, first=ONSET, gauges=measured(ONSET, seed, clocks=clocks)
    )

    assert found(gauges, hosts) == {("slow link", (2, 3))}


def test_all_workers_of_a_machine_are_one_slow_machine() -> None:
    hosts = ((0, ""), (1, ""), (2, ""), (3, "h1"), (4, "h1"))
    gauges = measured(3, slow={3: 3.0, 4: 2.5}, first=ONSET, gauges=measured(ONSET))

    assert found(gauges, hosts) == {("slow host", (3, 4))}
    assert found(gauges) == {("slow worker", (3,)), ("slow worker", (4,))}


@given(seed=st.integers(0, 1 << 30), times=st.floats(2, 8), small=st.booleans())
def test_a_slow_machine_is_named_also_where_it_has_most_stages_and_the_ends(
    seed: int, times: float, small: bool
) -> None:
    """Compared with all others, most of which are slow too, none of its workers would be slow."""
    nodes = (3, 4) if small else (0, 1, 2, 3)
    hosts = tuple((node, "h1" if node in nodes else "") for node in range(STAGES))
    gauges = measured(5, seed, dict.fromkeys(nodes, times), first=ONSET, gauges=measured(ONSET, seed))

    assert found(gauges, hosts) == {("slow host", nodes)}


def test_nobody_is_named_while_the_rest_of_the_machine_has_just_become_slow() -> None:
    """One worker's fault is told a report earlier than the other's: the machine is named once, and no worker before."""
    hosts = ((0, ""), (1, ""), (2, ""), (3, "h1"), (4, "h1"))
    one = measured(1, slow={3: 3.0}, first=ONSET, gauges=measured(ONSET))
    both = measured(1, slow={3: 3.0, 4: 3.0}, first=ONSET + 1, gauges=one)
    later = measured(1, slow={3: 3.0, 4: 3.0}, first=ONSET + 2, gauges=both)
    alone = measured(2, slow={3: 3.0}, first=ONSET + 1, gauges=one)

    assert [found(gauges, hosts) for gauges in (one, both, later)] == [set(), set(), {("slow host", (3, 4))}]
    assert found(alone, hosts) == {("slow worker", (3,))}


@given(seed=st.integers(0, 1 << 30), late=st.floats(0.06, 1.0))
def test_data_that_come_late_are_no_slow_worker(seed: int, late: float) -> None:
    gauges = measured(3, seed, read={0: 0.002 + late}, first=ONSET, gauges=measured(ONSET, seed, read={0: 0.002}))

    assert found(gauges) == {("slow data", (0,))}


@given(seed=st.integers(0, 1 << 30), late=st.floats(0, 0.015))
def test_data_that_are_slow_from_the_first_or_a_little_late_are_not_blamed(seed: int, late: float) -> None:
    past = measured(ONSET, seed, read={0: 0.2})

    assert found(measured(3, seed, read={0: 0.2}, first=ONSET, gauges=past)) == set()
    assert found(measured(3, seed, read={0: late}, first=ONSET, gauges=measured(ONSET, seed))) == set()


def test_a_machine_that_is_busy_makes_nobody_slow() -> None:
    everyone = dict.fromkeys(range(STAGES), 3.0)

    assert found(measured(3, slow=everyone, first=ONSET, gauges=measured(ONSET))) == set()


def test_a_worker_that_was_slow_from_the_first_is_found_by_its_peers() -> None:
    assert found(measured(3, slow={2: 2.5})) == {("slow worker", (2,))}


def test_the_work_of_unlike_stages_is_taken_into_account() -> None:
    gauges = measured(6, slow={2: 3.0})

    assert verdicts(gauges, HERE, (0.0, 1.0, 3.0, 1.0, 1.0), frozenset()) == ()


def test_an_edge_that_breaks_or_stalls_again_and_again_is_flaky() -> None:
    gauges = measured(ONSET)
    stalling = measured(3, lost={(1, 2): 0.3}, first=ONSET, gauges=gauges)
    for broken in range(4):
        gauges = measured(1, first=ONSET + broken, gauges=gauges.broken(2, 1, broken).broken(1, 2, broken))

    assert found(gauges) == {("flaky link", (1, 2))}, "both ends tell of each time"
    assert found(stalling) == {("flaky link", (1, 2))}


@given(seed=st.integers(0, 1 << 30))
def test_what_is_blamed_is_cleared_only_when_it_is_clearly_better(seed: int) -> None:
    """At the threshold itself a verdict stays as it is."""
    gauges = measured(5, seed, {2: 1.5}, {(3, 4): 0.006}, first=ONSET, gauges=measured(ONSET, seed))
    known = frozenset({("slow worker", (2,)), ("slow link", (3, 4))})

    assert {(v.fault, v.nodes) for v in verdicts(gauges, HERE, (), known)} == known
    assert found(measured(5, seed, first=ONSET, gauges=gauges)) == set()


def test_what_is_left_of_a_step_is_that_of_the_next_slowest_stage() -> None:
    gauges = measured(3, slow={2: 3.0}, first=ONSET, gauges=measured(ONSET))

    share = after(gauges.nodes, [2])

    assert 0.3 < share < 0.45
    assert isinstance(verdicts(gauges, HERE, (), frozenset())[0], Verdict)
