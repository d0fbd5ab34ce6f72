"""Weights for the worst domain: the certificate by independent code, and the properties of the solution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.lab.experts.minimax_weights import MAX_BOUND_STEPS, Solver, certificate, make_problem, worst_domain
from support.certificate_by_hand import gap, loss
from support.random_text_scores import random_scores

FLOOR = 0.01
SOLVERS: list[Solver] = ["extragradient", "halpern"]


def distribution(draw: np.random.Generator, size: int, floor: float = 0.0) -> np.ndarray:
    return floor + (1 - size * floor) * draw.dirichlet(np.ones(size))


@pytest.mark.parametrize("seed", range(4))
def test_the_certificate_matches_independent_code(seed: int) -> None:
    """From w and q alone, at random values and at the solution."""
    texts, draw = random_scores(80, 4, 3, seed), np.random.default_rng(seed)
    rows, known = [found.tolist() for found in texts.values()], make_problem(texts, FLOOR)
    solved = worst_domain(known)
    for w, q in ((distribution(draw, 4, FLOOR), distribution(draw, 3)), (solved.w, solved.q)):
        found = certificate(known, w, q)
        assert found.value == pytest.approx(max(loss(one, w) for one in rows), abs=1e-9)
        assert found.gap == pytest.approx(gap(rows, w.tolist(), q.tolist(), FLOOR, MAX_BOUND_STEPS), abs=1e-9)
    assert certificate(known, solved.w, solved.q) == solved.proof


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 4))
def test_no_weights_are_below_the_bound(seed: int, experts: int, domains: int) -> None:
    """For any prices, the gap is not negative and the bound holds for all weights."""
    draw = np.random.default_rng(seed)
    known = make_problem(random_scores(20 * domains, experts, domains, seed), FLOOR)
    q = distribution(draw, domains)
    found = certificate(known, distribution(draw, experts, FLOOR), q)
    assert found.gap >= 0
    for v in (*np.eye(experts), *(distribution(draw, experts) for _ in range(20))):
        assert known.losses(v).max() >= known.losses(v) @ q - 1e-12 >= found.bound - 1e-10


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(3))
def test_the_solution_is_optimal(seed: int, solver: Solver) -> None:
    """Uniform weights, single experts, and weights off by .05 are worse or have a larger gap."""
    texts, draw = random_scores(1024, 4, 3, seed), np.random.default_rng(seed)
    known = make_problem(texts, FLOOR)
    found = worst_domain(known, tolerance=3e-3, solver=solver)
    assert found.certified and found.proof.residual <= 3e-3 and 0 <= found.proof.gap < 5e-3
    assert found.w.min() >= FLOOR - 1e-12 and found.w.sum() == pytest.approx(1) and found.q.sum() == pytest.approx(1)
    rivals = [np.full(4, 0.25), *(FLOOR + (1 - 4 * FLOOR) * np.eye(4))]
    worst = [max(loss(one.tolist(), w) for one in texts.values()) for w in rivals]
    assert found.proof.value <= min(worst) + found.proof.gap
    for _ in range(10):
        off = draw.normal(size=4)
        off -= off.mean()
        w = known.weights(known.without_floor(found.w + 0.05 * off / np.abs(off).max()))
        assert certificate(known, w, found.q).gap >= found.proof.gap


def test_both_solvers_find_the_same_weights() -> None:
    known = make_problem(random_scores(2048, 4, 3, 1), FLOOR)
    one, other = (worst_domain(known, 1e-3, solver=solver) for solver in SOLVERS)
    assert np.abs(one.w - other.w).max() < 5e-3
    assert one.proof.value == pytest.approx(other.proof.value, abs=1e-3)


def test_two_experts_for_two_mirrored_domains_get_equal_weights() -> None:
    """Each reads one domain with probability .8 and the other with .2; both prices are one half."""
    good, bad = math.log(0.8), math.log(0.2)
    texts = {"a": np.array([[good, bad]] * 3), "b": np.array([[bad, good]] * 5)}
    found = worst_domain(make_problem(texts, FLOOR), 1e-8)
    assert found.w.tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    assert found.q.tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    assert found.proof.value == pytest.approx(-math.log(0.5), abs=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_any_weights_are_optimal_for_equal_experts(solver: Solver) -> None:
    """The worst domain has the whole price; with equal domains too, the problem is constant."""
    for texts in ({"a": np.full((3, 3), -1.0), "b": np.full((4, 3), -2.0)}, {"a": np.full((3, 2), -2.0)}):
        found = worst_domain(make_problem(texts, FLOOR), solver=solver)
        assert found.certified and found.q[-1] == pytest.approx(1)
        assert found.proof.value == pytest.approx(2) and found.proof.gap == pytest.approx(0, abs=1e-9)


def test_a_domain_that_is_hard_for_all_has_the_whole_price() -> None:
    texts = random_scores(90, 3, 3, 0)
    texts["hopeless"] = texts["d1"] - 50
    found = worst_domain(make_problem(texts, FLOOR))
    assert dict(zip(texts, found.q, strict=True))["hopeless"] == pytest.approx(1)


def test_rows_of_a_thousand_nats_do_not_underflow() -> None:
    texts = {name: 900 * rows - 2000 for name, rows in random_scores(60, 3, 2, 2).items()}
    found = worst_domain(make_problem(texts, FLOOR))
    assert np.isfinite([found.proof.value, found.proof.bound]).all() and found.proof.gap >= 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_without_enough_passes_the_result_is_not_certified(solver: Solver) -> None:
    found = worst_domain(make_problem(random_scores(400, 4, 3, 0), FLOOR), 1e-9, passes=3, solver=solver)
    assert not found.certified and found.proof.gap > 0 and found.w.sum() == pytest.approx(1)


def test_invalid_problems_are_named() -> None:
    texts = random_scores(30, 3, 3, 0)
    for bad, floor, message in (
        ({**texts, "empty": np.zeros((0, 3))}, FLOOR, "domain 'empty' has no held-out text"),
        ({"one": np.zeros((4, 1))}, FLOOR, "there is only one expert"),
        (texts, 1 / 3, "floor = 0.333333 must be above 0 and below 1/3"),
        (texts, 0.0, "floor = 0 must be above 0"),
        ({**texts, "d1": np.vstack((texts["d1"], np.full((1, 3), -np.inf)))}, FLOOR, "domain 'd1', held-out text 10:"),
    ):
        with pytest.raises(UserError, match=message):
            make_problem(bad, floor)
