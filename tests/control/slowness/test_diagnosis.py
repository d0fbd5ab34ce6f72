"""Slow workers, links and machines are identified from measurements, without false positives."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.facts.measurements import STEPS_PER_REPORT, EdgeTravelTimes, PassDurations, WorkerMeasurements
from planaria.control.slowness.decisions import find_slow_parts, remaining_share
from planaria.control.slowness.slow_part import SlowPart
from planaria.control.state.gauges import DirectedPair, Gauges

STAGES = 5
"""the ends among them"""
PASS_S, WAY_S = 0.03, 0.001
ONSET = 7
"""reports of a healthy run, before anything is slow"""
HERE = tuple((node, "") for node in range(STAGES))


def ring() -> list[DirectedPair]:
    """The edges of a pipeline, in both directions."""
    around = [(node, (node + 1) % STAGES) for node in range(STAGES)]
    return around + [(b, a) for a, b in around]


def measured(
    reports: int,
    seed: int = 0,
    slow: Mapping[int, float] | None = None,
    later: Mapping[DirectedPair, float] | None = None,
    lost: Mapping[DirectedPair, float] | None = None,
    clocks: Mapping[int, float] | None = None,
    first: int = 0,
    gauges: Gauges | None = None,
    read: Mapping[int, float] | None = None,
) -> Gauges:
    """Return measurements with one-sided noise.

    ``slow``: node → slowdown factor; ``later``: edge → delay in seconds, ``lost``: of a tenth of the activations;
    ``clocks``: node → clock offset; ``read``: node → seconds to read a step's batches.
    """
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
                    flows[source] = EdgeTravelTimes(frames=16, low_s=way + skew, high_s=high + skew)
            gauges = gauges.with_measurements(
                WorkerMeasurements(
                    worker=f"w{node}", node=node, stage=node, generation=1,
                    step=STEPS_PER_REPORT * (report + 1) - 1, steps=STEPS_PER_REPORT,
                    seconds=STEPS_PER_REPORT * 0.5, waited={}, flows=flows,
                    read_s=read.get(node, 0.0) * (1 + noise.expovariate(10)),
                    passes={"forward": PassDurations(count=16, median_s=seconds / 3),
                            "backward": PassDurations(count=16, median_s=2 * seconds / 3)},
                )
            )  # fmt: skip
    return gauges


def found(gauges: Gauges, hosts: tuple[tuple[int, str], ...] = HERE) -> set[tuple[str, tuple[int, ...]]]:
    return {(verdict.fault, verdict.nodes) for verdict in find_slow_parts(gauges, hosts, (), frozenset())}


@given(seed=st.integers(0, 1 << 30))
def test_noise_blames_no_worker(seed: int) -> None:
    assert found(measured(12, seed)) == set()


@given(
    seed=st.integers(0, 1 << 30), node=st.integers(0, STAGES - 1), times=st.floats(2, 8), edge=st.sampled_from(ring())
)
def test_a_slow_worker_and_a_slow_link_are_distinguished(
    seed: int, node: int, times: float, edge: DirectedPair
) -> None:
    gauges = measured(5, seed, {node: times}, {edge: 0.03}, first=ONSET, gauges=measured(ONSET, seed))

    assert found(gauges) == {("slow worker", (node,)), ("slow link", edge)}


@pytest.mark.parametrize("node", range(STAGES))
def test_a_node_with_slow_edges_in_one_direction_is_a_slow_sender_or_receiver(node: int) -> None:
    sent = {pair: 0.05 for pair in ring() if pair[0] == node}
    incoming = {pair: 0.05 for pair in ring() if pair[1] == node}

    assert found(measured(12, later=sent)) == set(), "slow from the first, so no change"
    assert found(measured(3, later=sent, first=ONSET, gauges=measured(ONSET))) == {("slow sender", (node,))}
    assert found(measured(3, later=incoming, first=ONSET, gauges=measured(ONSET))) == {("slow receiver", (node,))}


@given(seed=st.integers(0, 1 << 30), skew=st.lists(st.floats(-3, 3), min_size=STAGES, max_size=STAGES))
def test_clock_offsets_between_machines_do_not_matter(seed: int, skew: list[float]) -> None:
    """One direction of an edge becomes slow on machines whose clocks differ by seconds."""
    clocks, hosts = dict(enumerate(skew)), tuple((node, f"h{node}") for node in range(STAGES))
    gauges = measured(
        3, seed, later={(2, 3): 0.03}, clocks=clocks, first=ONSET, gauges=measured(ONSET, seed, clocks=clocks)
    )

    assert found(gauges, hosts) == {("slow link", (2, 3))}


def test_slow_workers_of_one_machine_are_one_slow_machine() -> None:
    hosts = ((0, ""), (1, ""), (2, ""), (3, "h1"), (4, "h1"))
    gauges = measured(3, slow={3: 3.0, 4: 2.5}, first=ONSET, gauges=measured(ONSET))

    assert found(gauges, hosts) == {("slow host", (3, 4))}
    assert found(gauges) == {("slow worker", (3,)), ("slow worker", (4,))}


@given(seed=st.integers(0, 1 << 30), times=st.floats(2, 8), small=st.booleans())
def test_a_slow_machine_is_found_if_it_holds_most_stages_and_the_ends(seed: int, times: float, small: bool) -> None:
    """Compared with all others, most of which are slow too, none of its workers would be slow."""
    nodes = (3, 4) if small else (0, 1, 2, 3)
    hosts = tuple((node, "h1" if node in nodes else "") for node in range(STAGES))
    gauges = measured(5, seed, dict.fromkeys(nodes, times), first=ONSET, gauges=measured(ONSET, seed))

    assert found(gauges, hosts) == {("slow host", nodes)}


def test_no_worker_is_blamed_while_the_rest_of_its_machine_becomes_slow() -> None:
    """One worker's fault is reported earlier than the other's: only the machine is reported as slow."""
    hosts = ((0, ""), (1, ""), (2, ""), (3, "h1"), (4, "h1"))
    one = measured(1, slow={3: 3.0}, first=ONSET, gauges=measured(ONSET))
    both = measured(1, slow={3: 3.0, 4: 3.0}, first=ONSET + 1, gauges=one)
    later = measured(1, slow={3: 3.0, 4: 3.0}, first=ONSET + 2, gauges=both)
    alone = measured(2, slow={3: 3.0}, first=ONSET + 1, gauges=one)

    assert [found(gauges, hosts) for gauges in (one, both, later)] == [set(), set(), {("slow host", (3, 4))}]
    assert found(alone, hosts) == {("slow worker", (3,))}


@given(seed=st.integers(0, 1 << 30), late=st.floats(0.06, 1.0))
def test_late_data_is_not_a_slow_worker(seed: int, late: float) -> None:
    gauges = measured(3, seed, read={0: 0.002 + late}, first=ONSET, gauges=measured(ONSET, seed, read={0: 0.002}))

    assert found(gauges) == {("slow data", (0,))}


@given(seed=st.integers(0, 1 << 30), late=st.floats(0, 0.015))
def test_data_that_was_always_slow_or_is_slightly_late_is_not_blamed(seed: int, late: float) -> None:
    past = measured(ONSET, seed, read={0: 0.2})

    assert found(measured(3, seed, read={0: 0.2}, first=ONSET, gauges=past)) == set()
    assert found(measured(3, seed, read={0: late}, first=ONSET, gauges=measured(ONSET, seed))) == set()


def test_a_uniform_slowdown_blames_no_worker() -> None:
    everyone = dict.fromkeys(range(STAGES), 3.0)

    assert found(measured(3, slow=everyone, first=ONSET, gauges=measured(ONSET))) == set()


def test_a_worker_that_was_always_slow_is_found_by_its_peers() -> None:
    assert found(measured(3, slow={2: 2.5})) == {("slow worker", (2,))}


def test_unequal_work_of_stages_is_considered() -> None:
    gauges = measured(6, slow={2: 3.0})

    assert find_slow_parts(gauges, HERE, (0.0, 1.0, 3.0, 1.0, 1.0), frozenset()) == ()


def test_an_edge_that_breaks_or_stalls_repeatedly_is_flaky() -> None:
    gauges = measured(ONSET)
    stalling = measured(3, lost={(1, 2): 0.3}, first=ONSET, gauges=gauges)
    for broken in range(4):
        gauges = measured(1, first=ONSET + broken, gauges=gauges.with_break(2, 1, broken).with_break(1, 2, broken))

    assert found(gauges) == {("flaky link", (1, 2))}, "both ends report each break"
    assert found(stalling) == {("flaky link", (1, 2))}


@given(seed=st.integers(0, 1 << 30))
def test_a_verdict_is_cleared_only_after_a_clear_improvement(seed: int) -> None:
    """At the threshold itself a verdict stays as it is."""
    gauges = measured(5, seed, {2: 1.5}, {(3, 4): 0.006}, first=ONSET, gauges=measured(ONSET, seed))
    known = frozenset({("slow worker", (2,)), ("slow link", (3, 4))})

    assert {(v.fault, v.nodes) for v in find_slow_parts(gauges, HERE, (), known)} == known
    assert found(measured(5, seed, first=ONSET, gauges=gauges)) == set()


def test_the_predicted_step_is_that_of_the_next_slowest_stage() -> None:
    gauges = measured(3, slow={2: 3.0}, first=ONSET, gauges=measured(ONSET))

    share = remaining_share(gauges.nodes, [2])

    assert 0.3 < share < 0.45
    assert isinstance(find_slow_parts(gauges, HERE, (), frozenset())[0], SlowPart)
