from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.config.shipped import FOLDER as RECIPES
from planaria.pipeline.network.topology import CITIES, UNIT_BYTES, Topology, read, twelve_cities

MBIT = 125_000
"""bytes per second"""


def write(folder: Path, topology: str, **tables: str) -> Path:
    """Write a topology file and its CSV files."""
    for name, table in tables.items():
        (folder / f"{name}.csv").write_text(table, encoding="utf-8")
    path = folder / "topology.toml"
    path.write_text(topology, encoding="utf-8")
    return path


OWN = """
matrix = { latency_ms = "latency.csv", bandwidth_mbit = "bandwidth.csv" }
[[nodes]]
site = "Bern"
count = 2
[[nodes]]
site = "Oslo"
speed = 2.0
memory = 5
role = "data"
"""
HALF_LATENCY = ",Bern,Oslo,Rome\nBern,,20,10\nOslo,,,30\nRome\n"
HALF_BANDWIDTH = ",Bern,Oslo,Rome\nBern,,200,100\nOslo,,,300\n"
FULL_LATENCY = ",Bern,Oslo\nBern,,20\nOslo,25,\n"
FULL_BANDWIDTH = ",Bern,Oslo\nBern,,200\nOslo,50,\n"


def own(folder: Path, latency: str = HALF_LATENCY, bandwidth: str = HALF_BANDWIDTH, topology: str = OWN) -> Topology:
    return read(write(folder, topology, latency=latency, bandwidth=bandwidth))


