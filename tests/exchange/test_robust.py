"""Robust rules: against formulas written out, what changes nothing, how far liars get, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.errors import UserError
from planaria.exchange import exchange
from planaria.exchange.base import Outer
from planaria.exchange.lab import Replica, meet
from planaria.exchange.robust import RULES, robust_of
from planaria.exchange.robust.combining import combine
from planaria.exchange.robust.mixing import mixing

ALL = sorted(RULES.shipped)
N, F = 9, 2


def vectors(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


def value(rule: str, x: Tensor, liars: int = F, mix: str = "none", draw: int = 0, **options: object) -> Tensor:
    return combine(RULES.make(rule, {"liars": liars, **options}), list(x), mix, draw).value  # type: ignore[arg-type]


# ---- the formulas, on whole vectors and one member at a time


def krum_scores(x: Tensor, f: int) -> list[float]:
    n = len(x)
    return [sum(sorted(float((x[i] - x[j]).square().sum()) for j in range(n) if j != i)[: n - f - 2]) for i in range(n)]


def written(rule: str, x: Tensor, f: int) -> Tensor:
    n = len(x)
    ordered = torch.tensor([sorted(column) for column in x.T.tolist()], dtype=x.dtype)
    if rule == "median":
        return (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    if rule == "trimmed_mean":
        return ordered[:, f : n - f].sum(dim=1) / (n - 2 * f)
    if rule == "krum":
        scores = krum_scores(x, f)
        return x[scores.index(min(scores))]
    if rule == "multikrum":
        scores = krum_scores(x, f)
        best = sorted(range(n), key=lambda i: scores[i])[: n - f]
        return x[best].mean(dim=0)
    if rule == "geometric_median":
        z = x.mean(dim=0)
        for _ in range(8):
            w = torch.tensor([1 / max(1e-6, float((row - z).norm())) for row in x], dtype=x.dtype)
            z = (w.unsqueeze(1) * x).sum(dim=0) / w.sum()
        return z
    u = (x / x.norm(dim=1, keepdim=True)).T  # d × n
    w = torch.ones(n, dtype=x.dtype)
    for _ in range(5):
        y = torch.linalg.svd(u * w, full_matrices=False).U[:, : (n + 2) // 2]
        w = (1 - (y.T @ u).square().sum(dim=0).clamp(max=1) + 1e-7) ** -0.25
    return x.norm(dim=1).median() / n * (y @ (y.T @ u)).sum(dim=1)


@pytest.mark.parametrize("rule", ALL)
@settings(max_examples=30)
@given(n=st.integers(7, 12), d=st.integers(20, 60), seed=st.integers(0, 10**6))
def test_a_rule_is_its_formula(rule: str, n: int, d: int, seed: int) -> None:
    x = vectors(n, d, seed)
    found, expected = value(rule, x), written(rule, x, F)
    assert float((found - expected).norm() / expected.norm()) < (1e-9 if rule != "flag" else 1e-7)


@pytest.mark.parametrize(
    ("rule", "mix"),
    # After mixing, members with the same nearest ones are equal, and Krum may choose any of equal scores.
    [(rule, mix) for rule in ALL for mix in ("none", "nnm") if (rule, mix) != ("krum", "nnm")],
)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_members_does_not_matter(rule: str, mix: str, seed: int) -> None:
    x = vectors(N, 20, seed)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    assert float((value(rule, x, mix=mix) - value(rule, x[order], mix=mix)).norm()) < 1e-7


@pytest.mark.parametrize("rule", [rule for rule in ALL if rule != "flag"])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_what_moves_all_moves_the_value_alike(rule: str, seed: int) -> None:
    x, shift = vectors(N, 20, seed), 10 * vectors(1, 20, seed + 1)
    assert float((value(rule, x + shift) - value(rule, x) - shift).norm()) < 1e-8


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.integers(0, N - 1))
def test_flag_looks_at_directions_alone(seed: int, scale: float, which: int) -> None:
    x = vectors(N, 30, seed)
    longer = x.clone()
    longer[which] *= scale
    one, other = value("flag", x), value("flag", longer)
    assert float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > 1 - 1e-9


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("mix", ["none", "nnm"])
@pytest.mark.parametrize("power", [1, 5, 10, 20, 30])
def test_liars_far_away_get_nowhere(rule: str, mix: str, power: int) -> None:
    for seed in range(5):
        honest = vectors(N - F, 20, seed)
        lies = 10.0**power * torch.nn.functional.normalize(vectors(F, 20, seed + 100), dim=1)
        lies[1] = lies[0]  # they agree with each other
        found = value(rule, torch.cat([lies, honest]), mix=mix)
        centre = honest.mean(dim=0)
        radius = float((honest - centre).norm(dim=1).max())
        if rule in ("median", "trimmed_mean") and mix == "none":
            assert bool((found >= honest.amin(dim=0)).all() and (found <= honest.amax(dim=0)).all())
        assert float((found - centre).norm()) < 3 * radius


def test_krum_chooses_who_is_there_and_multi_krum_their_mean() -> None:
    x = vectors(N, 10, 3)
    found = combine(RULES.make("krum", {"liars": F}), list(x))
    assert found.coefficients is not None and sorted(found.coefficients.tolist()) == [0.0] * (N - 1) + [1.0]
    found = combine(RULES.make("multikrum", {"liars": F}), list(x))
    assert found.coefficients is not None and sorted(found.coefficients.tolist())[F:] == pytest.approx(
        [1 / (N - F)] * (N - F)
    )


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(4, 13), st.integers(0, 99))
def test_mixing_is_a_mean_of_few_and_leaves_the_mean_of_buckets_of_two(seed: int, n: int, draw: int) -> None:
    x = vectors(n, 6, seed)
    gram, f = x @ x.T, 1
    near = mixing("nnm", gram, f, draw)
    assert near.shape == (n, n) and bool(((near > 0).sum(dim=1) == n - f).all())
    for i, row in enumerate(near):
        apart = (x - x[i]).norm(dim=1)
        assert float(apart[row > 0].max()) <= float(apart[row == 0].min()) + 1e-9, "the nearest"
    buckets = mixing("bucketing", gram, f, draw)
    assert buckets.shape == (-(-n // 2), n) and bool(((buckets > 0).sum(dim=0) == 1).all()), "each in one"
    assert torch.equal(buckets, mixing("bucketing", gram, f, draw))
    assert all(float(m.sum()) == pytest.approx(1) for m in (*near, *buckets))


def test_mixing_changes_the_vectors_that_a_rule_of_inner_products_sees() -> None:
    x = vectors(N, 12, 5)
    for mix, rule in itertools.product(("nnm", "bucketing"), ("multikrum", "geometric_median", "median")):
        matrix = mixing(mix, x @ x.T, 1, 7)  # type: ignore[arg-type]
        expected = value(rule, matrix @ x, liars=1)
        assert float((value(rule, x, liars=1, mix=mix, draw=7) - expected).norm()) < 1e-9


def test_chunks_are_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = vectors(N, 100, 8)
    whole = {rule: value(rule, x) for rule in ALL}
    monkeypatch.setattr("planaria.exchange.robust.combining._CHUNK", 7)
    assert all(float((value(rule, x) - whole[rule]).norm()) < 1e-9 for rule in ALL)


# ---- as an exchange


def replicas(n: int, spoilt: dict[int, float]) -> dict[int, Replica]:
    return {
        member: Replica(
            {
                "w": torch.full((5, 3), spoilt[member])
                if member in spoilt
                else vectors(1, 15, member).float().view(5, 3)
            },
            Outer(),
        )
        for member in range(n)
    }


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("said", ["multikrum", "nnm:median", "geometric_median", "flag", "trimmed_mean", "ef14:8bits"])
def test_one_liar_steers_nobody(said: str, lie: float) -> None:
    compress, rule = ("ef14:8bits", "multikrum") if "bits" in said else ("", said)
    made = exchange(ExchangeConfig(replicas=7, robust=rule, compress=compress))
    of = replicas(7, {2: lie})
    honest = torch.stack([replica.fast["w"] for member, replica in of.items() if member != 2])
    meet(made, of, 0, 0)
    values = [replica.fast["w"] for replica in of.values()]
    assert all(torch.equal(found, values[0]) for found in values), "all go on alike"
    assert float((values[0] - honest.mean(dim=0)).norm()) < 3 * float(
        (honest - honest.mean(dim=0)).flatten(1).norm(dim=1).max()
    )


def test_more_liars_than_the_rule_bears_are_told_of() -> None:
    made = exchange(ExchangeConfig(replicas=5, robust="multikrum"))
    with pytest.raises(
        ValueError,
        match=r"what replica 0 says is of no use: its blocking part: not all of its numbers are finite; .*bears 1",
    ):
        meet(made, replicas(5, dict.fromkeys(range(4), float("nan"))), 0, 0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("multykrum", r"exchange\.robust\.rule = 'multykrum': no such choice; did you mean 'multikrum'\?"),
        ({"rule": "krum", "liars": 2}, r"needs exchange\.replicas = 7 or more, and here are 5; lower liars"),
        ("bucketing:median", r"needs exchange\.replicas = 5 or more"),
        ({"rule": "median", "mix": "nmn"}, r"exchange\.robust\.mix = 'nmn': no such choice; did you mean 'nnm'\?"),
        ({"rule": "median", "rounds": 2}, r"exchange\.robust\.rounds: no option of 'median'"),
        ({"liars": 1}, "give rule, a name"),
        ({"rule": "flag", "liars": -1}, r"exchange\.robust\.liars = -1"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(said: object, told: str) -> None:
    with pytest.raises(UserError, match=told):
        robust_of(said, 4 if said == "bucketing:median" else 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["diloco", "streaming_diloco", "noloco", "pair_mean"])
def test_a_rule_is_for_exchanges_in_which_nobody_is_missing(kind: str) -> None:
    with pytest.raises(UserError, match=r"members may be missing.*take exchange\.kind = 'allreduce'"):
        exchange(ExchangeConfig(replicas=5, kind=kind, robust="median"))
    with pytest.raises(UserError, match="'local' makes no one value of several"):
        exchange(ExchangeConfig(replicas=5, kind="local", robust="median"))
    with pytest.raises(UserError, match=r"beside estimates.*take ef14"):
        exchange(ExchangeConfig(replicas=5, robust="median", compress="ef21:top1%"))
