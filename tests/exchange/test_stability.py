"""The bound on γ: against an exact recursion, against replicas that really meet, and in what a recipe may say."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab_models import make

from planaria.common.errors import UserError
from planaria.exchange.lab import Replica, meet, replicas
from planaria.exchange.noloco import NoLoCo
from planaria.exchange.pairing import random_groups
from planaria.exchange.stability import contraction, largest_gamma


def growth(alpha: float, gamma: float, c: float) -> float:
    """Largest eigenvalue of the recursion in E|d|², E⟨d, δ⟩, E|δ|² that δ ← αδ − γPd, d ← d + δ comes to."""
    delta = np.array([c * gamma**2, -2 * alpha * gamma * c, alpha**2])  # E|δ'|²
    cross = np.array([-gamma * c, alpha, 0.0])  # E⟨d, δ'⟩
    square = np.array([1.0, 0.0, 0.0]) + 2 * cross + delta  # E|d'|²
    return float(np.abs(np.linalg.eigvals(np.stack([square, cross + delta, delta]))).max())


@given(st.floats(0.0, 0.97), st.integers(2, 300), st.integers(2, 9))
def test_below_the_bound_disagreement_shrinks_and_above_it_grows(alpha: float, members: int, group: int) -> None:
    bound = largest_gamma(alpha, contraction(members, group))
    assert growth(alpha, 0.99 * bound, contraction(members, group)) < 1.0
    assert growth(alpha, 1.01 * bound, contraction(members, group)) > 1.0


@given(st.floats(0.0, 0.99), st.integers(2, 500), st.integers(2, 9))
def test_very_many_replicas_are_the_worst_case(alpha: float, members: int, group: int) -> None:
    assert contraction(members, group) >= 1 - 1 / group - 1e-12
    assert largest_gamma(alpha, contraction(members, group)) >= largest_gamma(alpha, 1 - 1 / group) - 1e-9


def test_the_bound_for_pairs_of_very_many_is_twice_one_minus_the_squared_momentum() -> None:
    for alpha in (0.0, 0.3, 0.5, 0.7, 0.9):
        assert largest_gamma(alpha, 0.5) == pytest.approx(2 * (1 - alpha**2))
    assert contraction(8, 2) == pytest.approx(8 / (2 * 7))


@pytest.mark.parametrize(("members", "group"), [(6, 2), (7, 2), (7, 3), (8, 3), (5, 5)])
def test_groups_as_they_are_drawn_contract_by_what_is_said(members: int, group: int) -> None:
    direction = torch.linspace(-1, 1, members)
    within = []
    for round in range(3000):
        rest = direction.clone()
        for met in random_groups(round, range(members), group, 0):
            rest[list(met)] -= direction[list(met)].mean()
        within.append(rest.square().sum() / direction.square().sum())
    assert torch.stack(within).mean().item() == pytest.approx(contraction(members, group), abs=0.02)


def disagreement(of: dict[int, Replica]) -> float:
    return torch.stack([replica.outer["slow"]["w"] for replica in of.values()]).var(0).mean().item()


@pytest.mark.parametrize(("share", "grows"), [(0.7, False), (1.4, True)])
def test_replicas_that_really_meet_obey_the_bound(share: float, grows: bool) -> None:
    alpha, members = 0.5, 16
    gamma = share * largest_gamma(alpha, contraction(members, 2))
    made = NoLoCo.model_construct(alpha=alpha, beta=0.0, gamma=gamma)
    of = replicas(made, {"w": torch.zeros(200)}, members)
    for member, replica in of.items():
        replica.outer = made.start({"w": torch.randn(200, generator=torch.Generator().manual_seed(member))})
    start = disagreement(of)
    for round in range(80):
        meet(made, of, round, seed=1)
    assert (disagreement(of) > 10 * start) if grows else (disagreement(of) < start / 10)


@pytest.mark.parametrize("kind", ["noloco", "gasloc"])
def test_settings_that_drift_apart_are_refused_in_one_line(kind: str) -> None:
    with pytest.raises(UserError) as caught:
        make(kind, alpha=0.9)
    line = str(caught.value)
    assert "\n" not in line
    assert re.search(r"^exchange\.options: gamma = 0\.7 with alpha = 0\.9: .* = 0\.38; lower gamma or alpha$", line)
    make(kind, alpha=0.9, gamma=0.37)
    make(kind, alpha=0.5)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_larger_groups_bear_a_stronger_pull(group: int) -> None:
    bound = largest_gamma(0.5, 1 - 1 / group)
    make("noloco", gamma=0.999 * bound, group=group)
    with pytest.raises(UserError, match=f"in groups of {group}"):
        make("noloco", gamma=1.001 * bound, group=group)
