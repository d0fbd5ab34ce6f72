"""Random groups, and the bound on γ: against an exact recursion, against simulated replicas, and in recipes."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from benchmarks.exchange_in_process import Replica, exchange_once, replicas
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.exchange.gossip import contraction, largest_gamma, random_groups
from planaria.exchange.noloco import NoLoCo
from support.lab_models import KINDS, make

MEMBERS = st.lists(st.integers(-5, 10**12), unique=True, min_size=1, max_size=40)


@given(MEMBERS, st.integers(2, 7), st.integers(0, 10**6), st.integers(0, 2**40))
def test_groups_partition_the_members_into_as_few_as_possible(
    members: list[int], size: int, round: int, seed: int
) -> None:
    groups = random_groups(round, members, size, seed)
    assert sorted(member for group in groups for member in group) == sorted(members)
    assert len(groups) == -(-len(members) // size)
    assert max(map(len, groups)) <= size and max(map(len, groups)) - min(map(len, groups)) <= 1
    assert all(list(group) == sorted(group) for group in groups)


@pytest.mark.slow
@given(MEMBERS, st.randoms(use_true_random=False), st.integers(0, 99), st.sampled_from(KINDS))
def test_groups_do_not_depend_on_the_order_of_members(
    members: list[int], shuffler: object, round: int, kind: str
) -> None:
    other = list(members)
    shuffler.shuffle(other)
    made = make(kind)
    assert made.groups(round, members, 7) == made.groups(round, other, 7)


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_with_an_odd_number_one_member_in_turn_is_alone(count: int) -> None:
    lonely = [[g for g in random_groups(round, range(count), 2, 0) if len(g) == 1] for round in range(200)]
    assert {len(alone) for alone in lonely} == {count % 2}
    if count % 2:
        times = Counter(alone[0] for alone in lonely)
        assert len(times) == count and max(times.values()) < 2 * 200 / count


def test_groups_change_with_the_round_and_the_seed() -> None:
    drawn = [tuple(random_groups(round, range(32), 2, seed)) for round in range(20) for seed in range(5)]
    assert len(set(map(frozenset, drawn))) == len(drawn)
    assert random_groups(3, range(6), 2, 1) == [(0, 1), (2, 4), (3, 5)], "golden: the same on every platform"
    with pytest.raises(ValueError, match=r"listed twice: \[1, 1, 2\]"):
        random_groups(0, [1, 2, 1], 2, 0)
    with pytest.raises(ValueError, match="groups of 0"):
        random_groups(0, [1, 2], 0, 0)


def test_every_pair_meets_equally_often() -> None:
    rounds = 6000
    met = Counter(group for round in range(rounds) for group in random_groups(round, range(6), 2, 3))
    expected = rounds / 5
    assert set(met) == set(combinations(range(6), 2))
    # Five standard deviations of a binomial count.
    assert all(abs(times - expected) < 5 * (expected * 0.8) ** 0.5 for times in met.values())


@pytest.mark.parametrize("kind", KINDS)
def test_some_exchanges_have_one_group_and_none_without_members(kind: str) -> None:
    assert make(kind).groups(0, [], 0) == []
    if kind in ("allreduce", "diloco", "streaming_diloco"):
        assert make(kind).groups(4, [9, 2, 5], 0) == [(2, 5, 9)]


def growth(alpha: float, gamma: float, c: float) -> float:
    """Return the largest eigenvalue of the recursion of δ ← αδ − γPd, d ← d + δ in E|d|², E⟨d, δ⟩, E|δ|²."""
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


def test_the_bound_for_pairs_approaches_its_limit_for_many_replicas() -> None:
    for alpha in (0.0, 0.3, 0.5, 0.7, 0.9):
        assert largest_gamma(alpha, 0.5) == pytest.approx(2 * (1 - alpha**2))
    assert contraction(8, 2) == pytest.approx(8 / (2 * 7))


@pytest.mark.slow
@pytest.mark.parametrize(("members", "group"), [(6, 2), (7, 2), (7, 3), (8, 3), (5, 5)])
def test_drawn_groups_contract_as_stated(members: int, group: int) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(("share", "grows"), [(0.7, False), (1.4, True)])
def test_simulated_replicas_obey_the_bound(share: float, grows: bool) -> None:
    alpha, members = 0.5, 16
    gamma = share * largest_gamma(alpha, contraction(members, 2))
    made = NoLoCo.model_construct(alpha=alpha, beta=0.0, gamma=gamma)
    of = replicas(made, {"w": torch.zeros(200)}, members)
    for member, replica in of.items():
        replica.outer = made.start({"w": torch.randn(200, generator=torch.Generator().manual_seed(member))})
    start = disagreement(of)
    for round in range(80):
        exchange_once(made, of, round, seed=1)
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
def test_larger_groups_allow_a_larger_gamma(group: int) -> None:
    bound = largest_gamma(0.5, 1 - 1 / group)
    make("noloco", gamma=0.999 * bound, group=group)
    with pytest.raises(UserError, match=f"in groups of {group}"):
        make("noloco", gamma=1.001 * bound, group=group)
