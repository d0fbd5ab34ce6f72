"""Error feedback and estimates: the formulas written out, their invariants, and small problems of their papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from benchmarks.exchange_in_process import Replica, exchange_once
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Exchange, StageOuterState
from planaria.exchange.compress.base import measure_delta
from planaria.exchange.compress.compression import make_compression
from planaria.exchange.compress.feedback import DecayedErrorFeedback
from planaria.exchange.registry import make_exchange
from support.lab_models import make

FEEDBACKS = ["none", "ef14", "decayed", "ef21", "econtrol"]
COMPRESSORS = ["top10%", "rand10%", "sign", "8bits", "4bits", "2bits"]
D = 60


def compressed(spec: str | dict[str, object], kind: str = "allreduce") -> Exchange:
    return make_exchange(ExchangeConfig.model_validate({"kind": kind, "compress": spec}))


def gradient(replica: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return {"w": torch.randn(D - 4, generator=generator) + replica, "b": torch.randn(2, 2, generator=generator)}


def stepped(made: Exchange, of: dict[int, Replica], step: int) -> None:
    """Do a step in which each replica has its own gradient."""
    for member, replica in of.items():
        replica.fast = gradient(member, step)
    exchange_once(made, of, step, 0)


def begun(made: Exchange, members: int = 3) -> dict[int, Replica]:
    return {member: Replica(gradient(member, 0), made.start(gradient(member, 0))) for member in range(members)}


def flat(weights: object) -> Tensor:
    return torch.cat([weights[name].reshape(-1) for name in sorted(weights)]).double()


def mean(of: dict[int, Replica], part: str) -> Tensor:
    return sum(flat(replica.outer[part]) for replica in of.values()) / len(of)


@pytest.mark.slow
@pytest.mark.parametrize("spec", COMPRESSORS)
@pytest.mark.parametrize("feedback", ["ef21", "econtrol"])
def test_the_mean_of_estimates_is_the_estimate_of_the_mean(feedback: str, spec: str) -> None:
    made = compressed(f"{feedback}:{spec}")
    of = begun(made)
    exact = reached = torch.zeros(D, dtype=torch.float64)
    for step in range(100):
        exact = exact + sum(flat(gradient(member, step)) for member in of) / len(of)
        stepped(made, of, step)
        reached = reached + flat(of[0].fast)
        assert all(torch.equal(flat(r.fast), flat(of[0].fast)) for r in of.values()), "equal to the last bit"
        estimate = flat(of[0].outer["mean_estimate"])
        assert float((estimate - mean(of, "estimate")).norm() / estimate.norm()) < 1e-5
        if feedback == "econtrol" and step:
            residual = mean(of, "residual")
            # Steps and residuals together are the sum of all mean gradients, from the second step on.
            assert float((reached + residual - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("spec", COMPRESSORS)
def test_sent_values_and_residuals_add_up_to_the_gradients(spec: str) -> None:
    made = compressed(f"ef14:{spec}")
    of = begun(made)
    meant = sent = torch.zeros(D, dtype=torch.float64)
    for step in range(50):
        meant = meant + sum(flat(gradient(member, step)) for member in of) / len(of)
        stepped(made, of, step)
        sent = sent + flat(of[0].fast)
        assert float((sent + mean(of, "residual") - meant).norm() / meant.norm()) < 1e-5


def outer_with_residual(seed: int) -> StageOuterState:
    return StageOuterState({"residual": gradient(7, seed)}, 1)


@pytest.mark.parametrize("spec", COMPRESSORS)
@given(decay=st.floats(0.001, 1.0), seed=st.integers(0, 999), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_sent_and_kept_values_add_up_to_the_decayed_error_and_the_gradient(
    spec: str, decay: float, seed: int, scale: float
) -> None:
    plain = make_compression(spec)
    made = replace(plain, feedback=DecayedErrorFeedback(decay=decay))
    outer = outer_with_residual(seed)
    exact = {name: scale * tensor for name, tensor in gradient(0, seed).items()}
    update = made.update(outer, exact)
    sent = plain.compressor.decode(update.blocking, D, 1).double()
    meant = decay * flat(outer["residual"]) + flat(exact)
    total = flat(update.kept["residual"]) + sent
    assert float((total - meant).norm()) <= 1e-6 * float(meant.norm() + sent.norm())
    assert torch.equal(flat(outer["residual"]), flat(gradient(7, seed))), "its arguments are unchanged"


@pytest.mark.parametrize("kind", ["allreduce", "diloco", "noloco"])
@pytest.mark.parametrize("spec", ["top10%", "sign", "4bits"])
def test_without_decay_it_is_ef14_to_the_last_bit(spec: str, kind: str) -> None:
    settings = {"feedback": "decayed", "decay": 1.0, **_table(spec)}
    one, other = compressed(f"ef14:{spec}", kind), compressed(settings, kind)
    of, same = begun(one, 2), begun(other, 2)
    for step in range(12):
        stepped(one, of, step)
        stepped(other, same, step)
        assert all(torch.equal(flat(of[i].fast), flat(same[i].fast)) for i in of)
        assert all(torch.equal(flat(of[i].outer["residual"]), flat(same[i].outer["residual"])) for i in of)
    assert flat(of[0].outer["residual"]).any()


def _table(spec: str) -> dict[str, object]:
    return {
        "top10%": {"kind": "topk", "keep": 0.1},
        "sign": {"kind": "sign"},
        "4bits": {"kind": "quantised", "bits": 4},
    }[spec]


def test_an_error_that_is_never_sent_stays_bounded_only_with_decay() -> None:
    """One coordinate is always the largest; the other has a constant gradient and is never sent."""
    for decay, expected in ((0.95, 20.0), (1.0, 200.0)):
        made = replace(make_compression("top1%"), feedback=DecayedErrorFeedback(decay=decay))
        outer = StageOuterState()
        for _ in range(200):
            outer = outer.settled(**made.update(outer, {"w": torch.tensor([1e4, 1.0])}).kept)
        assert float(outer["residual"]["w"][1]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.01, 2])
def test_an_impossible_decay_is_refused_by_name(decay: float) -> None:
    with pytest.raises(UserError, match=rf"^exchange\.compress\.decay = {decay}: input should be .* than ") as caught:
        compressed({"kind": "topk", "feedback": "decayed", "decay": decay})
    assert "\n" not in str(caught.value)


def test_a_member_that_is_alone_continues_from_all_that_it_would_send() -> None:
    made = compressed("decayed:top10%")
    outer = outer_with_residual(3)
    update = made.update(outer, gradient(0, 3))
    fast, settled = made.settle(outer, gradient(0, 3), {0: update}, 0)
    assert torch.allclose(flat(fast), 0.95 * flat(outer["residual"]) + flat(gradient(0, 3)), rtol=1e-5, atol=1e-6)
    assert not flat(settled["residual"]).any()


def written_out(name: str, gradients: list[list[Tensor]], c: Callable[[Tensor], Tensor], eta: float) -> list[Tensor]:
    """Return the steps as the papers write them: e, h and h̄ as plain vectors; the first step in full."""
    n = len(gradients[0])
    e = [torch.zeros(D) for _ in range(n)]
    h: list[Tensor] = []
    bar, found = torch.zeros(D), []
    for g in gradients:
        if name in ("ef21", "econtrol") and not h:
            h = [x.clone() for x in g]
            bar = sum(g) / n
            found.append(bar)
            continue
        if name == "none":
            d = [c(g[i]) for i in range(n)]
        elif name == "ef14":
            d = [c(e[i] + g[i]) for i in range(n)]
            e = [e[i] + g[i] - d[i] for i in range(n)]
        elif name == "decayed":
            d = [c(0.95 * e[i] + g[i]) for i in range(n)]
            e = [0.95 * e[i] + g[i] - d[i] for i in range(n)]
        elif name == "ef21":
            d = [c(g[i] - h[i]) for i in range(n)]
            h = [h[i] + d[i] for i in range(n)]
        else:
            d = [c(eta * e[i] + g[i] - h[i]) for i in range(n)]
            e = [e[i] + g[i] - h[i] - d[i] for i in range(n)]
            h = [h[i] + d[i] for i in range(n)]
        joined: Tensor = sum(d) / n
        bar = bar + joined
        found.append(bar if h else joined)
    return found


@pytest.mark.parametrize("name", FEEDBACKS)
def test_feedbacks_follow_the_formulas_of_their_papers(name: str) -> None:
    made, spec = compressed(f"{name}:top10%"), make_compression("top10%").compressor
    gradients = [[flat(gradient(member, step)).float() for member in range(3)] for step in range(30)]
    expected = written_out(name, gradients, lambda v: spec.decode(spec.encode(v), D), spec.delta(D) / 2)
    of = begun(made)
    for step, reached in enumerate(expected):
        stepped(made, of, step)
        assert float((flat(of[1].fast) - reached).norm() / reached.norm()) < 1e-6, step


@pytest.mark.parametrize("name", FEEDBACKS)
def test_compression_errors_are_measured(name: str) -> None:
    made, codec = compressed(f"{name}:top10%"), make_compression("top10%").compressor
    of = begun(made, 2)
    for step in range(4):
        before, exact = of[0].outer, flat(gradient(0, step))
        found = made.update(before, gradient(0, step)).compressed
        stepped(made, of, step)
        assert found is not None and found.norm == pytest.approx(float(exact.norm()), rel=1e-6)
        full = not step and name in ("ef21", "econtrol")
        assert found.full == full and found.dense_bytes == 4 * D
        assert found.sent_bytes == (4 * D if full else codec.bytes(D))
        own = {part: flat(held) for part, held in of[0].outer.parts.items()}
        residual, off = own.get("residual"), (exact - own["estimate"]) if "estimate" in own else None
        assert found.residual == (None if residual is None else pytest.approx(float(residual.norm()), rel=1e-5))
        assert found.estimate_error == (None if off is None else pytest.approx(float(off.norm()), rel=1e-5, abs=1e-6))
        if not full:
            e, h = (flat(before[part]) if before[part] else torch.zeros(D) for part in ("residual", "estimate"))
            eta = {"ef14": 1.0, "decayed": 0.95, "econtrol": codec.delta(D) / 2}.get(name, 0.0)
            v = (eta * e + exact - h).float()
            assert 1.0 - found.relative_error == pytest.approx(measure_delta(codec, v), rel=1e-5)


def test_exact_and_non_finite_messages_are_not_measured() -> None:
    assert compressed("32bits").update(StageOuterState(), gradient(0, 0)).compressed is None
    zero = {"w": torch.zeros(7)}
    assert compressed("8bits").update(StageOuterState(), zero).compressed.relative_error == 0.0
    assert compressed("8bits").update(StageOuterState(), {"w": torch.full((7,), torch.inf)}).compressed is None


def test_ef21_follows_the_momentum() -> None:
    made = compressed({"kind": "plain", "bits": 16, "feedback": "ef21", "momentum": 0.3})
    of, followed = begun(made, 2), flat(gradient(0, 0)) / 2 + flat(gradient(1, 0)) / 2
    stepped(made, of, 0)
    for step in range(1, 10):
        stepped(made, of, step)
        followed = 0.7 * followed + 0.3 * (flat(gradient(0, step)) + flat(gradient(1, step))) / 2
        assert float((flat(of[0].fast) - followed).norm() / followed.norm()) < 1e-3


def test_estimates_restart_after_a_member_was_replaced() -> None:
    made = compressed("econtrol:top10%")
    of = begun(made)
    for step in range(5):
        stepped(made, of, step)
    residual = flat(of[1].outer["residual"])
    of[0].outer = of[1].outer.for_copy(made.parts)
    assert set(of[0].outer.parts) == {"mean_estimate"}, "a copy has nothing of another's own"
    for replica in of.values():
        replica.outer = made.after_member_change(replica.outer)
    stepped(made, of, 5)
    exact = sum(flat(gradient(member, 5)) for member in of) / 3
    assert float((flat(of[0].fast) - exact).norm()) < 1e-5, "a step is exchanged in full"
    assert torch.equal(flat(of[1].outer["residual"]), residual), "who lives still owes"
    stepped(made, of, 6)
    estimate = flat(of[0].outer["mean_estimate"])
    assert float((estimate - mean(of, "estimate")).norm() / estimate.norm()) < 1e-5
    owes = flat(of[0].outer["residual"])
    assert owes.any() and float((owes + flat(of[0].outer["estimate"]) - flat(gradient(0, 6))).norm()) < 1e-5


def test_a_saved_state_resumes_to_the_last_bit() -> None:
    made = compressed("econtrol:rand10%")
    of = begun(made)
    for step in range(3):
        stepped(made, of, step)
    again = {m: Replica(r.fast, StageOuterState.load(r.outer.state(), made.parts)) for m, r in of.items()}
    for step in range(3, 6):
        stepped(made, of, step)
        stepped(made, again, step)
    assert torch.equal(flat(of[2].fast), flat(again[2].fast))


@pytest.mark.parametrize("kind", ["diloco", "streaming_diloco", "noloco", "pair_mean"])
def test_estimates_need_an_exchange_among_all(kind: str) -> None:
    with pytest.raises(UserError, match=r"estimate of every member.*use ef14, or exchange\.kind = 'allreduce'"):
        compressed("econtrol:top1%", kind)
    assert compressed("top1%", kind).parts["residual"] == "own"


def test_bits_are_the_same_compression_and_local_replicas_have_none() -> None:
    with pytest.raises(UserError, match="'local' has no messages to compress"):
        compressed("8bits", "local")
    short, long = make("allreduce", bits=8), compressed("8bits")
    gradients = gradient(0, 0)
    assert torch.equal(
        short.update(StageOuterState(), gradients).blocking, long.update(StageOuterState(), gradients).blocking
    )


# ---- a compressor that guarantees no delta


def ill_conditioned(d: int = 20, n: int = 2) -> tuple[Tensor, Tensor]:
    """Heterogeneous quadratics f_i(x) = xᵀH_i x/2 − b_iᵀx: H [n, d, d] with curvatures that spread log-normally over
    the coordinates, mean curvature at most 3; and b [n, d]."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(n, d, d, generator=generator, dtype=torch.float64) / d**0.5
    scale = torch.randn(d, generator=generator, dtype=torch.float64).exp()
    h = (a @ a.mT + 0.1 * torch.eye(d, dtype=torch.float64)) * scale * scale.unsqueeze(1)
    h *= 3 / torch.linalg.eigvalsh(h.mean(0))[-1]
    return h, 10 * torch.randn(n, d, generator=generator, dtype=torch.float64)


