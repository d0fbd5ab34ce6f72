"""Offers judged over all stages: the same coefficients as from whole vectors, of which no node has more than a part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_models import drift, weights
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.aggregate import Averaging
from planaria.exchange.base import Counted, Exchange, Offer, Outer, TooManyLiars, Weights
from planaria.exchange.kinds import exchange
from planaria.exchange.lab import Replica, replicas
from planaria.exchange.robust.combining import combine
from planaria.exchange.robust.products import CHUNK
from planaria.exchange.robust.weighing import Told, Weighing, gram, products

RULES = ("krum", "multikrum", "geometric_median", "flag")
MIXES = ("none", "nnm", "bucketing")


def made(kind: str = "diloco", replicas: int = 9, options: dict[str, Any] | None = None, **robust: Any) -> Exchange:
    given = {"rule": "multikrum", "scope": "replica", **robust}
    options = {"every": 1, **(options or {})}
    return exchange(ExchangeConfig(kind=kind, replicas=replicas, options=Options(options), robust=Options(given)))


def weighing(of: Exchange) -> Weighing:
    assert of.weighing is not None
    return of.weighing


def told(of: Weighing, parts: Sequence[Tensor], me: int, order: Sequence[int]) -> list[Told]:
    """What the nodes of ``me`` tell, one offer after the other; ``parts``: of each stage, x of all members [n, d]."""
    found = []
    for x in parts:
        said, at = dict[int, Weights](), dict[int, Any]()
        for member in [me, *(other for other in order if other != me)]:
            said[member] = {"w": x[member]}
            at |= of.products(Outer(), said, me, [member])
        found.append(json.loads(json.dumps(at), object_hook=lambda of: {int(k): v for k, v in of.items()}))
    return found


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(9, 11), dims=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 999),
    rule=st.sampled_from(RULES), mix=st.sampled_from(MIXES), own=st.booleans(), data=st.data(),
)  # fmt: skip
def test_coefficients_are_those_of_whole_vectors(
    n: int, dims: list[int], seed: int, rule: str, mix: str, own: bool, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(n, sum(dims) + 3, generator=generator) * torch.rand(n, 1, generator=generator) + 0.5
    parts = list(whole.split([*dims, 3], dim=1))
    liars = 1 if mix == "bucketing" else 2
    of = weighing(made("noloco" if own else "diloco", n, {"group": n} if own else {}, rule=rule, mix=mix, liars=liars))
    me, order = data.draw(st.integers(0, n - 1)), data.draw(st.permutations(range(n)))
    found = of.counted(told(of, parts, me, order), range(n), me, draw=seed)
    expected = combine(of.robust.rule, list(whole.double()), of.robust.mix, seed).coefficients
    assert found is not None and expected is not None
    assert list(found.coefficients.values()) == pytest.approx(expected.tolist(), abs=1e-9)
    fewer = list(range(of.robust.least() - 1))
    assert of.counted(told(of, parts, 0, order), fewer, 0, draw=seed) is None, "they are too few"


def test_who_has_heard_the_same_tells_the_same_to_the_last_bit_in_any_order_and_on_any_number_of_threads() -> None:
    x = torch.randn(6, 2 * CHUNK + 77, generator=torch.Generator().manual_seed(1))
    of, members = weighing(made(replicas=6)), range(6)
    first = gram(told(of, [x], 0, members)[0], members, None)
    for me, order in ((0, [5, 4, 3, 2, 1]), (3, [1, 0, 5, 2, 4])):
        assert torch.equal(gram(told(of, [x], me, order)[0], members, None), first)
    together = of.products(Outer(), {m: {"w": x[m]} for m in members}, 2, members)
    assert torch.equal(gram(together, members, None), first)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 3)
    try:
        assert torch.equal(gram(told(of, [x], 0, members)[0], members, None), first)
    finally:
        torch.set_num_threads(before)


def test_models_a_millionth_apart_are_told_apart_beside_one_at_the_end_of_the_scale() -> None:
    """About one's own; and a huge liar touches no entry of others."""
    near = torch.randn(1, 5000, generator=torch.Generator().manual_seed(2))
    x = (near + 1e-6 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(3))).float()
    x[5] = 3e38
    found = products(dict(enumerate(x)), range(6), x[0], 0)
    exact = x.double()
    for i in range(1, 5):
        for j in range(1, i + 1):
            inner = float((exact[i] - exact[0]) @ (exact[j] - exact[0]))
            assert found[i][j] == pytest.approx(inner, rel=1e-9)
    without = products(dict(enumerate(x[:5])), range(5), x[0], 0)
    assert {k: found[k] for k in without} == without
    assert all(torch.isfinite(torch.tensor([*of.values()], dtype=torch.float64)).all() for of in found.values())


def settled(of: Exchange, parts: list[dict[int, Replica]], round: int) -> list[Counted]:
    """A round of all stages, ``parts``, each with its replicas; what each replica has found that offers count."""
    members = sorted(parts[0])
    offers = [{m: of.offer(part[m].outer, part[m].fast) for m in members} for part in parts]
    found = []
    for me in members:
        nodes = []
        for part, said in zip(parts, offers, strict=True):
            assert isinstance(of, Averaging)
            spoken = of.spoken(part[me].outer, said)
            nodes.append(weighing(of).products(part[me].outer, spoken, me, members))
        counted = weighing(of).counted(nodes, members, me, round)
        assert counted is not None
        found.append(counted)
    for part, said in zip(parts, offers, strict=True):
        for me, replica in part.items():
            heard = list[Counted]()
            rule = of.facing(0, heard.append, found[me])
            replica.fast, replica.outer = rule.settle(replica.outer, replica.fast, said, me)
            assert not heard, "who has found it tells it"
    return found


