"""Dividing layers among unequal machines: as good as any division, found by exhaustive search."""

from __future__ import annotations

from itertools import combinations_with_replacement, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.runtime.engine.profiling import Machine, divide

machine = st.builds(
    Machine, st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0, 7.0]), st.integers(0, 7), st.sampled_from([True, True, False])
)


def slowest(sizes: tuple[int, ...], ends: float, machines: list[Machine]) -> float:
    """Return the time of the slowest stage in the best placement; infinite if none is possible."""
    ways = permutations(machines, len(sizes) + 1)
    return min((worst(sizes, ends, way) for way in ways), default=float("inf"))


def worst(sizes: tuple[int, ...], ends: float, way: tuple[Machine, ...]) -> float:
    last, *blocks = way
    if not last.ends or any(size > m.most for size, m in zip(sizes, blocks, strict=True)):
        return float("inf")
    return max(last.layer_s * ends, *(size * m.layer_s for size, m in zip(sizes, blocks, strict=True)))


def placed(sizes: list[int], ends: float, machines: list[Machine]) -> float:
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
def test_no_division_has_a_faster_slowest_stage(stages: int, more: int, ends: float, machines: list[Machine]) -> None:
    layers = stages + more
    all_sizes = (c for c in combinations_with_replacement(range(1, layers + 1), stages) if sum(c) == layers)
    best = min(slowest(sizes, ends, machines) for sizes in all_sizes)
    if best == float("inf"):
        with pytest.raises(UserError, match="have room for"):
            divide(layers, stages, ends, machines)
        return
    found = divide(layers, stages, ends, machines)
    assert len(found) == stages and sum(found) == layers and min(found) >= 1
    assert found == sorted(found, reverse=True)
    assert slowest(tuple(found), ends, machines) == pytest.approx(best)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(0, 12), st.sampled_from([0.25, 1.5, 4.5]), st.data())
def test_the_controllers_rule_is_optimal_with_enough_room(stages: int, more: int, ends: float, data: Any) -> None:
    pace = st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0, 7.0])
    machines = [Machine(s, 99) for s in data.draw(st.lists(pace, min_size=stages + 1, max_size=stages + 2))]
    sizes = divide(stages + more, stages, ends, machines)
    assert placed(sizes, ends, machines) == pytest.approx(slowest(tuple(sizes), ends, machines))


def test_layers_follow_speed_and_memory() -> None:
    assert divide(30, 4, 2.0, [Machine(1.0, 30)] * 5) == [8, 8, 7, 7]
    assert divide(28, 4, 2.0, [Machine(s, 28) for s in (1.0, 1.01, 1.02, 0.99, 1.03)]) == [7, 7, 7, 7]
    assert divide(21, 3, 1.0, [Machine(1.0, 21), Machine(1.0, 21), Machine(2.0, 21), Machine(9.0, 21)]) == [9, 8, 4]
    fast_and_small = Machine(0.1, 3, ends=False)
    assert divide(12, 2, 1.0, [fast_and_small, Machine(1.0, 12), Machine(1.0, 12)]) == [9, 3]