def growth(options: dict[str, object], steps: int = 250, gamma: float = 0.3) -> float:
    """‖x − x*‖ over its start after gradient descent from 0 along the mean estimate; inf once it exceeds 100."""
    h, b = ill_conditioned()
    by, outer = make_compression(options), [StageOuterState()] * len(h)
    x, best = torch.zeros_like(b[0]), torch.linalg.solve(h.mean(0), b.mean(0))
    for step in range(steps):
        gradients = ((h @ x).squeeze(-1) - b).float()
        kept = [by.update(own, {"x": g}).kept for own, g in zip(outer, gradients, strict=True)]
        mean = sum(each["estimate"]["x"] for each in kept) / len(kept)
        outer = [StageOuterState({**each, "mean_estimate": {"x": mean}}, step + 1) for each in kept]
        x = x - gamma * mean.double()
        if float(x.norm()) > 100 * float(best.norm()):
            return math.inf
    return float((x - best).norm() / best.norm())


SIGN = {"kind": "sign", "feedback": "econtrol"}


@pytest.mark.parametrize("options", [SIGN, {**SIGN, "eta": 0.6}], ids=["auto", "a number"])
def test_econtrol_is_stable_without_a_guaranteed_delta_unless_forced(options: dict[str, object]) -> None:
    assert growth(options) < 1.0
    assert growth({**SIGN, "eta": 1 / math.pi, "force": True}) == math.inf, "the delta of a normal variable"


