"""Updates weighed over all stages: the coefficients of whole vectors, from nodes that each have a part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from benchmarks.exchange_in_process import Replica, replicas
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.base import Exchange, StageOuterState, TooManyByzantine, Update, UpdateWeights, Weights
from planaria.exchange.registry import make_exchange
from planaria.exchange.robust.combining import combine
from planaria.exchange.robust.products import CHUNK
from planaria.exchange.robust.weighing import Products, Weighing, gram, stage_products
from support.lab_models import drift, weights

RULES = ("krum", "multikrum", "geometric_median", "flag")
MIXES = ("none", "nnm", "bucketing")


def made(kind: str = "diloco", replicas: int = 9, options: dict[str, Any] | None = None, **robust: Any) -> Exchange:
    given = {"rule": "multikrum", "scope": "replica", **robust}
    options = {"every": 1, **(options or {})}
    return make_exchange(ExchangeConfig(kind=kind, replicas=replicas, options=Options(options), robust=Options(given)))


def node_products(of: Weighing, parts: Sequence[Tensor], me: int, order: Sequence[int]) -> list[Products]:
    """Return the reports of ``me``'s nodes, one update after another; ``parts``: per stage x of all members [n, d]."""
    found = []
    for x in parts:
        updates, at = dict[int, Weights](), dict[int, Any]()
        for member in [me, *(other for other in order if other != me)]:
            updates[member] = {"w": x[member]}
            at |= of.products(StageOuterState(), updates, me, [member])
        found.append(json.loads(json.dumps(at), object_hook=lambda of: {int(k): v for k, v in of.items()}))
    return found


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(9, 11), dims=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 999),
    rule=st.sampled_from(RULES), mix=st.sampled_from(MIXES), own=st.booleans(), data=st.data(),
)  # fmt: skip
def test_coefficients_equal_those_of_whole_vectors(
    n: int, dims: list[int], seed: int, rule: str, mix: str, own: bool, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(n, sum(dims) + 3, generator=generator) * torch.rand(n, 1, generator=generator) + 0.5
    parts = list(whole.split([*dims, 3], dim=1))
    byzantine = 1 if mix == "bucketing" else 2
    of = made(
        "noloco" if own else "diloco", n, {"group": n} if own else {}, rule=rule, mix=mix, byzantine=byzantine
    ).weighing
    me, order = data.draw(st.integers(0, n - 1)), data.draw(st.permutations(range(n)))
    found = of.update_weights(node_products(of, parts, me, order), range(n), me, draw=seed)
    expected = combine(of.robust.rule, list(whole.double()), of.robust.mix, seed).coefficients
    assert list(found.coefficients.values()) == pytest.approx(expected.tolist(), abs=1e-9)
    fewer = list(range(of.robust.min_members() - 1))
    assert of.update_weights(node_products(of, parts, 0, order), fewer, 0, draw=seed) is None, "they are too few"


def test_reports_do_not_depend_on_order_or_threads() -> None:
    x = torch.randn(6, 2 * CHUNK + 77, generator=torch.Generator().manual_seed(1))
    of, members = made(replicas=6).weighing, range(6)
    first = gram(node_products(of, [x], 0, members)[0], members, None)
    for me, order in ((0, [5, 4, 3, 2, 1]), (3, [1, 0, 5, 2, 4])):
        assert torch.equal(gram(node_products(of, [x], me, order)[0], members, None), first)
    together = of.products(StageOuterState(), {m: {"w": x[m]} for m in members}, 2, members)
    assert torch.equal(gram(together, members, None), first)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 3)
    try:
        assert torch.equal(gram(node_products(of, [x], 0, members)[0], members, None), first)
    finally:
        torch.set_num_threads(before)


def test_nearly_equal_models_are_distinguished_beside_a_huge_one() -> None:
    """Products are about the own model; a huge one changes no entry of others."""
    near = torch.randn(1, 5000, generator=torch.Generator().manual_seed(2))
    x = (near + 1e-6 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(3))).float()
    x[5] = 3e38
    found = stage_products(dict(enumerate(x)), range(6), x[0], 0)
    exact = x.double()
    for i in range(1, 5):
        for j in range(1, i + 1):
            inner = float((exact[i] - exact[0]) @ (exact[j] - exact[0]))
            assert found[i][j] == pytest.approx(inner, rel=1e-9)
    without = stage_products(dict(enumerate(x[:5])), range(5), x[0], 0)
    assert {k: found[k] for k in without} == without
    assert all(torch.isfinite(torch.tensor([*of.values()], dtype=torch.float64)).all() for of in found.values())


def settled(of: Exchange, parts: list[dict[int, Replica]], round: int) -> list[UpdateWeights]:
    """Settle a round of all stages (``parts``: replicas of each); return each replica's weights of the updates."""
    members = sorted(parts[0])
    sent = [{m: of.update(part[m].outer, part[m].fast) for m in members} for part in parts]
    found = []
    for me in members:
        nodes = []
        for part, updates in zip(parts, sent, strict=True):
            decoded_values = of.decoded_values(part[me].outer, updates)
            nodes.append(of.weighing.products(part[me].outer, decoded_values, me, members))
        found.append(of.weighing.update_weights(nodes, members, me, round))
    for part, updates in zip(parts, sent, strict=True):
        for me, replica in part.items():
            received = list[UpdateWeights]()
            rule = of.after_rejecting(0, received.append, found[me])
            replica.fast, replica.outer = rule.settle(replica.outer, replica.fast, updates, me)
            assert not received, "who has found it reports it"
    return found


