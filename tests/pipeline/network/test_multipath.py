"""Paths over shared links: topology files, errors, and max-min fair rates."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.pipeline.network.multipath import max_min_rates
from planaria.pipeline.network.topology import Topology, read

MBIT = 125_000
NODES = """
[[nodes]]
site = "Bern"
[[nodes]]
site = "Oslo"
"""
TWO = """
[[link]]
id = "north"
sites = ["Bern", "Oslo"]
latency_ms = 20
bandwidth_mbit = 100
[[link]]
id = "south"
sites = ["Bern", "Oslo"]
latency_ms = 50
bandwidth_mbit = 300
"""
RELAYED = """
matrix = { latency_ms = "latency.csv", bandwidth_mbit = "bandwidth.csv" }
[[link]]
id = "direct"
sites = ["Bern", "Oslo"]
[[link]]
id = "over Rome"
sites = ["Bern", "Oslo"]
via = "Rome"
latency_ms = 1
bandwidth_mbit = 150
"""
LATENCY = ",Bern,Oslo,Rome\nBern,,20,10\nOslo,,,30\nRome\n"
BANDWIDTH = ",Bern,Oslo,Rome\nBern,,200,100\nOslo,,,300\n"


def topology(folder: Path, text: str, scale: float = 1.0) -> Topology:
    (folder / "latency.csv").write_text(LATENCY)
    (folder / "bandwidth.csv").write_text(BANDWIDTH)
    (folder / "topology.toml").write_text(text)
    return read(folder / "topology.toml", scale)


def test_a_pair_has_the_listed_links_in_each_direction(tmp_path: Path) -> None:
    ways = topology(tmp_path, TWO + NODES).path_network
    assert ways is not None
    assert [(path.id, path.latency_s, ways.bandwidth(path)) for path in ways.living("Bern", "Oslo")] == [
        ("north", 0.02, 100 * MBIT), ("south", 0.05, 300 * MBIT),
    ]  # fmt: skip
    there, back = (
        {link for path in ways.living(*pair) for link in path.links} for pair in (("Bern", "Oslo"), ("Oslo", "Bern"))
    )
    assert there.isdisjoint(back)


def test_a_message_alone_takes_the_fastest_path(tmp_path: Path) -> None:
    found = topology(tmp_path, TWO + NODES)
    assert found.carry_s("Bern", "Oslo", 0) == 0.02
    assert found.carry_s("Bern", "Oslo", 300 * MBIT) == 1.05
    assert found.transmit_s("Bern", "Oslo", 300 * MBIT) == 1.0
    assert topology(tmp_path, TWO + NODES, 2.0).carry_s("Oslo", "Bern", 300 * MBIT) == 2.1
    assert found.carry_s("Bern", "Bern", 0) == 0.001


def test_a_relay_is_reached_over_the_links_of_the_matrix(tmp_path: Path) -> None:
    found = topology(tmp_path, RELAYED + NODES)
    assert found.path_network is not None
    direct, relayed = found.path_network.living("Oslo", "Bern")
    assert (direct.latency_s, found.path_network.bandwidth(direct)) == (0.02, 200 * MBIT)
    assert relayed.latency_s == pytest.approx(0.030 + 0.001 + 0.010)
    assert relayed.links == ("Oslo → Rome", "relay over Rome", "Rome → Bern")
    assert found.path_network.bandwidth(relayed) == 100 * MBIT
    assert found.path_network.capacity["relay over Rome"] == 150 * MBIT


def test_a_relay_joins_several_sites_that_share_its_bandwidth(tmp_path: Path) -> None:
    text = RELAYED.split("[[link]]")[0] + '[[link]]\nid = "hub"\nsites = ["Bern", "Oslo", "Paris"]\nvia = "Rome"\n'
    text += (
        'bandwidth_mbit = 10\n[[link]]\nid = "line"\nsites = ["Paris", "Rome"]\nlatency_ms = 1\nbandwidth_mbit = 50\n'
    )
    found = topology(tmp_path, text + NODES + '[[nodes]]\nsite = "Paris"\n')
    assert found.path_network is not None
    for pair in (("Bern", "Oslo"), ("Paris", "Bern"), ("Oslo", "Paris")):
        (path,) = found.path_network.living(*pair)
        assert "relay hub" in path.links
    assert found.path_network.living("Paris", "Bern")[0].links == ("line: Paris → Rome", "relay hub", "Rome → Bern")


def test_several_links_to_a_relay_give_several_paths(tmp_path: Path) -> None:
    text = RELAYED + '[[link]]\nid = "a"\nsites = ["Bern", "Rome"]\n[[link]]\nid = "b"\nsites = ["Rome", "Bern"]\n'
    found = topology(tmp_path, text + NODES)
    assert found.path_network is not None
    assert [path.id for path in found.path_network.living("Bern", "Oslo")] == [
        "direct",
        "over Rome (a)",
        "over Rome (b)",
    ]


def test_the_controllers_relay_is_named_relay(tmp_path: Path) -> None:
    text = RELAYED.replace('via = "Rome"', 'via = "relay"').replace(
        "[[link]]", '[relay]\nsite = "Rome"\nhidden = []\n[[link]]', 1
    )
    found = topology(tmp_path, text + NODES)
    assert found.path_network is not None
    assert found.path_network.living("Bern", "Oslo")[1].links[0] == "Bern → Rome"


def test_unlisted_sites_have_the_link_of_the_matrix(tmp_path: Path) -> None:
    found = topology(tmp_path, RELAYED + NODES + '[[nodes]]\nsite = "Rome"\n')
    assert found.path_network is not None
    assert [path.links for path in found.path_network.living("Rome", "Bern")] == [("Rome → Bern",)]
    assert found.link("Rome", "Bern") == (0.01, 100 * MBIT)


DIRECT = 'id = "direct"\nsites = ["Bern", "Oslo"]'


def direct(*sites: str) -> str:
    return f'id = "direct"\nsites = {list(sites)}'


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("bandwidth_mbit = 150", "bandwidth_mbit = 0", "topology.toml: [[link]] 2: bandwidth_mbit = 0: "),
        ("bandwidth_mbit = 150", "bandwidth_mbit = -3", "topology.toml: [[link]] 2: bandwidth_mbit = -3: "),
        ("latency_ms = 1", "latency_ms = -1", "topology.toml: [[link]] 2: latency_ms = -1: "),
        ('id = "over Rome"', 'id = "direct"', "link: 2 entries have the id 'direct'; use a different id for each"),
        (DIRECT, direct("Bern", "Olso"), "link 'direct': 'Olso': no node is there, and no matrix has it; did you mean"),
        ('id = "over Rome"\n', "", "topology.toml: [[link]] 2: id: missing; add it"),
        (DIRECT, direct("Bern"), "topology.toml: [[link]] 1: sites = ['Bern']: "),
        (DIRECT, direct("Bern", "Bern"), "link 'direct': sites = ['Bern', 'Bern']: a link joins different sites"),
        (DIRECT, direct("Bern", "Oslo", "Rome"), "sites = ['Bern', 'Oslo', 'Rome']: a link joins two"),
        ('via = "Rome"', 'via = "Paris"', "via = 'Paris' does not join Bern and Oslo: there is no link Bern – Paris"),
        ('via = "Rome"', 'via = "Oslo"', "link 'over Rome': via = 'Oslo': Oslo is one of the sites that it joins"),
        ('via = "Rome"', 'via = "relay"', "link 'over Rome': via = 'relay': there is no [relay]; add it"),
        ('via = "Rome"', 'vja = "Rome"', "topology.toml: [[link]] 2: vja: unknown key; did you mean 'via'?"),
    ],
)
def test_an_invalid_entry_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in RELAYED
    with pytest.raises(UserError) as error:
        topology(tmp_path, RELAYED.replace(old, new) + NODES)
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (NODES, "matrix: missing; set one, or join all sites by [[link]] entries"),
        (TWO + NODES + '[[nodes]]\nsite = "Rome"\n', "link: nothing joins Bern and Rome; add a [[link]]"),
        (TWO.replace("latency_ms = 20\n", "") + NODES, "link 'north': set latency_ms, because no matrix"),
        (TWO.replace("bandwidth_mbit = 100\n", "") + NODES, "link 'north': set bandwidth_mbit"),
    ],
)  # fmt: skip
def test_missing_settings_of_a_topology_without_a_matrix_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError) as error:
        topology(tmp_path, text)
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_too_many_paths_are_refused(tmp_path: Path) -> None:
    hubs = "".join(f'[[link]]\nid = "{n}"\nsites = {SITES}\nvia = "hub"\n' for n in range(8))
    legs = "".join(
        f'[[link]]\nid = "to {s}"\nsites = ["{s}", "hub"]\nlatency_ms = 1\nbandwidth_mbit = 1\n' for s in SITES
    )
    with pytest.raises(UserError, match=r"link: sites are joined by more than 65536 paths in all; list fewer"):
        topology(tmp_path, hubs + legs + "".join(f'[[nodes]]\nsite = "{s}"\n' for s in SITES))
    lines = '[[link]]\nid = "{}"\nsites = ["Bern", "Oslo"]\nlatency_ms = 1\nbandwidth_mbit = 1\n'
    with pytest.raises(UserError, match=r"link: Bern and Oslo are joined by more than 256 paths; list fewer"):
        topology(tmp_path, "".join(map(lines.format, range(257))) + NODES)


SITES = [f"s{n}" for n in range(100)]


Shared = tuple[list[list[str]], dict[str, float]]
NEAR = 1e-9


@st.composite
def shared(draw: st.DrawFn) -> Shared:
    """Draw flows over up to six links, some of which may be dead or unlimited."""
    kinds = st.one_of(st.integers(1, 20).map(float), st.sampled_from([0.0, math.inf]))
    capacity = {f"l{n}": draw(kinds) for n in range(draw(st.integers(1, 6)))}
    routes = draw(
        st.lists(st.lists(st.sampled_from(sorted(capacity)), min_size=1, max_size=4, unique=True), max_size=10)
    )
    return routes, capacity


def used(link: str, routes: list[list[str]], rates: list[float]) -> float:
    return sum(rate for route, rate in zip(routes, rates, strict=True) if link in route)


@given(shared())
def test_no_link_exceeds_its_capacity(given_: Shared) -> None:
    routes, capacity = given_
    rates = max_min_rates(routes, capacity)
    assert all(used(link, routes, rates) <= room * (1 + NEAR) for link, room in capacity.items())


@given(shared())
def test_no_rate_can_grow_without_a_smaller_or_equal_one_falling(given_: Shared) -> None:
    """Every flow has a full link on which no flow is faster."""
    routes, capacity = given_
    rates = max_min_rates(routes, capacity)
    for route, rate in zip(routes, rates, strict=True):
        if all(capacity[link] == math.inf for link in route):
            assert rate == math.inf
            continue
        fastest = {link: max(r for o, r in zip(routes, rates, strict=True) if link in o) for link in route}
        assert any(
            used(link, routes, rates) >= capacity[link] * (1 - NEAR) and rate >= fastest[link] * (1 - NEAR)
            for link in route
        )


def test_the_textbook_example() -> None:
    """One flow over both links, one and two over each alone; the busier link limits the long one."""
    routes = [["a", "b"], ["a"], ["b"], ["b"]]
    assert max_min_rates(routes, {"a": 10.0, "b": 9.0}) == [3.0, 7.0, 3.0, 3.0]


def test_a_link_that_is_named_twice_counts_once() -> None:
    assert max_min_rates([["a", "a"], ["a"]], {"a": 10.0}) == [5.0, 5.0]
