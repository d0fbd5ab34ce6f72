from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.config.schema import NetworkConfig
from planaria.pipeline.network import measurement
from planaria.pipeline.network.costs import MBIT
from planaria.pipeline.network.measurement import MeasuredLink, NodeSamples, Quartiles
from planaria.pipeline.network.topology import Node, Topology, read

TIMES = st.floats(1e-4, 1.0)
SPEEDS = st.floats(1e3, 1e10)
"""bytes per second"""


def samples(latency: float, speed: float, small: int = 1000, large: int = 100_000, late: float = 0.0) -> NodeSamples:
    """Return a node's times over a link of this one-way ``latency`` (s); two of five repeats are ``late`` (s)."""
    delays = [0.0, late, 0.0, late, 0.0]
    return NodeSamples(
        round_trips=[2 * latency + delay for delay in delays],
        small=small,
        large=large,
        passages=[(2 * latency + small / speed, 2 * latency + large / speed + delay) for delay in delays],
    )


def link(latency: float, bandwidth: float) -> MeasuredLink:
    return MeasuredLink(
        Quartiles(latency, latency / 2, latency * 2), Quartiles(bandwidth, bandwidth / 2, bandwidth * 2)
    )


@given(st.integers(0, 41))
def test_every_pair_occurs_once_and_no_node_twice_in_a_round(nodes: int) -> None:
    found = measurement.pair_rounds(nodes)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(nodes), 2))
    for pairs in found:
        assert max(Counter(node for pair in pairs for node in pair).values()) == 1
    fewest = 0 if nodes < 2 else nodes - 1 + nodes % 2
    assert len(found) == fewest


@given(st.integers(2, 12), st.data())
def test_a_batch_stays_within_the_capacity(nodes: int, data: st.DataObject) -> None:
    pairs = list(combinations(range(nodes), 2))
    demand = {pair: data.draw(st.sampled_from([1.0, 30.0, 60.0, 100.0, 500.0, float("inf")])) for pair in pairs}
    found = measurement.pair_batches(nodes, demand, 100.0)
    assert sorted(pair for batch in found for pair in batch) == pairs
    for batch in found:
        assert max(Counter(node for pair in batch for node in pair).values()) == 1
        assert len(batch) == 1 or sum(demand[pair] for pair in batch) <= 100.0


def test_slow_links_are_measured_in_whole_rounds_and_real_ones_alone() -> None:
    pairs = list(combinations(range(6), 2))
    assert measurement.pair_batches(6, dict.fromkeys(pairs, 1.0), 100.0) == measurement.pair_rounds(6)
    alone = measurement.pair_batches(6, dict.fromkeys(pairs, float("inf")), 100.0)
    assert alone == [[pair] for batch in measurement.pair_rounds(6) for pair in batch]


@given(TIMES, TIMES, SPEEDS, SPEEDS)
def test_latency_and_bandwidth_are_separated_each_way(there: float, back: float, up: float, down: float) -> None:
    own, other = samples(there, up, large=1 << 20), samples(back, down, large=1 << 20)
    for found, speed in ((measurement.estimate_link(own, other), up), (measurement.estimate_link(other, own), down)):
        assert found.latency.value == pytest.approx((there + back) / 2)  # both ends measured the same round trip
        # Limited by the precision of doubles.
        assert found.bandwidth.value == pytest.approx(speed, rel=1e-3)


def test_delays_widen_the_spread_and_keep_the_median() -> None:
    calm, rough = samples(0.02, 1e6), samples(0.02, 1e6, late=5.0)
    found = measurement.estimate_link(rough, rough)
    assert found.latency == (pytest.approx(0.02), pytest.approx(0.02), pytest.approx(2.52))
    assert found.bandwidth.value == pytest.approx(1e6)
    assert found.bandwidth.low < 2e4 < 0.99e6 < found.bandwidth.high
    assert measurement.estimate_link(calm, calm).bandwidth == (pytest.approx(1e6),) * 3


def test_a_large_message_that_was_no_slower_gives_a_lower_bound() -> None:
    inverted = NodeSamples(round_trips=[0.1], small=10, large=1000, passages=[(0.3, 0.2)])
    assert measurement.estimate_link(inverted, inverted).bandwidth == (5000.0, 5000.0, 5000.0)