@pytest.mark.parametrize("robust", [{"rule": "multikrum"}, {"rule": "clipping"}, {"rule": "flag", "mix": "nnm"}])
@pytest.mark.parametrize("kind", ["diloco", "streaming_diloco"])
def test_a_stage_of_two_parts_goes_on_as_one_that_is_whole(kind: str, robust: dict[str, Any]) -> None:
    """Three rounds: also of what clipping continues from, and of fragments."""
    options = {"every": 2, "fragments": 2} if kind == "streaming_diloco" else {}
    of, alone = (made(kind, 7, options, liars=2, **robust, scope=scope) for scope in ("replica", "stage"))
    whole, other = replicas(alone, weights(0), 7), replicas(of, weights(50), 7)
    first = replicas(of, weights(0), 7)
    both = {
        m: Replica({**whole[m].fast, **{f"layers.9{k}": t for k, t in other[m].fast.items()}}, Outer()) for m in whole
    }
    for replica in both.values():
        replica.outer = alone.start(replica.fast)
    for round in range(3):
        for part in (first, other):
            drift(part, seed=round + (100 if part is other else 0))
        for m, replica in both.items():
            replica.fast = {**first[m].fast, **{f"layers.9{k}": t for k, t in other[m].fast.items()}}
        settled(of, [first, other], round)
        if kind == "streaming_diloco":  # what a fragment is goes by a stage's own layers
            continue
        said = {m: alone.offer(replica.outer, replica.fast) for m, replica in both.items()}
        for m, replica in both.items():
            replica.fast, replica.outer = alone.settle(replica.outer, replica.fast, said, m)
            parts = {**first[m].fast, **{f"layers.9{k}": t for k, t in other[m].fast.items()}}
            assert replica.fast.keys() == parts.keys()
            assert all(torch.allclose(replica.fast[name], parts[name], atol=1e-6) for name in parts)
    for part in (first, other):
        for replica in part.values():
            state, same = replica.outer.state(), part[0].outer.state()
            assert all(torch.equal(state[name], same[name]) for name in same), "to the last bit"


def test_who_lies_at_one_stage_alone_counts_nowhere() -> None:
    for kind, options in (("diloco", {}), ("noloco", {"group": 7})):
        of = made(kind, 7, options)
        parts = [replicas(of, weights(stage), 7) for stage in range(3)]
        for stage, part in enumerate(parts):
            drift(part, seed=stage)
        parts[1][4].fast = {name: -10 * tensor for name, tensor in parts[1][4].fast.items()}
        for counted in settled(of, parts, 0)[:4]:
            assert counted.coefficients[4] == 0.0 and sum(counted.coefficients.values()) == pytest.approx(1.0)
            assert counted.rivals()["krum"] == {4: 0.0}


def test_fewer_than_the_rule_bears_settle_as_before() -> None:
    of = made(replicas=7)
    part = replicas(of, weights(0), 4)
    drift(part, seed=1)
    said = {m: of.offer(replica.outer, replica.fast) for m, replica in part.items()}
    fast, outer = of.facing(0, lambda counted: None).settle(part[0].outer, part[0].fast, said, 0)
    assert outer.rounds == 1 and all(torch.equal(fast[name], part[0].fast[name]) for name in fast)


class Odd(Averaging):
    """A kind with rounds of its own, which says nothing of its offers."""

    @property
    def interval(self) -> int:
        return 3

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        return Offer()

    def settle(self, outer: Outer, fast: Weights, offers: Any, me: int) -> tuple[dict[str, Tensor], Outer]:
        raise TooManyLiars


@pytest.mark.parametrize(
    ("kind", "robust", "told"),
    [
        ("diloco", {"rule": "median"}, r"scope = 'replica': 'median' looks at each number by itself"),
        ("diloco", {"rule": "trimmed_mean", "mix": "nnm"}, r"'trimmed_mean' looks at each number by itself"),
        (
            "diloco",
            {"scope": "replcia"},
            r"robust\.scope = 'replcia': no such choice; did you mean 'replica'",
        ),
        ("allreduce", {}, r"exchange\.robust: scope = 'replica' is for rounds, .*take exchange\.kind = 'diloco'"),
        ("test_weighing_offers:Odd", {}, r"does not say what its offers stand for"),
        ("monna", {}, r"chooses whom it believes by itself"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(kind: str, robust: dict[str, Any], told: str) -> None:
    options = {"options": Options({"every": 2})} if kind in ("diloco", "monna") else {}
    given = Options({"rule": "multikrum", "scope": "replica", **robust})
    with pytest.raises(UserError, match=told) as caught:
        exchange(ExchangeConfig(kind=kind, replicas=7, robust=given, **options))
    assert "\n" not in str(caught.value)


def test_stage_by_stage_is_what_was_there_before() -> None:
    assert made(scope="stage").weighing is None and exchange(ExchangeConfig(replicas=5, robust="krum")).weighing is None