@pytest.mark.parametrize("spec", ["sign", "2bits"])
def test_eta_follows_the_delta_of_the_message(spec: str) -> None:
    """η is half of the smaller δ of g − h and of e; e is sparse here, so its δ is near 1/d, or zero."""
    made, codec = compressed(f"econtrol:{spec}"), make_compression(spec).compressor
    g, h, e = torch.randn(D), torch.randn(D), torch.zeros(D).index_fill_(0, torch.tensor(7), 100.0)
    outer = StageOuterState({"estimate": {"w": h}, "mean_estimate": {"w": h}, "residual": {"w": e}}, 1)

    def delta(v: Tensor) -> float:
        v, sent = v.double(), codec.decode(codec.encode(v), D).double()
        return max(0.0, 1.0 - float((sent - v).square().sum() / v.square().sum()))

    assert delta(e) < 0.2 < delta(g - h)
    update = made.update(outer, {"w": g})
    expected = codec.encode((delta(e) / 2) * e + (g - h))
    assert torch.allclose(codec.decode(update.blocking, D), codec.decode(expected, D), rtol=1e-5)


@pytest.mark.parametrize("spec", ["top10%", "rand10%", "8bits", "4bits"])
def test_a_guaranteed_delta_is_not_measured(spec: str) -> None:
    codec = make_compression(spec).compressor
    assert codec.guaranteed and codec.reached(torch.zeros(D).index_fill_(0, torch.tensor(7), 1.0)) == codec.delta(D)