@given(SPEEDS, st.floats(0.0, 2.0))
def test_the_search_for_a_size_is_short_and_reaches_the_target_time(speed: float, round_trip: float) -> None:
    size, sent = measurement.FIRST_BYTES, 0
    for _ in range(6):
        sent += size
        large = measurement.next_size(size, round_trip + size / speed, round_trip)
        assert measurement.MIN_BYTES <= large <= measurement.MAX_BYTES
        if large <= 2 * size:
            break
        size = large
    else:
        pytest.fail("does not end")
    assert large == measurement.MIN_BYTES or large / speed < 1.01 * measurement.TARGET_S
    assert large == measurement.MAX_BYTES or large / speed > 0.49 * measurement.TARGET_S
    assert sent <= 2 * measurement.MAX_BYTES


@pytest.mark.parametrize(
    "wrong",
    [
        {"round_trips": []},
        {"round_trips": [0.1] * 65},
        {"round_trips": [float("inf")]},
        {"round_trips": [-0.1]},
        {"large": measurement.MAX_BYTES + 1},
        {"passages": [(0.1, 0.0)]},
    ],
)
def test_impossible_samples_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        NodeSamples.model_validate(samples(0.1, 1e6).model_dump() | wrong)


BERN, OSLO = Node("Bern 1", "Bern", 1.0, 3, "any"), Node("Oslo 1", "Oslo", 2.0, 5, "data")


def test_pairs_of_the_same_sites_are_merged() -> None:
    nodes = [BERN, OSLO, BERN]
    links = {
        (0, 1): link(0.010, 100.0), (1, 0): link(0.010, 10.0),
        (2, 1): link(0.030, 300.0), (1, 2): link(0.030, 30.0),
        (0, 2): link(0.001, 1000.0), (2, 0): link(0.001, 2000.0),
    }  # fmt: skip
    assert measurement.links_of_sites(nodes, links) == {
        ("Bern", "Oslo"): MeasuredLink(Quartiles(0.020, 0.005, 0.060), Quartiles(200.0, 50.0, 600.0)),
        ("Oslo", "Bern"): MeasuredLink(Quartiles(0.020, 0.005, 0.060), Quartiles(20.0, 5.0, 60.0)),
        ("Bern", "Bern"): MeasuredLink(Quartiles(0.001, 0.0005, 0.002), Quartiles(1500.0, 500.0, 4000.0)),
    }


NAMES = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), min_size=1).filter(
    lambda name: name == name.strip()
)
"""site names, including commas and quotes"""


@given(st.lists(NAMES, min_size=1, max_size=4, unique=True), st.booleans(), st.data())
def test_the_written_topology_has_the_measured_values(sites: list[str], queueing: bool, data: st.DataObject) -> None:
    places = [*sites, *data.draw(st.lists(st.sampled_from(sites), min_size=2 - min(2, len(sites)), max_size=3))]
    seen = Counter[str]()
    nodes = []
    for site in places:
        seen[site] += 1
        role = data.draw(st.sampled_from(["any", "data", "worker"]))
        nodes.append(Node(f"{site} {seen[site]}", site, data.draw(TIMES), data.draw(st.integers(1, 9)), role))
    links = {(a, b): link(data.draw(TIMES), data.draw(SPEEDS)) for a in sites for b in sites if a != b or seen[a] > 1}
    with TemporaryDirectory() as folder:
        for name, text in measurement.topology_files(nodes, links, queueing).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        found = read(Path(folder) / "topology.toml")
    assert found.nodes == tuple(nodes)
    assert (found.queueing, found.overhead_s) == (queueing, 0.0)
    assert found.links.keys() == {(a, b) for a in sites for b in sites}
    for (a, b), (latency, bandwidth) in found.links.items():
        expected = links.get((a, b), link(0.001, 16000 * MBIT))
        assert (latency, bandwidth) == (
            pytest.approx(expected.latency.value, 1e-5),
            pytest.approx(expected.bandwidth.value, 1e-5),
        )


def test_links_are_emulated_by_topology_or_network_if_enabled() -> None:
    links = {("Bern", "Oslo"): (0.02, 1e6), ("Oslo", "Bern"): (0.04, 2e6)}
    topology = Topology((BERN, OSLO), links, overhead_s=0.01, scale=0.5)
    on = NetworkConfig(emulate=True, latency_s=0.3, bandwidth=5e5)
    assert measurement.emulated_link(on, topology, BERN, OSLO) == (pytest.approx(0.015), pytest.approx(2e6))
    assert measurement.emulated_link(on, topology, OSLO, BERN) == (pytest.approx(0.025), pytest.approx(4e6))
    assert measurement.emulated_link(on, None, BERN, OSLO) == (0.3, 5e5)
    assert measurement.emulated_link(NetworkConfig(latency_s=0.3), topology, BERN, OSLO) == (0.0, None)
