"""Robust rules: formulas written out, invariances, the influence of Byzantine members, and refused settings."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.exchange_in_process import Replica, exchange_once
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from benchmarks import exchange_in_process
from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Exchange, StageOuterState
from planaria.exchange.registry import make_exchange
from planaria.exchange.robust.base import GramRule, squared_distances
from planaria.exchange.robust.combining import combine, low_weight_members, mixing_matrix, rival_coefficients
from planaria.exchange.robust.coordinate import sorting_network, trimmed_mean
from planaria.exchange.robust.products import inner_products, iter_chunks, products
from planaria.exchange.robust.rules import RULES, make_robust_aggregator

ALL = sorted(RULES.shipped)
N, F = 9, 2


def vectors(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


def value(rule: str, x: Tensor, byzantine: int = F, mix: str = "none", draw: int = 0, **options: object) -> Tensor:
    return combine(RULES.make(rule, {"byzantine": byzantine, **options}), list(x), mix, draw).value


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
    if rule == "clipping":
        norms = [float(row.norm()) for row in x]
        tau = sorted(norms)[(n - 1) // 2]
        return torch.stack([row * min(1.0, tau / norm) for row, norm in zip(x, norms, strict=True)]).mean(dim=0)
    u = (x / x.norm(dim=1, keepdim=True)).T  # d × n
    w = torch.ones(n, dtype=x.dtype)
    for _ in range(5):
        y = torch.linalg.svd(u * w, full_matrices=False).U[:, : (n + 2) // 2]
        w = (1 - (y.T @ u).square().sum(dim=0).clamp(max=1) + 1e-7) ** -0.25
    return x.norm(dim=1).median() / n * (y @ (y.T @ u)).sum(dim=1)


STEPS = {"geometric_median": {"rounds": 8}, "clipping": {"rounds": 1}}
"""taken by :func:`written`"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rule", ALL)
@settings(max_examples=30)
@given(n=st.integers(7, 12), d=st.integers(20, 60), seed=st.integers(0, 10**6))
def test_a_rule_follows_its_formula(rule: str, n: int, d: int, seed: int) -> None:
    x = vectors(n, d, seed)
    found, expected = value(rule, x, **STEPS.get(rule, {})), written(rule, x, F)
    assert float((found - expected).norm() / expected.norm()) < 1e-9


