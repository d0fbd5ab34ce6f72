"""EF21-W: weights and steps against the algorithm written out, on heterogeneous quadratics; its warm-up and state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benchmarks.compression import new_rule
from benchmarks.exchange_in_process import Replica, exchange_once
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Exchange, StageOuterState
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.compression import make_compression
from planaria.exchange.compress.estimates import MIN_SMOOTHNESS, estimate_smoothness, member_scales, member_weights
from planaria.exchange.registry import make_exchange

SMOOTH = [1.0, 3.0, 20.0]
D = 40


def made(compress: Any, replicas: int = len(SMOOTH)) -> Exchange:
    return make_exchange(ExchangeConfig.model_validate({"replicas": replicas, "compress": compress}))


def given_ones(kind: str, **options: Any) -> dict[str, Any]:
    return {"kind": kind, "feedback": "ef21w", "smoothness": SMOOTH, **options}


def problem(isotropic: bool) -> tuple[Tensor, Tensor]:
    """f_i(x) = xᵀH_i x/2 − b_iᵀx with ‖H_i‖ = SMOOTH[i]: H [n, d, d] and b [n, d]."""
    generator = torch.Generator().manual_seed(7)
    basis = torch.linalg.qr(torch.randn(len(SMOOTH), D, D, generator=generator, dtype=torch.float64)).Q
    curvature = torch.ones(D) if isotropic else torch.linspace(0.05, 1.0, D)
    h = basis @ torch.diag(curvature.double()) @ basis.mT * torch.tensor(SMOOTH).double().view(-1, 1, 1)
    return h, 10 * torch.randn(len(SMOOTH), D, generator=generator, dtype=torch.float64)


def descended(by: Exchange, isotropic: bool, gamma: float, steps: int) -> tuple[list[Tensor], dict[int, Replica]]:
    """Return x after each step of gradient descent along the common value, and the replicas."""
    h, b = problem(isotropic)
    x, path = torch.zeros(D, dtype=torch.float64), []
    of = {i: Replica({"x": torch.zeros(D)}, StageOuterState()) for i in range(len(SMOOTH))}
    for step in range(steps):
        for i, replica in of.items():
            replica.fast = {"x": (h[i] @ x - b[i]).float()}
        exchange_once(by, of, step, 0)
        assert all(torch.equal(replica.fast["x"], of[0].fast["x"]) for replica in of.values())
        x = x - gamma * of[0].fast["x"].double()
        path.append(x)
    return path, of


def written_out(codec: Compressor, w: list[float], isotropic: bool, gamma: float, steps: int) -> list[Tensor]:
    """arXiv 2402.10774, algorithm 2: h_i follows g_i/(n w_i), and the step is along Σ w_i h_i."""
    (h, b), n = problem(isotropic), len(SMOOTH)
    x, known, path = torch.zeros(D, dtype=torch.float64), [], []
    for step in range(steps):
        shares = [(h[i] @ x - b[i]).float() / (n * w[i]) for i in range(n)]
        if not step:
            known = shares
        else:
            sent = [codec.decode(codec.encode(shares[i] - known[i], step), D, step) for i in range(n)]
            known = [one + other for one, other in zip(known, sent, strict=True)]
        x = x - gamma * sum(w[i] * known[i].double() for i in range(n))
        path.append(x)
    return path


def test_weights_are_shares_of_the_sum() -> None:
    assert member_weights(SMOOTH) == pytest.approx([each / sum(SMOOTH) for each in SMOOTH])
    assert member_scales(SMOOTH) == pytest.approx([1 / 8, 3 / 8, 20 / 8])
    assert member_scales([5.0] * 4) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize(
    "spec", [("topk", {"keep": 0.1}), ("quantised", {"bits": 4}), ("randk", {"keep": 0.2}), ("sign", {})]
)
def test_steps_equal_the_algorithms(spec: tuple[str, dict[str, Any]]) -> None:
    kind, options = spec
    by = made(given_ones(kind, **options))
    codec = make_compression({"kind": kind, **options}).compressor
    gamma = new_rule(sum(SMOOTH) / 3, SMOOTH, min(0.1, codec.delta(D)))
    found, _ = descended(by, False, gamma, 40)
    for one, other in zip(found, written_out(codec, member_weights(SMOOTH), False, gamma, 40), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-4


def test_exact_messages_are_not_scaled() -> None:
    found, _ = descended(made(given_ones("plain")), False, 0.02, 5)
    exact, _ = descended(made("32bits"), False, 0.02, 5)
    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))


@pytest.mark.slow
def test_training_converges_with_the_step_size_of_its_rule() -> None:
    h, b = problem(False)
    best = torch.linalg.solve(h.mean(0), b.mean(0))
    found, _ = descended(made(given_ones("topk", keep=0.25)), False, new_rule(8.0, SMOOTH, 0.25), 400)
    assert float((found[-1] - best).norm() / best.norm()) < 0.02


def test_weights_scale_messages_into_a_compressors_range() -> None:
    """fp16 holds numbers up to 65,504: a difference above that arrives over several steps, unless it is scaled."""
    codec, by, plain = make_compression("16bits").compressor, made(given_ones("plain", bits=16)), made("ef21:16bits")
    large = {"x": torch.full((D,), 1e5)}
    begun = StageOuterState({part: {"x": torch.zeros(D)} for part in ("estimate", "mean_estimate")}, 1)
    scaled, unscaled = (each.for_sender(2).update(begun, large).kept["estimate"]["x"] for each in (by, plain))
    assert torch.allclose(scaled, codec.decode(codec.encode(large["x"] / 2.5), D) * 2.5)
    assert float(unscaled[0]) == 65504.0
    assert float(scaled[0]) == pytest.approx(1e5, rel=1e-3)


def test_a_warm_up_finds_the_weights() -> None:
    """‖Δg_i‖ = L_i‖Δx‖ exactly where H_i = L_i times a rotation; the warm-up sends differences uncompressed."""
    by, warmup = made({"kind": "topk", "keep": 0.1, "feedback": "ef21w", "warmup": 3}), 3
    _, of = descended(by, True, 0.02, 1 + warmup)
    states = {(r.outer.secants, r.outer.measured) for r in of.values()}
    assert len(states) == 1, "equal at all, to the last bit"
    ((secants, measured),) = states
    assert measured == warmup and member_weights(estimate_smoothness(secants)) == pytest.approx(
        member_weights(SMOOTH), rel=1e-4
    )
    g = {"x": torch.randn(D)}
    message = by.for_sender(2).update(of[2].outer, g)
    assert message.blocking is not None and message.blocking.nbytes == make_compression("top10%").compressor.bytes(D)
    ahead = (g["x"] - of[2].outer["estimate"]["x"]) / member_scales(estimate_smoothness(secants))[2]
    assert torch.equal(message.blocking, make_compression("top10%").compressor.encode(ahead, of[2].outer.rounds))
    early, _ = descended(by, True, 0.02, 1 + warmup)
    exact, _ = descended(made("32bits"), True, 0.02, 1 + warmup)
    assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(early, exact, strict=True))


def test_measurements_are_saved_and_copied() -> None:
    by = made({"kind": "topk", "keep": 0.1, "feedback": "ef21w", "warmup": 2})
    _, of = descended(by, True, 0.02, 5)
    outer = of[1].outer
    loaded = StageOuterState.load(outer.state(), by.parts)
    for other in (loaded, outer.for_copy(by.parts), by.after_member_change(outer)):
        assert (other.secants, other.measured) == (outer.secants, 2)
    assert "secants" not in StageOuterState({}, 3).state(), "nothing is saved where no step has been measured"
    with pytest.raises(ValueError, match="secants"):
        StageOuterState.load({**outer.state(), "secants": torch.zeros(2)}, by.parts)


def test_a_warm_up_restarts_with_another_number_of_members() -> None:
    by = made({"kind": "topk", "keep": 0.1, "feedback": "ef21w", "warmup": 4})
    _, of = descended(by, True, 0.02, 3)
    assert of[0].outer.measured == 2
    two = {i: of[i] for i in range(2)}
    exchange_once(by, two, 3, 0)
    assert two[0].outer.measured == 1 and len(two[0].outer.secants) == 2


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=8))
def test_estimates_are_positive_and_within_a_thousandth_of_their_mean(secants: list[float]) -> None:
    found = estimate_smoothness(tuple(secants))
    assert all(each > 0 and math.isfinite(each) for each in found) and all(map(math.isfinite, member_scales(found)))
    assert min(found) >= 0.99 * MIN_SMOOTHNESS * sum(map(math.sqrt, secants)) / len(secants)


def test_the_short_form_is_automatic_and_invalid_settings_are_refused() -> None:
    assert made("ef21w:top1%").compression.feedback.smoothness == "auto"
    with pytest.raises(UserError, match=r"smoothness has 3 values for exchange\.replicas = 4; set one for each"):
        made(given_ones("topk"), replicas=4)
    for wrong in ([], [1.0, -1.0, 1.0], [1.0, math.inf, 1.0], "same"):
        with pytest.raises(UserError, match=r"exchange\.compress\.smoothness"):
            made({**given_ones("topk"), "smoothness": wrong})
    with pytest.raises(UserError, match=r"estimate of every member"):
        make_exchange(ExchangeConfig(replicas=3, kind="diloco", compress="ef21w:top1%"))
