"""MoNNA: its formula written out, missing members, the influence of Byzantine ones, and refused settings."""

from __future__ import annotations

import pytest
import torch
from benchmarks.exchange_in_process import Replica, exchange_once, exchanged, replicas, settle
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.monna import MoNNA, nearest
from planaria.exchange.registry import make_exchange
from support.lab_models import SHAPES, apart, distance, drift, make, weights


def flat(of: dict[str, Tensor]) -> Tensor:
    return torch.cat([of[name].double().reshape(-1) for name in sorted(of)])


def written(half: dict[int, Tensor], me: int, keep: int) -> Tensor:
    """The mean of the models nearest to one's own, by their distances one by one."""
    order = sorted(half, key=lambda j: (float((half[j] - half[me]).norm()), j))
    return torch.stack([half[j] for j in order[:keep]]).mean(dim=0)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(3, 7), st.integers(1, 2), st.sampled_from([0.0, 0.6]), st.booleans(), st.integers(0, 99))
def test_rounds_follow_the_formula(count: int, byzantine: int, alpha: float, prefetch: bool, seed: int) -> None:
    made = MoNNA(byzantine=byzantine, alpha=alpha, prefetch=prefetch)
    of = apart(made, count, lambda member: weights(seed + member, 0.3))
    theta = {i: flat(r.fast) for i, r in of.items()}
    m = {i: torch.zeros_like(t) for i, t in theta.items()}
    for round in range(3):
        drift(of, round + seed)
        m = {i: alpha * m[i] + (1 - alpha) * (flat(of[i].fast) - theta[i]) for i in of}
        half = {i: theta[i] + m[i] for i in of}
        keep = count - byzantine if count > 2 * byzantine else 1
        theta = {i: written(half, i, keep) for i in of}
        exchange_once(made, of, round, seed=3)
        assert max(float((flat(of[i].fast) - theta[i]).abs().max()) for i in of) < 1e-5


def test_a_quorum_keeps_the_published_number() -> None:
    """n = 12, f = 2: of the first n − f − 1 = 9 that come and its own it keeps n − 2f = 8."""
    made = MoNNA(byzantine=2)
    assert [made.quorum(n) for n in (12, 3, 2)] == [9, 0, 0] and make("diloco").quorum(12) == 11
    of = apart(made, 12)
    received = exchanged(made, of, 0, 0)
    first = dict(list(received[3].items())[: made.quorum(12) + 1])
    assert 3 in first and len(first) == 10
    got, _ = made.settle(of[3].outer, of[3].fast, first, 3)
    half = {i: flat(of[i].fast) for i in first}
    assert float((flat(got) - written(half, 3, 8)).abs().max()) < 1e-6


def test_one_step_of_sgd_is_the_published_half_step() -> None:
    made = MoNNA(alpha=0.9)
    (replica,) = replicas(made, weights(0), 1).values()
    theta, m, gamma = flat(weights(0)), torch.zeros(186, dtype=torch.float64), 0.3
    for step in range(4):
        gradient = weights(step + 1)
        m = 0.9 * m + 0.1 * flat(gradient)
        theta = theta - gamma * m
        replica.fast = {name: tensor - gamma * gradient[name] for name, tensor in replica.fast.items()}
        replica = Replica(*made.settle(replica.outer, replica.fast, {0: made.update(replica.outer, replica.fast)}, 0))
        assert float((flat(replica.fast) - theta).abs().max()) < 1e-5


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("bad", [1e30, -1e3, float("nan"), float("inf")])
def test_byzantine_members_have_no_influence_and_the_others_converge(bad: float, bits: int) -> None:
    made = MoNNA(byzantine=2, bits=bits)
    of = apart(made, 9, lambda member: weights(member, 0.1))
    honest = [i for i in of if i not in (0, 4)]
    before = {i: flat(of[i].fast) for i in honest}
    for round in range(3):
        for i in (0, 4):
            of[i].fast = {name: torch.full(shape, bad) for name, shape in SHAPES.items()}
            of[i].outer = made.start(of[i].fast)
        exchange_once(made, of, round, seed=1)
    after = torch.stack([flat(of[i].fast) for i in honest])
    was = torch.stack(list(before.values()))
    assert float((after - after.mean(0)).norm()) < 0.1 * float((was - was.mean(0)).norm())
    assert float((after.mean(0) - was.mean(0)).norm()) < float((was - was.mean(0)).norm(dim=1).max())


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_member_with_too_few_updates_takes_its_own_half_step(alpha: float) -> None:
    made = MoNNA(byzantine=2, alpha=alpha)
    of = apart(made, 7)
    drift(of, 1)
    received = exchanged(made, of, 0, 0)
    few = {i: {j: update for j, update in received[i].items() if j in (i, 5, 6, 0)} for i in of}
    half = {i: flat(r.outer["slow"]) + (1 - alpha) * (flat(r.fast) - flat(r.outer["slow"])) for i, r in of.items()}
    settle(made, of, few)
    for i in of:
        assert float((flat(of[i].fast) - half[i]).abs().max()) < 1e-6


def test_the_first_of_equally_near_models_and_the_own_one_are_kept() -> None:
    updates = {i: torch.tensor([float(i % 2)]) for i in (7, 3, 5, 2, 4)}
    assert nearest(updates, 4, 2) == [2, 4] and nearest(updates, 4, 3) == [2, 3, 4] and nearest(updates, 4, 1) == [4]
    updates = {0: torch.tensor([float("nan")]), 1: torch.tensor([1.0]), 2: torch.tensor([9.0])}
    assert nearest(updates, 1, 3) == [1, 2] and nearest(updates, 0, 2) == [0]


def test_a_copy_has_its_donors_model_without_its_momentum() -> None:
    made = MoNNA(alpha=0.9)
    of = apart(made, 4)
    drift(of, 1)
    exchange_once(made, of, 0, seed=0)
    whole, copied = of[0].outer, of[0].outer.for_copy(made.parts)
    assert distance(dict(whole["momentum"]), {k: torch.zeros(s) for k, s in SHAPES.items()}) > 0
    assert copied["slow"] is whole["slow"] and not copied["momentum"]
    replica = Replica(dict(of[0].fast), copied)
    drift({0: replica}, 2)
    exchange_once(made, {0: replica, **{i: of[i] for i in (1, 2, 3)}}, 1, seed=0)
    assert replica.outer["momentum"]


@pytest.mark.parametrize(
    ("given_", "line"),
    [
        (
            {"replicas": 4, "options": {"byzantine": 2}},
            r"'monna': byzantine = 2 of exchange\.replicas = 4 needs 5 or more; l",
        ),
        ({"replicas": 7, "robust": "median"}, r"exchange\.robust: 'monna' already selects neighbours; remove"),
        ({"replicas": 7, "options": {"group": 3}}, r"exchange\.options\.group: no option of 'monna'"),
        ({"replicas": 7, "options": {"alpha": 1.0}}, r"exchange\.options\.alpha = 1"),
    ],
)
def test_invalid_settings_are_refused(given_: dict[str, object], line: str) -> None:
    options = Options(given_.pop("options", {}))
    with pytest.raises(UserError, match=line):
        make_exchange(ExchangeConfig(kind="monna", options=options, **given_))