def complaint(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_built_in_matrix_has_every_pair_once() -> None:
    found = twelve_cities()
    assert sorted(tuple(sorted(pair)) for pair in found) == sorted(
        tuple(sorted(pair)) for pair in combinations(CITIES, 2)
    )
    assert len(CITIES) == len(set(CITIES)) == 12
    for latency, bandwidth in found.values():
        assert 0.003 <= latency <= 0.133
        assert 70 * UNIT_BYTES <= bandwidth <= 1940 * UNIT_BYTES


def test_the_built_in_matrix_has_the_published_links() -> None:
    found = twelve_cities()
    assert found["Belgium", "Canada"] == (0.041, 159 * UNIT_BYTES)
    assert found["Germany", "London"] == (0.0066, 1510 * UNIT_BYTES)
    assert found["Iowa", "Oregon"] == (0.0193, 723 * UNIT_BYTES)
    assert found["London", "Australia"] == (0.132, 75 * UNIT_BYTES)


def test_netherlands_to_london_is_as_fast_as_its_neighbours() -> None:
    """With the published value, one message of 32 MiB would take two minutes."""
    found = twelve_cities()
    assert found["Netherlands", "London"] == (0.0048, found["Belgium", "London"][1])
    topology = read(RECIPES / "topologies" / "twelve_cities.toml")
    assert topology.carry_s("London", "Netherlands", 32 << 20) < 0.5


def test_the_shipped_topology_is_the_published_one() -> None:
    topology = read(RECIPES / "topologies" / "twelve_cities.toml")
    assert [node.name for node in topology.nodes[:2]] == ["Belgium 1", "Canada 1"]
    assert [node.site for node in topology.nodes] == [*CITIES, *CITIES[:8]]
    assert topology.nodes[19].name == "Oregon 2"
    assert {(node.speed, node.memory, node.role) for node in topology.nodes} == {(1.0, 3, "any")}
    assert not topology.queueing
    # Overhead, latency, and a message of 2^30 / 80 bytes at 159 units of 2^30 / 8000.
    assert topology.carry_s("Canada", "Belgium", 2**30 // 80) == pytest.approx(0.35 + 0.041 + 100 / 159)
    assert topology.carry_s("Canada", "Canada", 2**31) == pytest.approx(0.35 + 0.001 + 1.0, rel=1e-4)


def test_scale_multiplies_all_link_times() -> None:
    whole, small = (read(RECIPES / "topologies" / "twelve_cities.toml", scale) for scale in (1.0, 0.02))
    assert small.carry_s("Japan", "Iowa", 10**7) == pytest.approx(0.02 * whole.carry_s("Japan", "Iowa", 10**7))
    assert small.latency_s("Japan", "Iowa") == pytest.approx(0.02 * whole.latency_s("Japan", "Iowa"))


def test_half_a_table_gives_a_symmetric_matrix(tmp_path: Path) -> None:
    topology = own(tmp_path)
    for a, b in (("Bern", "Oslo"), ("Oslo", "Bern")):
        assert topology.latency_s(a, b) == 0.02
        assert topology.transmit_s(a, b, 200 * MBIT) == 1.0
        assert topology.carry_s(a, b, 200 * MBIT) == 1.02
    assert topology.latency_s("Rome", "Oslo") == 0.03
    assert topology.queueing


def test_a_full_table_may_differ_by_direction(tmp_path: Path) -> None:
    topology = own(tmp_path, FULL_LATENCY, FULL_BANDWIDTH)
    assert topology.carry_s("Bern", "Oslo", 200 * MBIT) == 1.02
    assert topology.carry_s("Oslo", "Bern", 200 * MBIT) == 4.025


def test_nodes_of_a_group_are_numbered_by_site(tmp_path: Path) -> None:
    topology = own(tmp_path, topology=OWN + '[[nodes]]\nsite = "Bern"\nrole = "worker"\n')
    assert [(n.name, n.speed, n.memory, n.role) for n in topology.nodes] == [
        ("Bern 1", 1.0, 3, "any"),
        ("Bern 2", 1.0, 3, "any"),
        ("Oslo 1", 2.0, 5, "data"),
        ("Bern 3", 1.0, 3, "worker"),
    ]


def test_same_site_applies_unless_the_table_has_the_link(tmp_path: Path) -> None:
    assert own(tmp_path).carry_s("Bern", "Bern", 16000 * MBIT) == 1.001
    changed = own(tmp_path, topology="same_site = { latency_ms = 5, bandwidth_mbit = 8 }\n" + OWN)
    assert changed.carry_s("Bern", "Bern", 8 * MBIT) == 1.005
    latency, bandwidth = FULL_LATENCY.replace("Bern,,", "Bern,7,"), FULL_BANDWIDTH.replace("Bern,,", "Bern,70,")
    table = own(tmp_path, latency, bandwidth)
    assert table.carry_s("Bern", "Bern", 70 * MBIT) == 1.007
    assert table.carry_s("Oslo", "Oslo", 16000 * MBIT) == 1.001


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (OWN.replace('"Oslo"', '"Olso"'), "nodes: site 'Olso' is not in the matrix; did you mean 'Oslo'?"),
        (OWN.replace("speed", "sped"), "topology.toml: [[nodes]] 2: sped: unknown key; did you mean 'speed'?"),
        (OWN.replace("count = 2", "count = 0"), "topology.toml: [[nodes]] 1: count = 0: "),
        (OWN.replace('"data"', '"boss"'), "topology.toml: [[nodes]] 2: role = 'boss': "),
        ("overheads = 1\n" + OWN, "topology.toml: overheads: unknown key; did you mean 'overhead_s'?"),
        ("[same_sites]\n" + OWN, "topology.toml: same_sites: unknown key; did you mean 'same_site'?"),
        (OWN.replace("latency_ms =", "latency ="), "matrix.latency: unknown key; did you mean 'latency_ms'?"),
        (OWN.replace(', bandwidth_mbit = "bandwidth.csv"', ""), "matrix.bandwidth_mbit: missing; add it"),
        (OWN.replace("[[nodes]]", '[relay]\nsite = "Rom"\nhidden = ["Bern"]\n[[nodes]]', 1), "site 'Rom' is not in"),
        ("matrix = 5\nnodes = []", "topology.toml: matrix = 5: "),
        ("matrix.latency_ms = 5\nnodes = []", "topology.toml: matrix.latency_ms = 5: "),
        ("overhead_s = -1.0\n" + OWN, "topology.toml: overhead_s = -1.0: "),
        ("same_site = { latency_ms = -1 }\n" + OWN, "topology.toml: same_site.latency_ms = -1: "),
        ('matrix = "twelve_cites"\nnodes = []', "no such matrix; did you mean 'twelve_cities'?"),
        ('matrix = "twelve_cities"', "topology.toml: nodes: missing; add it"),
        ("matrix = ", "topology.toml: not valid TOML: "),
    ],
)  # fmt: skip
def test_an_invalid_topology_file_is_refused(tmp_path: Path, topology: str, message: str) -> None:
    assert message in complaint(write(tmp_path, topology, latency=HALF_LATENCY, bandwidth=HALF_BANDWIDTH))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "topology.toml: no such topology"), (b"\xff\xfe\x00", "topology.toml: not valid TOML: ")],
)
def test_an_unreadable_topology_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "topology.toml"
    if content is not None:
        path.write_bytes(content)
    line = complaint(path)
    assert line.startswith(f"{tmp_path}/") and message in line


