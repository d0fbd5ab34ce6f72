from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig, PipelineConfig, RoutingConfig, RunConfig
from planaria.pipeline.routing import routes
from planaria.pipeline.routing.skipping import cc3_violation, visits_per_microbatch


def recipe(
    stages: int, microbatches: int, skip: float, swaps: int = 2, jump: int = 4, seed: int = 0, kind: str = "skipping"
) -> RunConfig:
    return RunConfig(
        seed=seed,
        model=ModelConfig(layers=stages),
        pipeline=PipelineConfig(stages=stages, microbatches=microbatches),
        routing=RoutingConfig(kind=kind, skip=skip, swaps=swaps, max_jump=jump),
    )


@st.composite
def recipes(draw: st.DrawFn) -> RunConfig:
    """Draw recipes with possible routes: no visit is more than ``jump`` from the last, whichever are omitted."""
    stages = draw(st.integers(1, 12))
    skip = draw(st.sampled_from([0.0, 0.1, 0.25, 0.33, 0.5, 0.9]))
    return recipe(
        stages,
        draw(st.integers(1, 40)),
        skip,
        draw(st.integers(0, 4)),
        draw(st.integers(stages - visits_per_microbatch(stages, skip) + 1, 14)),
        draw(st.integers(0, 2**32)),
    )


STEPS = st.integers(0, 10**6)


def used(config: RunConfig, step: int) -> list[int]:
    """Return how often each block stage is visited in a step."""
    counted = Counter(stage for route in routes(config, step) for stage in route)
    return [counted[stage] for stage in range(1, config.pipeline.stages + 1)]


@given(recipes(), STEPS)
def test_every_route_obeys_the_rules(config: RunConfig, step: int) -> None:
    stages, shape = config.pipeline.stages, config.routing
    drawn = routes(config, step)
    assert len(drawn) == config.pipeline.microbatches
    for first, *walk, last in drawn:
        assert (first, last) == (0, 0)
        assert len(walk) == len(set(walk)) == visits_per_microbatch(stages, shape.skip)
        assert min(walk) >= 1 and max(walk) <= stages
        assert cc3_violation(walk, shape.swaps, shape.max_jump) == ""


@given(recipes(), STEPS)
def test_all_stages_are_used_equally_within_one(config: RunConfig, step: int) -> None:
    counts = used(config, step)
    assert max(counts) - min(counts) <= (1 if sum(counts) % len(counts) else 0)


def test_steps_and_seeds_have_different_routes() -> None:
    config = recipe(6, 12, 0.33)
    drawn = {tuple(routes(config, step)) for step in range(50)}
    assert len(drawn) == 50
    assert tuple(routes(recipe(6, 12, 0.33, seed=1), 0)) not in drawn


def test_over_many_steps_all_microbatches_and_stages_meet() -> None:
    config = recipe(6, 4, 0.5)
    drawn = [routes(config, step) for step in range(200)]
    for place in range(4):
        assert {stage for step in drawn for stage in step[place]} == set(range(7))
    hops = {(a, b) for step in drawn for route in step for a, b in pairwise(route)}
    assert {(a, b) for a in range(1, 7) for b in range(a + 1, min(a + 4, 7))} <= hops


def test_some_routes_swap_neighbours_if_allowed() -> None:
    def swapped(config: RunConfig) -> int:
        drawn = [route for step in range(20) for route in routes(config, step)]
        return sum(list(route[1:-1]) != sorted(route[1:-1]) for route in drawn)

    assert swapped(recipe(6, 12, 0.33, swaps=0)) == 0
    assert 0 < swapped(recipe(6, 12, 0.33, swaps=1)) < 240


def test_without_skips_and_swaps_routing_is_full() -> None:
    assert routes(recipe(5, 7, 0.0, swaps=0), 3) == routes(recipe(5, 7, 0.0, kind="full"), 3)


@pytest.mark.parametrize(("stages", "skip", "jump"), [(8, 0.5, 4), (10, 0.5, 4), (12, 0.33, 4), (4, 0.5, 2)])
def test_every_cycle_of_sets_can_be_completed(stages: int, skip: float, jump: int) -> None:
    """Drawing the first half of the stages first would put the second half out of reach."""
    config = recipe(stages, 2 * stages, skip, jump=jump)
    for step in range(50):
        assert len(set(used(config, step))) == 1


def test_a_jump_too_short_for_so_few_visits_is_refused() -> None:
    with pytest.raises(UserError, match=r"routing\.max_jump = 2: .*raise it, or lower routing\.skip"):
        routes(recipe(8, 8, 0.8, jump=2), 0)


@pytest.mark.parametrize(
    ("stages", "skip", "wanted"),
    [(5, 0.33, 3), (7, 0.25, 5), (3, 0.25, 2), (4, 0.0, 4), (4, 0.5, 2), (6, 0.34, 4), (1, 0.9, 1), (10, 0.99, 1)],
)
def test_visits_are_rounded_and_at_least_one(stages: int, skip: float, wanted: int) -> None:
    assert visits_per_microbatch(stages, skip) == wanted


@settings(max_examples=200)
@given(st.integers(1, 30), st.floats(0, 0.999))
def test_visits_are_within_half_a_stage(stages: int, skip: float) -> None:
    visits = visits_per_microbatch(stages, skip)
    assert abs(visits - (1 - skip) * stages) <= 0.5 or visits == 1


@pytest.mark.parametrize(
    ("walk", "swaps", "jump", "expected"),
    [
        ([1, 2, 3], 0, 1, ""),
        ([3], 0, 3, ""),
        ([4, 8], 0, 4, ""),
        ([2, 1, 4, 3], 2, 2, ""),
        ([1, 3, 2, 4], 1, 2, ""),
        ([1, 2, 2], 2, 4, "visits stage 2 twice"),
        ([2, 1, 2], 2, 4, "visits stage 2 twice"),
        ([1, 3, 2, 1], 2, 4, "visits stage 1 twice"),
        ([5], 2, 4, "jumps from stage 0 to stage 5, more than 4 places"),
        ([2, 1, 5], 2, 2, "jumps from stage 2 to stage 5, more than 2 places"),
        ([3, 1], 2, 4, "goes back from stage 3 to stage 1, more than one place"),
        ([4, 3, 2], 2, 4, "goes back from stage 4 to stage 2, more than one place"),
        ([2, 1, 4, 3], 1, 4, "goes back 2 times, more than 1"),
        ([2, 1], 0, 4, "goes back 1 times, more than 0"),
    ],
)
def test_disorder_is_described(walk: list[int], swaps: int, jump: int, expected: str) -> None:
    assert cc3_violation(walk, swaps, jump) == expected
