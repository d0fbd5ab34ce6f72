"""Dividing layers among unequal machines: as good as any division, found by exhaustive search."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.runtime.prediction.layer_division import LayerCost, WorkerCapacity, divide
from planaria.runtime.preparation.requirements import layer_loads, stage_work

machine = st.builds(
    WorkerCapacity,
    st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0, 7.0]),
    st.integers(0, 7),
    st.sampled_from([True, True, False]),
)


def slowest(sizes: tuple[int, ...], ends: float, machines: list[WorkerCapacity]) -> float:
    """Return the time of the slowest stage in the best placement; infinite if none is possible."""
    ways = permutations(machines, len(sizes) + 1)
    return min((worst(sizes, ends, way) for way in ways), default=float("inf"))


def worst(sizes: tuple[int, ...], ends: float, way: tuple[WorkerCapacity, ...]) -> float:
    last, *blocks = way
    if not last.ends or any(size > m.most for size, m in zip(sizes, blocks, strict=True)):
        return float("inf")
    return max(last.layer_s * ends, *(size * m.layer_s for size, m in zip(sizes, blocks, strict=True)))


def placed(sizes: list[int], ends: float, machines: list[WorkerCapacity]) -> float:
    """Return the time of the slowest stage where larger stages take faster machines first, as the controller does."""
    free, found = sorted(machines, key=lambda m: m.layer_s), []
    for size in sorted([*sizes, ends], reverse=True):
        is_ends = size == ends and ends not in sizes
        fit = next((m for m in free if (m.ends if is_ends else m.most >= size)), None)
        if fit is None:
            return float("inf")
        free.remove(fit)
        found.append(size * fit.layer_s)
    return max(found)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3), st.integers(0, 4), st.sampled_from([0.25, 1.5, 4.5]), st.lists(machine, min_size=2, max_size=5)
)
def test_no_division_has_a_faster_slowest_stage(
    stages: int, more: int, ends: float, machines: list[WorkerCapacity]
) -> None:
    layers = stages + more
    all_sizes = (c for c in combinations_with_replacement(range(1, layers + 1), stages) if sum(c) == layers)
    best = min(slowest(sizes, ends, machines) for sizes in all_sizes)
    if best == float("inf"):
        with pytest.raises(UserError, match="have room for"):
            divide([LayerCost()] * layers, stages, ends, machines)
        return
    found = divide([LayerCost()] * layers, stages, ends, machines)
    assert len(found) == stages and sum(found) == layers and min(found) >= 1
    assert found == sorted(found, reverse=True)
    assert slowest(tuple(found), ends, machines) == pytest.approx(best)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(0, 12), st.sampled_from([0.25, 1.5, 4.5]), st.data())
def test_the_controllers_rule_is_optimal_with_enough_room(stages: int, more: int, ends: float, data: Any) -> None:
    pace = st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0, 7.0])
    machines = [WorkerCapacity(s, 99) for s in data.draw(st.lists(pace, min_size=stages + 1, max_size=stages + 2))]
    sizes = divide([LayerCost()] * (stages + more), stages, ends, machines)
    assert placed(sizes, ends, machines) == pytest.approx(slowest(tuple(sizes), ends, machines))


load = st.builds(LayerCost, st.sampled_from([0.5, 1.0, 2.0, 5.0]), st.sampled_from([0.5, 1.0, 3.0]))


def slowest_of(loads: list[LayerCost], counts: list[int], ends: float, machines: list[WorkerCapacity]) -> float:
    """Return the time of the slowest stage of consecutive layers in the best placement."""
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    parts = [loads[first:last] for first, last in pairwise(bounds)]

    def worst_of(way: tuple[WorkerCapacity, ...]) -> float:
        last, *blocks = way
        if not last.ends or any(sum(one.size for one in p) > m.most for p, m in zip(parts, blocks, strict=True)):
            return float("inf")
        times = (sum(one.work for one in part) * m.layer_s for part, m in zip(parts, blocks, strict=True))
        return max(last.layer_s * ends, *times)

    return min((worst_of(way) for way in permutations(machines, len(counts) + 1)), default=float("inf"))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(load, min_size=3, max_size=7),
    st.sampled_from([0.25, 4.5]),
    st.lists(machine, min_size=2, max_size=5),
)
def test_no_division_of_unequal_layers_has_a_faster_slowest_stage(
    stages: int, loads: list[LayerCost], ends: float, machines: list[WorkerCapacity]
) -> None:
    cuts = ((0, *inner, len(loads)) for inner in combinations(range(1, len(loads)), stages - 1))
    all_counts = [[last - first for first, last in pairwise(cut)] for cut in cuts]
    best = min(slowest_of(loads, counts, ends, machines) for counts in all_counts)
    if best == float("inf"):
        with pytest.raises(UserError, match="have room for"):
            divide(loads, stages, ends, machines)
        return
    found = divide(loads, stages, ends, machines)
    assert len(found) == stages and sum(found) == len(loads) and min(found) >= 1
    assert slowest_of(loads, found, ends, machines) == pytest.approx(best)


def test_a_stage_of_heavy_layers_gets_fewer() -> None:
    dense_first = [LayerCost(), LayerCost(), *[LayerCost(4.0, 6.0)] * 4]
    assert divide(dense_first, 3, 0.5, [WorkerCapacity(1.0, 99)] * 4) == [3, 2, 1]
    paces = [WorkerCapacity(1.0, 99), WorkerCapacity(2.0, 99), WorkerCapacity(4.0, 99)]
    assert divide(dense_first, 2, 0.5, paces) == [3, 3]
    with pytest.raises(UserError, match=r"room for 13 of 26 layers in 2 stages"):
        divide(dense_first, 2, 0.5, [WorkerCapacity(1.0, 6), WorkerCapacity(1.0, 7), WorkerCapacity(1.0, 0)])


def test_layers_of_a_mixture_count_by_their_own_work_and_size() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from planaria.models.transformers.check import shrink_config
    from planaria.models.transformers.recipe_section import model_section
    from planaria.models.transformers.skeleton import read_config

    whole = CONFIG_MAPPING["deepseek_v3"]().get_text_config().to_dict() | {"model_type": "deepseek_v3"}
    values = shrink_config(read_config(whole, "config.json")) | {"first_k_dense_replace": 2, "intermediate_size": 1024}
    model = model_section(values, "config.json") | {"context": 16}
    config = RunConfig.model_validate({"model": model, "pipeline": {"stages": 2, "layers": "auto"}})
    first, second, third, fourth = layer_loads(config)
    assert first == second == LayerCost() and third == fourth and third.work < 0.9 and third.size < 0.9
    assert stage_work(config)[1:] == pytest.approx([2.0, 2 * third.work])
    assert divide(layer_loads(config), 2, 0.1, [WorkerCapacity(1.0, 9)] * 3) in ([1, 3], [2, 2])
    assert stage_work(RunConfig())[1:] == [1.0] * 4
