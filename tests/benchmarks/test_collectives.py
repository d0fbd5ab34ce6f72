"""Collectives: closed-form times of equal replicas, and general bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.exchange import COLLECTIVES, ReplicaLinks, everyone, pairs, ring, tree
from hypothesis import given
from hypothesis import strategies as st

P, B, L = 1000.0, 50.0, 0.25
"""bytes, bytes per second, seconds"""


def links(n: int, rate: float = B, latency_s: float = L, sigma: float = 0.0, seed: int = 0) -> ReplicaLinks:
    return ReplicaLinks(np.full(n, rate), latency_s, sigma, np.random.default_rng(seed))


@pytest.mark.parametrize("n", [2, 3, 4, 8, 13])
def test_equal_replicas_take_the_closed_form_times(n: int) -> None:
    ready = np.zeros(n)
    assert ring(ready, P, links(n)) == pytest.approx(2 * (n - 1) * (P / n / B + L))
    levels, down = 2 * math.ceil(math.log2(n)), tree(ready, P, links(n)).max()  # fewer if some have no partner
    assert down == pytest.approx(levels * (P / B + L)) if n.bit_count() == 1 else down <= levels * (P / B + L)
    assert everyone(ready, P, links(n)) == pytest.approx((n - 1) * P / B + L)
    together = [range(n)]
    assert pairs(ready, P, links(n), together) == pytest.approx((n - 1) * P / B + L)


def test_a_single_member_does_not_wait_and_a_pair_waits_for_each_other() -> None:
    done = pairs(np.array([0.0, 5.0, 1.0]), P, links(3), [(0, 1), (2,)])
    assert done.tolist() == [5.0 + P / B + L, P / B + L, 1.0]


@given(
    st.sampled_from(sorted(COLLECTIVES)),
    st.lists(st.floats(0, 100), min_size=1, max_size=20),
    st.floats(0, 2),
    st.integers(0, 99),
)
def test_a_sum_needs_all_replicas_and_is_monotonic_in_readiness(
    name: str, ready: list[float], sigma: float, seed: int
) -> None:
    n, late = len(ready), np.array(ready)
    done = COLLECTIVES[name](late, P, links(n, sigma=sigma, seed=seed))
    assert done.shape == late.shape and (done >= late.max()).all()
    later = COLLECTIVES[name](late + np.eye(n)[0] * 7.0, P, links(n, sigma=sigma, seed=seed))
    assert (later >= done - 1e-9).all() and (later <= done + 7.0 + 1e-9).all()


def test_the_slowest_link_sets_the_pace_of_a_ring() -> None:
    rate = np.array([B, B, B / 10, B])
    slow = ReplicaLinks(rate, 0.0, 0.0, np.random.default_rng(0))
    usual = ring(np.zeros(4), P, links(4, latency_s=0.0)).max()
    assert 7 * usual < ring(np.zeros(4), P, slow).max() <= 10 * usual


@given(st.lists(st.lists(st.floats(0, 9), min_size=5, max_size=5), min_size=1, max_size=4))
def test_trials_of_a_tree_are_trees(ready: list[list[float]]) -> None:
    several = tree(np.array(ready), P, links(5))
    assert several.tolist() == [tree(np.array(one), P, links(5)).tolist() for one in ready]