def merged(one: Replica, other: Replica) -> dict[str, Tensor]:
    """Return the weights of two stages as those of one."""
    return {**one.fast, **{f"layers.9{k}": t for k, t in other.fast.items()}}


@pytest.mark.parametrize("robust", [{"rule": "multikrum"}, {"rule": "clipping"}, {"rule": "flag", "mix": "nnm"}])
@pytest.mark.parametrize("kind", ["diloco", "streaming_diloco"])
def test_two_stages_settle_as_one_whole_stage(kind: str, robust: dict[str, Any]) -> None:
    """Three rounds, also with the last value of clipping and with fragments."""
    options = {"every": 2, "fragments": 2} if kind == "streaming_diloco" else {}
    of, alone = (made(kind, 7, options, byzantine=2, **robust, scope=scope) for scope in ("replica", "stage"))
    whole, other = replicas(alone, weights(0), 7), replicas(of, weights(50), 7)
    first = replicas(of, weights(0), 7)
    both = {m: Replica(merged(whole[m], other[m]), alone.start(merged(whole[m], other[m]))) for m in whole}
    for round in range(3):
        for part in (first, other):
            drift(part, seed=round + (100 if part is other else 0))
        for m, replica in both.items():
            replica.fast = merged(first[m], other[m])
        settled(of, [first, other], round)
        if kind == "streaming_diloco":  # what a fragment is goes by a stage's own layers
            continue
        updates = {m: alone.update(replica.outer, replica.fast) for m, replica in both.items()}
        for m, replica in both.items():
            replica.fast, replica.outer = alone.settle(replica.outer, replica.fast, updates, m)
            parts = merged(first[m], other[m])
            assert replica.fast.keys() == parts.keys()
            assert all(torch.allclose(replica.fast[name], parts[name], atol=1e-6) for name in parts)
    for part in (first, other):
        for replica in part.values():
            state, same = replica.outer.state(), part[0].outer.state()
            assert all(torch.equal(state[name], same[name]) for name in same), "to the last bit"


def test_corruption_at_one_stage_excludes_the_replica_everywhere() -> None:
    for kind, options in (("diloco", {}), ("noloco", {"group": 7})):
        of = made(kind, 7, options)
        parts = [replicas(of, weights(stage), 7) for stage in range(3)]
        for stage, part in enumerate(parts):
            drift(part, seed=stage)
        parts[1][4].fast = {name: -10 * tensor for name, tensor in parts[1][4].fast.items()}
        for found in settled(of, parts, 0)[:4]:
            assert found.coefficients[4] == 0.0 and sum(found.coefficients.values()) == pytest.approx(1.0)
            assert found.rivals()["krum"] == {4: 0.0}


def test_too_few_members_leave_the_weights_unchanged() -> None:
    of = made(replicas=7)
    part = replicas(of, weights(0), 4)
    drift(part, seed=1)
    updates = {m: of.update(replica.outer, replica.fast) for m, replica in part.items()}
    fast, outer = of.after_rejecting(0, lambda weights: None).settle(part[0].outer, part[0].fast, updates, 0)
    assert outer.rounds == 1 and all(torch.equal(fast[name], part[0].fast[name]) for name in fast)


class Odd(AggregatingExchange):
    """A kind with its own rounds, which does not describe its updates."""

    @property
    def interval(self) -> int:
        return 3

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        return Update()

    def settle(
        self, outer: StageOuterState, fast: Weights, updates: Any, me: int
    ) -> tuple[dict[str, Tensor], StageOuterState]:
        raise TooManyByzantine


@pytest.mark.parametrize(
    ("kind", "robust", "problem"),
    [
        ("diloco", {"rule": "trimmed_mean", "mix": "nnm"}, r"'trimmed_mean' treats each coordinate separately"),
        ("diloco", {"scope": "replcia"}, r"robust\.scope = 'replcia': no such choice; did you mean 'replica'"),
        ("test_update_weighing:Odd", {}, r"does not decode its updates"),
        ("monna", {}, r"already selects neighbours"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(kind: str, robust: dict[str, Any], problem: str) -> None:
    options = {"options": Options({"every": 2})} if kind in ("diloco", "monna") else {}
    given = Options({"rule": "multikrum", "scope": "replica", **robust})
    with pytest.raises(UserError, match=problem) as caught:
        make_exchange(ExchangeConfig(kind=kind, replicas=7, robust=given, **options))
    assert "\n" not in str(caught.value)


def test_scope_stage_weighs_no_updates() -> None:
    assert (
        made(scope="stage").weighing is None
        and make_exchange(ExchangeConfig(replicas=5, robust="krum")).weighing is None
    )
