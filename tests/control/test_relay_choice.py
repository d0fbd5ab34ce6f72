"""Assignment of edges to relays: balanced by traffic, changed only after a relay failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from planaria.cli.commands.plan import describe
from planaria.config.schema import FleetConfig, RunConfig
from planaria.control.apply import apply
from planaria.control.facts.events import EdgeBroken, GraceExpired, RunStarted
from planaria.control.relays import assign_relays
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState

ROUTES = [[0, 1, 2, 3, 4, 0]]
PAIRS = {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)}


def replica(relays: dict[str, float], **fields: object) -> ReplicaState:
    started = RunStarted(
        name="run", seed=0, stages=4, steps=9, first_step=0, samples_per_step=4, wall_time=0.0, routes=ROUTES,
        relays=relays,
    )  # fmt: skip
    return replace(ReplicaState.start(started), **fields)  # type: ignore[arg-type]


def test_relays_share_edges_by_bandwidth() -> None:
    assert assign_relays(replica({}), PAIRS, set(), ROUTES) == {}, "direct edges"
    even = assign_relays(replica({"a": 5.0, "b": 5.0}), PAIRS, set(), ROUTES)
    assert even.keys() == PAIRS and sorted(Counter(even.values()).values()) == [2, 3]
    uneven = assign_relays(replica({"a": 4.0, "b": 1.0}), PAIRS, set(), ROUTES)
    assert Counter(uneven.values()) == {"a": 4, "b": 1}


def test_edges_are_weighted_by_their_messages() -> None:
    routes = [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 3, 0]]
    found = assign_relays(replica({"a": 1.0, "b": 1.0}), {(0, 1), (1, 2), (0, 2), (1, 3), (0, 3)}, set(), routes)
    crossed = Counter((min(hop), max(hop)) for r in routes for hop in pairwise(r))
    loads = Counter[str]()
    for pair, name in found.items():
        loads[name] += crossed[pair]
    assert sorted(loads.values()) == [4, 5]


def test_kept_edges_stay_and_new_ones_avoid_relays_of_broken_edges() -> None:
    over = {(0, 1): "a", (1, 2): "b", (2, 3): "c", (3, 4): "a", (0, 4): "b"}
    before = replica({"a": 1.0, "b": 1.0, "c": 1.0}, relay_of_edge=over, avoided_relays=frozenset("a"))
    kept = {pair for pair, name in over.items() if name != "a"}
    found = assign_relays(before, PAIRS, kept, ROUTES)
    assert all(found[pair] == over[pair] for pair in kept)
    assert {found[pair] for pair in PAIRS - kept} <= {"b", "c"} and "c" in {found[pair] for pair in PAIRS - kept}


@pytest.mark.parametrize(
    ("shunned", "broken", "then"),
    [
        ("", [(0, 1)], "a"),
        ("", [(0, 1), (1, 2)], ""),  # no relay is left: they may not be at fault
        ("a", [(1, 2)], "b"),  # the earlier one may have recovered
        ("", [(3, 4)], ""),  # over no relay
    ],
)
def test_the_relay_of_a_broken_edge_is_avoided_if_there_are_others(
    shunned: str, broken: list[tuple[int, int]], then: str
) -> None:
    over = {(0, 1): "a", (1, 2): "b"}
    links = dict.fromkeys(PAIRS, "there")
    state = replica(
        {"a": 1.0, "b": 1.0}, relay_of_edge=over, links=links, avoided_relays=frozenset(shunned), phase="run"
    )
    state = replace(state, holders={n: f"w{n}" for n in range(5)}, origins={})
    run = RunState.start(state.started)
    run = replace(run, replicas=run.replicas.with_replica(state))
    for low, high in broken:
        run = apply(EdgeBroken(worker=f"w{low}", generation=0, node=low, peer=high, detail="reset"), run)
    run = apply(GraceExpired(replica=0, generation=0), run)
    assert run.replicas[0].avoided_relays == frozenset(then)
    assert run.replicas[0].links.keys() == PAIRS - set(broken)


def test_a_plan_lists_the_edges_of_each_relay() -> None:
    relays = {"north": {"at": "127.0.0.1:1", "bandwidth_mbit": 100.0}, "south": {"at": "127.0.0.1:2"}}
    config = RunConfig.model_validate(
        {"engine": "fleet", "pipeline": {"stages": 4}, "fleet": {"key": "k", "relays": relays}}
    )
    lines = describe(config).splitlines()
    (north,), (south,) = ([line for line in lines if line.startswith(f"relay {name} ")] for name in relays)
    edges = [north.split("edges ")[1].split(":")[0], south.split("edges ")[1].split(":")[0]]
    assert edges == ["none", "0–1, 0–4, 1–2, 2–3, 3–4"]
    assert lines[-1].startswith("lower bound over all choices of relays: ") and "(gap 0.0%)" in lines[-1]
    assert "relay" not in describe(config.model_copy(update={"fleet": FleetConfig()}))