def attacked(n: int, f: int, d: int, spread: float, strength: float, seed: int) -> tuple[Tensor, Tensor]:
    """n − f vectors about a unit vector, ``spread`` away; and all n, where f are −strength times the mean of these."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(n - f + 1, d, generator=generator, dtype=torch.float64) / d**0.5
    honest = torch.nn.functional.normalize(draw[:1], dim=1) + spread * draw[1:]
    return honest, torch.cat([honest, -strength * honest.mean(0).repeat(f, 1)])


def summed(x: Tensor, z: Tensor) -> float:
    """F(z) = Σ ‖x_j − z‖"""
    return float((x - z).norm(dim=1).sum())


def least_sum(x: Tensor) -> float:
    """min F, by SciPy's quasi-Newton method on √(‖x_j − z‖² + ε²) as ε falls, or at a member."""
    points, z = x.numpy(), x.mean(0).numpy()
    scale = float((x - x.mean(0)).norm(dim=1).mean())

    def smoothed(z: Any, epsilon: float) -> tuple[float, Any]:
        away = z - points
        norms = np.sqrt((away**2).sum(1) + epsilon**2)
        return float(norms.sum()), (away / norms[:, None]).sum(0)

    for power in range(1, 10 if scale else 1):
        z = minimize(smoothed, z, (scale * 10.0**-power,), "BFGS", jac=True, options={"gtol": 1e-12}).x
    return min(summed(x, torch.from_numpy(z)), *(summed(x, row) for row in x))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    n=st.integers(3, 16), data=st.data(), d=st.integers(1, 6), spread=st.sampled_from([0.0, 1e-3, 0.03, 0.3, 1.0, 3.0]),
    strength=st.sampled_from([-1.0, 1.0, 10.0, 1e4]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_the_geometric_median_has_the_least_summed_distance(
    n: int, data: st.DataObject, d: int, spread: float, strength: float, seed: int
) -> None:
    """For any number of byzantine below one half, some of them coincident, or all vectors on one line (d = 1)."""
    f = data.draw(st.integers(0, (n - 1) // 2))
    _, x = attacked(n, f, d, spread, strength, seed)
    x = x[x.norm(dim=1) <= 9 * x.norm(dim=1).median()] if strength > 9 else x  # longer ones are bounded before the rule
    scale = 10.0 ** data.draw(st.integers(-9, 9))
    found = value("geometric_median", scale * x, byzantine=0) / scale
    assert summed(x, found) <= least_sum(x) * (1 + 2e-6) + 1e-12


@pytest.mark.slow
@settings(max_examples=40)
@given(n=st.integers(3, 16), data=st.data(), seed=st.integers(0, 10**6), excess=st.sampled_from([0.0, 1e-5, 1e-3, 0.1]))
def test_the_geometric_median_converges_beside_a_member_that_is_almost_the_minimum(
    n: int, data: st.DataObject, seed: int, excess: float
) -> None:
    """Where Weiszfeld steps are slowest: m members at 0, on which the others pull with m(1 + excess) unit vectors."""
    m = data.draw(st.integers(1, (n - 1) // 2))
    generator = torch.Generator().manual_seed(seed)
    around = torch.randn(n - m, 5, generator=generator, dtype=torch.float64)
    along, low, high = torch.eye(5, dtype=torch.float64)[0], 0.0, 1e6

    def units(shift: float) -> Tensor:
        return torch.nn.functional.normalize(around - around.mean(0) + shift * along, dim=1)

    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float(units(middle).sum(0).norm()) < m * (1 + excess) else (low, middle)
    far = torch.randn(n - m, 1, generator=generator, dtype=torch.float64).exp()
    x = torch.cat([torch.zeros(m, 5, dtype=torch.float64), far * units(high)])
    assert summed(x, value("geometric_median", x, byzantine=0)) <= least_sum(x) * (1 + 2e-6)


@pytest.mark.parametrize(("n", "f"), [(5, 2), (9, 4), (15, 7), (15, 3), (8, 1)])
@pytest.mark.parametrize(
    ("rule", "spread"), [("geometric_median", 0.3), ("geometric_median", 0.03), ("clipping", 0.03)]
)
def test_the_value_follows_the_honest_majority_however_small_it_is(rule: str, n: int, f: int, spread: float) -> None:
    honest, x = attacked(n, f, 2000, spread, 10.0, seed=0)
    mean = honest.mean(0)
    assert float(value(rule, x, byzantine=f) @ mean / (mean @ mean)) > (0.4 if spread > 0.1 else 0.9)
    few = value(rule, x, byzantine=f, rounds=1)
    assert float(few @ mean / (mean @ mean)) < 0.9, "which one step does not"


def test_equal_vectors_and_pairs_yield_their_mean() -> None:
    for rule in ("geometric_median", "clipping"):
        assert torch.allclose(value(rule, torch.ones(5, 3, dtype=torch.float64), byzantine=2), torch.ones(3).double())
    x = vectors(2, 20, 4)
    assert torch.allclose(value("geometric_median", x, byzantine=0), x.mean(0))


@pytest.mark.slow
@settings(max_examples=20)
@given(
    n=st.integers(3, 16), data=st.data(), spread=st.sampled_from([1e-3, 0.03, 0.3, 1.0, 3.0]), last=st.booleans(),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_clipping_with_automatic_tau_converges(
    n: int, data: st.DataObject, spread: float, last: bool, seed: int
) -> None:
    f = data.draw(st.integers(0, (n - 1) // 2))
    honest, x = attacked(n, f, 50, spread, 10.0, seed)
    v = vectors(1, 50, seed)[0] if last else torch.zeros(50, dtype=torch.float64)
    found = combine(RULES.make("clipping", {"byzantine": f}), list(x), last=v).value
    tau = float("inf")
    for _ in range(600):
        away = x - v
        norms = away.norm(dim=1)
        tau = min(tau, float(norms.sort().values[(n - 1) // 2]))
        v = v + (away * (tau / norms.clamp(min=tau)).unsqueeze(1)).mean(0)
    assert float((found - v).norm()) <= n * 1e-4 * tau + 1e-9
    centre, radius = honest.mean(0), float((honest - honest.mean(0)).norm(dim=1).max())
    assert float((found - centre).norm()) <= 2 * (n - f) / (n - 2 * f) * radius


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-5, 1e-7])
@settings(max_examples=25)
@given(n=st.integers(3, 20), d=st.integers(2, 200), groups=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_flag_follows_its_formula_for_nearly_planar_vectors(
    apart: float, n: int, d: int, groups: int, seed: int
) -> None:
    """Around one to three vectors: in products, differences of the small are those of their squares."""
    x = vectors(groups, d, seed)[torch.arange(n) % groups] + apart * vectors(n, d, seed + 1)
    found, expected = value("flag", x, byzantine=1), written("flag", x, 1)
    assert float((found - expected).norm()) < 1e-9 * float(x.norm(dim=1).median())


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


@pytest.mark.parametrize("rule", [rule for rule in ALL if rule not in ("flag", "clipping")])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_a_shift_of_all_vectors_shifts_the_value(rule: str, seed: int) -> None:
    x, shift = vectors(N, 20, seed), 10 * vectors(1, 20, seed + 1)
    assert float((value(rule, x + shift) - value(rule, x) - shift).norm()) < 1e-8


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-4, 1e4), which=st.integers(0, N - 1))
def test_flag_depends_on_directions(dtype: torch.dtype, apart: float, seed: int, scale: float, which: int) -> None:
    x = vectors(N, 30, seed).to(dtype)
    longer = x.clone()
    longer[which] *= scale
    one, other = value("flag", x), value("flag", longer)
    assert float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > 1 - apart


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("mix", ["none", "nnm"])
@pytest.mark.parametrize("power", [1, 5, 10, 20, 30])
def test_far_outliers_have_no_influence(rule: str, mix: str, power: int) -> None:
    for seed in range(5):
        honest = vectors(N - F, 20, seed)
        is_byzantine = 10.0**power * torch.nn.functional.normalize(vectors(F, 20, seed + 100), dim=1)
        is_byzantine[1] = is_byzantine[0]  # they agree with each other
        found = value(rule, torch.cat([is_byzantine, honest]), mix=mix)
        centre = honest.mean(dim=0)
        radius = float((honest - centre).norm(dim=1).max())
        if rule in ("median", "trimmed_mean") and mix == "none":
            assert bool((found >= honest.amin(dim=0)).all() and (found <= honest.amax(dim=0)).all())
        assert float((found - centre).norm()) < 3 * radius


def test_krum_selects_a_member_and_multi_krum_a_mean() -> None:
    x = vectors(N, 10, 3)
    found = combine(RULES.make("krum", {"byzantine": F}), list(x))
    assert found.coefficients is not None and sorted(found.coefficients.tolist()) == [0.0] * (N - 1) + [1.0]
    found = combine(RULES.make("multikrum", {"byzantine": F}), list(x))
    assert found.coefficients is not None and sorted(found.coefficients.tolist())[F:] == pytest.approx(
        [1 / (N - F)] * (N - F)
    )


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(4, 13), st.integers(0, 99))
def test_mixing_takes_means_of_neighbours_or_of_buckets(seed: int, n: int, draw: int) -> None:
    x = vectors(n, 6, seed)
    gram, f = x @ x.T, 1
    near = mixing_matrix("nnm", gram, f, draw)
    assert near.shape == (n, n) and bool(((near > 0).sum(dim=1) == n - f).all())
    for i, row in enumerate(near):
        apart = (x - x[i]).norm(dim=1)
        assert float(apart[row > 0].max()) <= float(apart[row == 0].min()) + 1e-9, "the nearest"
    buckets = mixing_matrix("bucketing", gram, f, draw)
    assert buckets.shape == (-(-n // 2), n) and bool(((buckets > 0).sum(dim=0) == 1).all()), "each in one"
    assert torch.equal(buckets, mixing_matrix("bucketing", gram, f, draw))
    assert all(float(m.sum()) == pytest.approx(1) for m in (*near, *buckets))


@pytest.mark.parametrize("mix", ["none", "nnm", "bucketing"])
@pytest.mark.parametrize("own", [rule for rule in ALL if rule not in ("median", "trimmed_mean")])
def test_rival_rules_are_reported_with_their_own_coefficients(own: str, mix: str) -> None:
    x = list(vectors(N, 20, 11))
    rules = {name: RULES.make(name, {"byzantine": 1}) for name in ALL}
    made = rules[own]
    assert isinstance(made, GramRule)
    gram = combine(made, x, mix, 5).gram
    assert gram is not None
    found = rival_coefficients(rules, made, gram, mix, 5)
    complaint = set(ALL) - {"median", "trimmed_mean", own, "clipping"} - ({"flag"} if own == "clipping" else set())
    assert found.keys() == complaint
    for name, counted in found.items():
        expected = combine(rules[name], x, mix, 5).coefficients
        assert torch.allclose(counted, expected, atol=1e-9), name
    many = {name: RULES.make(name, {"byzantine": 4}) for name in ALL}
    assert found.keys() - rival_coefficients(many, made, gram, mix, 5).keys() >= {"krum"} & complaint, (
        "nine are too few for it"
    )


def test_suspects_are_at_most_the_tolerated_number() -> None:
    assert low_weight_members([0.25, 0.25, 0.0, 0.25], 1) == [2] and low_weight_members([0.2, 0.3, 0.3, 0.2], 2) == []
    assert low_weight_members([0.0, 1.0, 0.0, 0.0, 0.0], 2) == [0, 2] and low_weight_members(
        [0.05, 0.9, 0.04, 0.01], 2
    ) == [2, 3]
    assert low_weight_members([0.0, 1.0], 0) == []


def test_mixing_precedes_the_rule() -> None:
    x = vectors(N, 12, 5)
    for mix, rule in itertools.product(("nnm", "bucketing"), ("multikrum", "geometric_median", "median")):
        matrix = mixing_matrix(mix, x @ x.T, 1, 7)
        expected = value(rule, matrix @ x, byzantine=1)
        assert float((value(rule, x, byzantine=1, mix=mix, draw=7) - expected).norm()) < 1e-9


def test_chunks_change_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    x = vectors(N, 100, 8)
    whole = {rule: value(rule, x) for rule in ALL}
    mixed = value("median", x, mix="nnm")
    monkeypatch.setattr("planaria.exchange.robust.combining.iter_chunks", lambda vectors, size: iter_chunks(vectors, 7))
    monkeypatch.setattr("planaria.exchange.robust.products.iter_chunks", partial(iter_chunks, size=7))
    assert all(float((value(rule, x) - whole[rule]).norm()) < 1e-9 for rule in ALL)
    assert float((value("median", x, mix="nnm") - mixed).norm()) < 1e-9


# ---- a rule that continues from its last value


@pytest.mark.parametrize("mix", ["none", "nnm", "bucketing"])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 3), tau=st.sampled_from(["auto", 0.5, 3.0, 100.0]))
def test_clipping_continues_from_the_last_value(mix: str, seed: int, rounds: int, tau: float | str) -> None:
    x, v = vectors(N, 20, seed), vectors(1, 20, seed + 1)[0]
    matrix = mixing_matrix(mix, (x - v) @ (x - v).T, 1, 7)
    made = RULES.make("clipping", {"byzantine": 1, "rounds": rounds, "tau": tau})
    found = combine(made, list(x), mix, 7, v)
    expected = v.clone()
    most = float("inf") if tau == "auto" else float(tau)
    for _ in range(rounds):
        away = [row - expected for row in matrix @ x]
        norms = sorted(float(each.norm()) for each in away)
        most = min(most, norms[(len(norms) - 1) // 2]) if tau == "auto" else most
        expected = expected + sum(each * min(1.0, most / float(each.norm())) for each in away) / len(away)
    assert float((found.value - expected).norm()) < 1e-9
    again = x.T @ found.coefficients + (1 - found.coefficients.sum()) * v
    assert float((found.value - again).norm()) < 1e-9, "the coefficients are those of the members"


def test_a_shift_of_vectors_and_last_value_shifts_clipping() -> None:
    x, v, shift = vectors(N, 20, 1), vectors(1, 20, 2)[0], 10 * vectors(1, 20, 3)[0]
    made = RULES.make("clipping", {"byzantine": F, "rounds": 3})
    moved = combine(made, list(x + shift), last=v + shift).value - combine(made, list(x), last=v).value
    assert float((moved - shift).norm()) < 1e-8


@pytest.mark.parametrize("power", [3, 30])
def test_one_member_moves_the_last_value_by_no_more_than_tau(power: int) -> None:
    x, v = vectors(N, 20, 1).float(), vectors(1, 20, 2)[0].float()
    lying = x.clone()
    lying[0] = 10.0**power
    made = RULES.make("clipping", {"byzantine": 1, "tau": 0.5})
    one, other = (combine(made, list(each), last=v).value for each in (x, lying))
    assert 0 < float((one - other).norm()) <= 2 * 0.5 / N + 1e-6


def test_the_last_value_is_copied_and_saved() -> None:
    """All members share it; a copy and a loaded state continue with it; a new member starts from zero."""
    made = make_exchange(ExchangeConfig(replicas=5, robust="clipping"))
    of = replicas(5, {2: -1e30})
    for _ in range(3):
        exchange_once(made, of, 0, 0)
        for member, replica in of.items():
            replica.fast = {"w": replica.fast["w"] + vectors(1, 15, member).float().view(5, 3)}
    last = [replica.outer["centre"]["w"] for replica in of.values()]
    assert all(torch.equal(each, last[0]) for each in last) and bool(last[0].any())
    copy, loaded = of[0].outer.for_copy(made.parts), StageOuterState.load(of[0].outer.state(), made.parts)
    results = {}
    for name, outer in (("same", of[0].outer), ("copy", copy), ("loaded", loaded), ("new", StageOuterState())):
        others = {member: Replica(replica.fast, replica.outer) for member, replica in of.items()}
        others[0] = Replica(of[0].fast, outer)
        exchange_once(made, others, 0, 0)
        results[name] = others[0].fast["w"]
    assert torch.equal(results["same"], results["copy"]) and torch.equal(results["same"], results["loaded"])
    assert not torch.equal(results["same"], results["new"])
    without = make_exchange(ExchangeConfig(replicas=5, robust="median"))
    assert "centre" not in without.parts and not StageOuterState.load(of[0].outer.state(), without.parts)["centre"]


# ---- in one pass, in little memory, the same for all


@settings(max_examples=60)
@given(n=st.integers(1, 17), data=st.data(), seed=st.integers(0, 10**6))
def test_the_middle_equals_that_of_sorted_numbers(n: int, data: st.DataObject, seed: int) -> None:
    trim = data.draw(st.integers(0, (n - 1) // 2))
    x = torch.randint(0, 6, (n, 50), generator=torch.Generator().manual_seed(seed)).double()  # many are equal
    before = x.clone()
    expected = x.sort(dim=0).values[trim : n - trim].mean(dim=0)
    assert float((trimmed_mean(list(x), trim) - expected).abs().max()) < 1e-12
    assert torch.equal(x, before)


def test_a_median_needs_fewer_comparisons_than_a_sort() -> None:
    assert len(sorting_network(16, 7)) < 63, "a sort by Batcher's network has 63"
    assert len(sorting_network(16, 1)) < len(sorting_network(16, 3)) < 63


@pytest.mark.parametrize("apart", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("byzantine_member", [None, 0, 3])
def test_distances_of_fp32_vectors_are_exact(apart: float, byzantine_member: int | None) -> None:
    """Vectors that differ by ``apart`` of their length, one of them possibly a thousand lengths away."""
    x = (torch.ones(N, 5000, dtype=torch.float64) + apart * vectors(N, 5000, 1)).float()
    if byzantine_member is not None:
        x[byzantine_member] = 1000.0 * vectors(1, 5000, 2)[0].float()
    exact = x.double()
    found = squared_distances(inner_products(products(list(x)), torch.ones(N, dtype=torch.float64), origin=False))
    expected = torch.stack([(exact - row).square().sum(dim=1) for row in exact])
    honest = [i for i in range(N) if i != byzantine_member]
    wrong = (found - expected)[honest][:, honest].abs() / expected[honest][:, honest].clamp(min=1e-30)
    # With a Byzantine member as the first, in fp64 about the origin: 2⁻⁵³ ‖x‖² over what they are apart.
    assert float(wrong.fill_diagonal_(0.0).max()) < (1e-5 if byzantine_member != 0 or apart > 1e-5 else 1e-2)


def test_overflow_in_fp32_is_avoided_by_fp64() -> None:
    x = vectors(N, 40, 4).float()
    x[2] = 1e30
    found = inner_products(products(list(x)), torch.ones(N, dtype=torch.float64), origin=True)
    expected = x.double() @ x.double().T
    assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("where", ["far", "near"])
def test_an_outlier_does_not_affect_distances_of_others(where: str) -> None:
    """As the first it is what others are measured from, possibly so far away that all are the same from there."""
    x = vectors(N, 40, 4).float()
    x[0] = 1e12 if where == "far" else x[1] * (1 + 1e-6)
    x[5] = x[4]
    found = squared_distances(inner_products(products(list(x)), torch.ones(N, dtype=torch.float64), origin=False))
    expected = torch.stack([(x.double() - row.double()).square().sum(dim=1) for row in x])
    assert torch.allclose(found[1:, 1:], expected[1:, 1:], rtol=1e-5, atol=1e-9)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("mix", ["none", "nnm", "bucketing"])
def test_a_value_is_the_same_to_the_last_bit_on_any_number_of_threads(rule: str, mix: str) -> None:
    x = list(torch.randn(11, 150_000, generator=torch.Generator().manual_seed(3)))
    before, found = torch.get_num_threads(), {}
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found[threads] = combine(RULES.make(rule, {"byzantine": 1}), x, mix, 3).value
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[1], other) for other in found.values())


@pytest.mark.parametrize("rule", ALL)
def test_pieces_yield_the_value_of_the_whole(rule: str) -> None:
    x = vectors(N, 90, 6)
    cut = [[row[:13], row[13:13], row[13:70].clone(), row[70:]] for row in x]
    made = RULES.make(rule, {"byzantine": F})
    assert float((combine(made, cut).value - combine(made, list(x)).value).norm()) < 1e-9


# ---- as an exchange


def replicas(n: int, corrupt: dict[int, float]) -> dict[int, Replica]:
    return {
        member: Replica(
            {
                "w": torch.full((5, 3), corrupt[member])
                if member in corrupt
                else vectors(1, 15, member).float().view(5, 3)
            },
            StageOuterState(),
        )
        for member in range(n)
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("spec", ["multikrum", "nnm:median", "geometric_median", "flag", "trimmed_mean", "ef14:8bits"])
def test_one_byzantine_member_has_no_influence(spec: str, bad: float) -> None:
    compress, rule = ("ef14:8bits", "multikrum") if "bits" in spec else ("", spec)
    made = make_exchange(ExchangeConfig(replicas=7, robust=rule, compress=compress))
    of = replicas(7, {2: bad})
    honest = torch.stack([replica.fast["w"] for member, replica in of.items() if member != 2])
    exchange_once(made, of, 0, 0)
    values = [replica.fast["w"] for replica in of.values()]
    assert all(torch.equal(found, values[0]) for found in values), "all end with equal values"
    assert float((values[0] - honest.mean(dim=0)).norm()) < 3 * float(
        (honest - honest.mean(dim=0)).flatten(1).norm(dim=1).max()
    )


def test_too_many_invalid_updates_are_reported() -> None:
    made = make_exchange(ExchangeConfig(replicas=5, robust="multikrum"))
    with pytest.raises(
        ValueError,
        match=r"the update of replica 0 is invalid: its blocking part: not all of its numbers .*tolerates 1",
    ):
        exchange_once(made, replicas(5, dict.fromkeys(range(4), float("nan"))), 0, 0)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("multykrum", r"exchange\.robust\.rule = 'multykrum': no such choice; did you mean 'multikrum'\?"),
        ({"rule": "krum", "byzantine": 2}, r"needs exchange\.replicas = 7 or more, not 5; lower byzantine"),
        ("bucketing:median", r"needs exchange\.replicas = 5 or more"),
        ({"rule": "median", "mix": "nmn"}, r"exchange\.robust\.mix = 'nmn': no such choice; did you mean 'nnm'\?"),
        ({"rule": "median", "rounds": 2}, r"exchange\.robust\.rounds: no option of 'median'"),
        ({"byzantine": 1}, "set rule to one of"),
        ({"rule": "flag", "byzantine": -1}, r"exchange\.robust\.byzantine = -1"),
    ],
)
def test_invalid_settings_are_refused_by_name(spec: object, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_robust_aggregator(spec, 4 if spec == "bucketing:median" else 5)


@pytest.mark.parametrize("kind", ["noloco", "pair_mean", "gasloc"])
def test_pairs_tolerate_no_byzantine_member(kind: str) -> None:
    given = {"alpha": 0.3, "beta": 0.7, "gamma": 0.5} if kind == "gasloc" else {}

    def made(robust: str, **options: object) -> Exchange:
        return make_exchange(
            ExchangeConfig(replicas=7, kind=kind, robust=robust, options=Options({**given, **options}))
        )

    with pytest.raises(
        UserError,
        match=r"7 replicas in groups of 2 meet .* tolerating 1 Byzantine replicas needs groups of at least 3",
    ):
        made("median")
    with pytest.raises(
        UserError, match=r"7 replicas in groups of 4 meet in some of 3, .* groups of at least 5; raise exch"
    ):
        made("multikrum", group=4)
    assert made("median", group=4)
    with pytest.raises(UserError, match=r"but members of this exchange\.kind have different values; use another"):
        made("clipping", group=4)


def test_a_rule_needs_several_values() -> None:
    with pytest.raises(UserError, match="'local' does not aggregate several values"):
        make_exchange(ExchangeConfig(replicas=5, kind="local", robust="median"))


# ---- where members may be missing


def rarely(kind: str, robust: str, n: int, **options: object) -> tuple[Exchange, dict[int, Replica]]:
    made = make_exchange(ExchangeConfig(replicas=n, kind=kind, robust=robust, options=Options({"every": 4, **options})))
    return made, exchange_in_process.replicas(made, {"w": torch.zeros(5, 3), "layers.1.w": torch.ones(4)}, n)


def drifted(of: dict[int, Replica], is_byzantine: dict[int, float]) -> None:
    for member, replica in of.items():
        away = vectors(1, 15, member).float().view(5, 3)
        replica.fast = {name: tensor + 0.1 for name, tensor in replica.fast.items()}
        replica.fast["w"] = replica.fast["w"] + (is_byzantine[member] if member in is_byzantine else 0.01 * away)


@pytest.mark.parametrize("kind", ["diloco", "streaming_diloco"])
@pytest.mark.parametrize("robust", ["median", "multikrum", "nnm:trimmed_mean", "clipping"])
def test_outer_drifts_are_robust_too(kind: str, robust: str) -> None:
    made, of = rarely(kind, robust, 7, alpha=0.0, beta=1.0)
    for round in range(8):
        drifted(of, {2: -1e6, 5: float("nan")} if robust == "median" else {2: -1e6})
        exchange_once(made, of, round, 0)
        slow = [replica.outer["slow"]["w"] for replica in of.values()]
        assert all(torch.equal(each, slow[0]) for each in slow), "all have the same"
    assert float((slow[0] - 0.1 * 8).abs().max()) < 0.5, "clipping lags behind"


@pytest.mark.parametrize("kind", ["diloco", "streaming_diloco"])
@pytest.mark.parametrize("away", [[0], [0, 1, 2, 3]])
@pytest.mark.parametrize("bits", [32, 8])
def test_a_round_with_too_few_members_changes_nothing(kind: str, away: list[int], bits: int) -> None:
    """Five are enough for the rule, three and one are not; drifts of a round that came to nothing are in the next."""
    made, of = rarely(kind, "clipping", 6, bits=bits, **({"fragments": 1} if kind == "streaming_diloco" else {}))
    drifted(of, {})
    exchange_once(made, of, 0, 0)
    drifted(of, {5: 1e9})
    fast = {member: replica.fast["w"].clone() for member, replica in of.items()}
    before = {member: replica.outer for member, replica in of.items()}
    there = [member for member in of if member not in away]
    exchange_once(made, of, 1, 0, alone=away)
    assert all(torch.equal(of[i].outer["slow"]["w"], of[there[0]].outer["slow"]["w"]) for i in there), "all alike"
    few = [*away, *(there if len(there) < 3 else [])]
    for member in few:
        assert torch.equal(of[member].fast["w"], fast[member])
        assert of[member].outer.parts == before[member].parts and of[member].outer.rounds == 2
    for member in set(of) - set(few):
        assert float(of[member].fast["w"].abs().max()) < 10, "of five the Byzantine member is borne"
    exchange_once(made, {i: of[i] for i in there}, 2, 0)
    assert all(torch.equal(of[i].outer["slow"]["w"], of[there[0]].outer["slow"]["w"]) for i in there)


def test_too_few_members_of_a_gossip_group_continue_alone() -> None:
    made, of = rarely("noloco", "median", 8, group=4)
    _, others = rarely("noloco", "", 8, group=4)
    for each in (of, others):
        drifted(each, {})
    group = made.groups(0, range(8), 0)[0]
    exchange_once(made, of, 0, 0, alone=group[:2])
    exchange_once(
        make_exchange(ExchangeConfig(replicas=8, kind="noloco", options=Options({"group": 4}))),
        others,
        0,
        0,
        alone=group,
    )
    assert all(torch.equal(of[i].fast["w"], others[i].fast["w"]) for i in group)


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "geometric_median", "multikrum"])
def test_no_honest_vector_is_mixed_with_a_far_outlier(rule: str) -> None:
    """Honest lengths differ 20-fold, as those of gradients do; the longest must not look Byzantine."""
    generator = torch.Generator().manual_seed(5)
    honest = [scale * torch.randn(500, generator=generator) for scale in (1.0, 0.6, 0.05, 0.05, 0.05, 0.05)]
    vectors = [*honest, torch.full((500,), 1e38), torch.full((500,), 1e38)]
    found = combine(make_robust_aggregator({"rule": rule, "byzantine": 2}, 8).rule, vectors, "nnm").value
    assert float(found.abs().max()) < max(float(vector.abs().max()) for vector in honest)