# ---- the papers' own small problems; their full forms are in benchmarks/compression.py


@pytest.mark.slow
def test_naive_top_k_diverges_where_estimates_converge() -> None:
    """f_i = (a_iᵀx)² + ‖x‖²/4 with the rotations of (−3, 2, 2), top-1, x₀ = (1, 1, 1): naive top-k's worst case."""
    rows = torch.tensor([[-3.0, 2.0, 2.0], [2.0, -3.0, 2.0], [2.0, 2.0, -3.0]], dtype=torch.float64)
    gamma = 0.005859

    def run(spec: str, steps: int) -> tuple[Tensor, float]:
        made = compressed(spec)
        x = torch.ones(3, dtype=torch.float64)
        of = {i: Replica({"x": torch.zeros(3)}, StageOuterState()) for i in range(3)}
        for step in range(steps):
            for i, replica in of.items():
                replica.fast = {"x": (2 * rows[i] * (rows[i] @ x) + x / 2).float()}
            exact = sum(r.fast["x"] for r in of.values()) / 3
            exchange_once(made, of, step, 0)
            x = x - gamma * of[0].fast["x"].double()
        return x, float(exact.norm())

    found, _ = run("none:top30%", 200)
    assert float(found.norm()) == pytest.approx(math.sqrt(3) * (1 + 11 * gamma / 6) ** 200, rel=1e-3)
    _, norm = run("ef21:top30%", 1000)
    assert norm < 1e-2
