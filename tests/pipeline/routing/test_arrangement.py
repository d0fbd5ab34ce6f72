from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.pipeline.routing.arrangement import Arrangement, mix_routes, node_of, replicate_nodes, replicate_routes

SHARED = Arrangement({0: [0, 3], 1: [1, 7], 2: [4, 2]})


def test_one_node_per_stage_is_the_plain_pipeline() -> None:
    single = Arrangement.single(3)
    assert single.spine == (0, 1, 2, 3, 0) and not single.shared
    assert single.pairs([(0, 2, 1, 3, 0)]) == {(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)}
    assert single.of([0, 1, 3]).spine == (0, 1, 3, 0)


def test_nodes_of_a_stage_connect_to_its_first() -> None:
    assert SHARED.shared and SHARED.stages == (0, 1, 2)
    assert SHARED.nodes(2) == (4, 2) and SHARED.peers(7) == (1, 7) and SHARED.nodes(9) == ()
    assert SHARED.stage == {0: 0, 1: 1, 2: 2, 3: 0, 4: 2, 7: 1}
    assert SHARED.spine == (0, 1, 4, 0)
    assert SHARED.pairs() == {(0, 1), (1, 4), (0, 4), (0, 3), (1, 7), (2, 4)}
    left = SHARED.of({3, 2, 7, 1})
    assert left.spine == (3, 1, 2, 3) and left.pairs() == {(1, 3), (1, 2), (2, 3), (1, 7)}


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 5), min_size=1), st.data())
def test_all_nodes_can_reach_one_another(stage: dict[int, int], data: st.DataObject) -> None:
    """Gradients, validations and copies need only the spine and the edges to each stage's first node."""
    present = data.draw(st.sets(st.sampled_from(sorted(stage)), min_size=1))
    order = data.draw(st.permutations(sorted(stage)))
    there = Arrangement({held: [n for n in order if stage[n] == held] for held in stage.values()}).of(present)
    pairs = there.pairs()
    assert all(low < high and {low, high} <= present for low, high in pairs)
    reached = {min(present)}
    for _ in present:
        reached |= {node for pair in pairs if set(pair) & reached for node in pair}
    assert reached == present


WAYS = [(0, 1, 2, 3, 0), (0, 2, 1, 3, 0)]


def test_each_replica_uses_its_own_nodes() -> None:
    assert replicate_routes(WAYS, 2, 3) == [(0, 1, 2, 3, 0), (0, 2, 1, 3, 0), (4, 5, 6, 7, 4), (4, 6, 5, 7, 4)]
    assert replicate_nodes(1, 3).spine == (0, 1, 2, 3, 0)
    assert replicate_nodes(2, 3).nodes(2) == (2, 6) == (node_of(0, 2, 3), node_of(1, 2, 3))


@given(st.integers(1, 9), st.integers(0, 99), st.integers(0, 99))
def test_mixed_routes_visit_the_same_stages_with_equal_load(replicas: int, seed: int, step: int) -> None:
    routes = mix_routes(WAYS, replicas, 3, seed, step)
    stage = replicate_nodes(replicas, 3).stage
    assert [tuple(stage[node] for node in route) for route in routes] == WAYS * replicas
    assert [route[0] for route in routes] == [node_of(r, 0, 3) for r in range(replicas) for _ in WAYS]
    assert all(route[0] == route[-1] for route in routes), "targets are at the microbatch's origin"
    for i in range(len(WAYS)):
        for hop in range(1, 4):
            assert len({route[hop] for route in routes[i :: len(WAYS)]}) == replicas
    assert routes == mix_routes(WAYS, replicas, 3, seed, step)
