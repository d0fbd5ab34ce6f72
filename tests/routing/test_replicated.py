from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.pipeline.routing.replicated import columns, mixed, node_of, replicated

WAYS = [(0, 1, 2, 3, 0), (0, 2, 1, 3, 0)]


def test_each_replica_keeps_to_its_own_nodes() -> None:
    assert columns(WAYS, 2, 3) == [(0, 1, 2, 3, 0), (0, 2, 1, 3, 0), (4, 5, 6, 7, 4), (4, 6, 5, 7, 4)]
    assert replicated(1, 3).spine == (0, 1, 2, 3, 0)
    assert replicated(2, 3).nodes(2) == (2, 6) == (node_of(0, 2, 3), node_of(1, 2, 3))


@given(st.integers(1, 9), st.integers(0, 99), st.integers(0, 99))
def test_mixed_routes_visit_the_same_stages_and_load_all_replicas_alike(replicas: int, seed: int, step: int) -> None:
    routes = mixed(WAYS, replicas, 3, seed, step)
    stage = replicated(replicas, 3).stage
    assert [tuple(stage[node] for node in route) for route in routes] == WAYS * replicas
    assert [route[0] for route in routes] == [node_of(r, 0, 3) for r in range(replicas) for _ in WAYS]
    assert all(route[0] == route[-1] for route in routes), "targets are where the microbatch began"
    for i in range(len(WAYS)):
        for hop in range(1, 4):
            assert len({route[hop] for route in routes[i :: len(WAYS)]}) == replicas
    assert routes == mixed(WAYS, replicas, 3, seed, step)


def test_every_step_mixes_anew() -> None:
    assert len({tuple(mixed(WAYS, 4, 3, 1, step)) for step in range(20)}) == 20