@pytest.mark.parametrize(
    ("latency", "bandwidth", "message"),
    [
        (HALF_LATENCY.replace("30", ""), HALF_BANDWIDTH, "latency.csv: Oslo - Rome: this pair has no number"),
        (HALF_LATENCY, HALF_BANDWIDTH.replace("100", "fast"), "bandwidth.csv: Bern - Rome: 'fast' is not a number"),
        (HALF_LATENCY.replace("20", "-20"), HALF_BANDWIDTH, "latency.csv: Bern - Oslo: '-20' is not a number"),
        (HALF_LATENCY.replace("20", "nan"), HALF_BANDWIDTH, "latency.csv: Bern - Oslo: 'nan' is not a number"),
        (HALF_LATENCY.replace("20", "inf"), HALF_BANDWIDTH, "latency.csv: Bern - Oslo: 'inf' is not a number"),
        (HALF_LATENCY, HALF_BANDWIDTH.replace("300", "0"), "bandwidth.csv: Oslo - Rome: '0' is not a number"),
        (HALF_LATENCY.replace("\nOslo", "\nOlso"), HALF_BANDWIDTH, "latency.csv: row 'Olso' does not fit"),
        (HALF_LATENCY.replace(",30", ",30,4"), HALF_BANDWIDTH, "latency.csv: row 'Oslo' does not fit"),
        (FULL_LATENCY, FULL_BANDWIDTH.replace("Oslo,50", "Oslo,"), "Oslo - Bern is in one of the two files only"),
        (HALF_LATENCY, FULL_BANDWIDTH, "is in one of the two files only"),
    ],
)  # fmt: skip
def test_an_invalid_table_is_refused(tmp_path: Path, latency: str, bandwidth: str, message: str) -> None:
    assert message in complaint(write(tmp_path, OWN, latency=latency, bandwidth=bandwidth))


@pytest.mark.parametrize("table", [None, b"", b"\xff\xfe\x00,\x00", b",Bern,B\xfcrn\nBern,,1\n"])
def test_a_table_that_is_missing_empty_or_not_text_is_refused(tmp_path: Path, table: bytes | None) -> None:
    path = write(tmp_path, OWN, bandwidth=HALF_BANDWIDTH)
    if table is not None:
        (tmp_path / "latency.csv").write_bytes(table)
    assert complaint(path).startswith(f"{tmp_path}/")


def test_hidden_sites_reach_each_other_through_the_controller(tmp_path: Path) -> None:
    matrix, nodes = OWN.split("[[nodes]]", 1)
    relayed = f'{matrix}\n[relay]\nsite = "Rome"\nhidden = ["Bern", "Oslo"]\n[[nodes]]{nodes}'
    plain, topology = own(tmp_path), own(tmp_path, topology=relayed)
    assert topology.link("Bern", "Oslo") == pytest.approx((0.010 + 0.030, 100 * MBIT))
    assert topology.link("Oslo", "Bern") == pytest.approx((0.040, 100 * MBIT))
    assert topology.link("Bern", "Rome") == plain.link("Bern", "Rome")
    assert topology.link("Bern", "Bern") == plain.link("Bern", "Bern")
