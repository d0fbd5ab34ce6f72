"""Losses: values and gradients by hand, filters, claims, bounds, and invariances."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import exp
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from planaria.swarm.learning.loss import LossResult, LossStats, divergence, divisor_of, policy_loss
from planaria.swarm.learning.loss_config import USED_BY, LossConfig

REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"length": 8}, "dis": {"clip_low": 0.3, "clip_high": 5.0}}
"""settings without a default"""
KINDS: tuple[str, ...] = get_args(LossConfig.model_fields["kind"].annotation)
NAN, INF = math.nan, math.inf

# A success with three tokens, and a failure with two and invalid padding.
WELL, BADLY = 1.5, -0.5
LOGP = [[-1.0, -0.5, -2.0], [-0.3, -3.0, NAN]]
OLD = [[-1.1, -0.9, -1.8], [-0.7, -2.2, INF]]
GEN = [[-1.2, -1.9, -1.5], [-0.1, -0.2, NAN]]
WELL_CLAIMED = [GEN[0], [NAN, NAN, NAN]]
"""only the success has a claim"""
REF = [[-1.3, -0.4, -2.5], [-0.3, -2.0, -INF]]
MASK = [[1, 1, 1], [1, 1, 0]]

# Clipped R = π_θ/π_old: log R is 0.1, 0.4, −0.2 and 0.4, −0.8; ε = 0.2. A success is clipped above 1.2, a failure below
# 0.8.
CLIPPED_WELL = [WELL * exp(0.1), WELL * 1.2, WELL * exp(-0.2)]
CLIPPED_BADLY = [BADLY * exp(0.4), BADLY * 0.8]
HIGHER = [WELL * exp(0.1), WELL * 1.28, WELL * exp(-0.2)]
FREE_WELL = [WELL * exp(0.1), WELL * exp(0.4), WELL * exp(-0.2)]
FREE_BADLY = [BADLY * exp(0.4), BADLY * exp(-0.8)]
# log π_θ/π_gen is 0.2, 1.4, −0.5 and −0.2, −2.8.
VIS_WELL = [WELL * 1.2, WELL * 1.2, WELL * exp(-0.5)]
VIS_BADLY = [BADLY * exp(-0.2), BADLY * 0.8]
# log π_old/π_gen is 0.1, 1.0, −0.3 and −0.6, −2.0; C = 2 cuts the second (e = 2.718…).
TIS_WELL = [exp(0.1) * WELL * exp(0.1), 2.0 * WELL * 1.2, exp(-0.3) * WELL * exp(-0.2)]
TIS_BADLY = [exp(-0.6) * BADLY * exp(0.4), exp(-2.0) * BADLY * 0.8]
# dis: r log π_θ with r = π_θ/π_gen in (0.7, 6), which masks the third (0.607) and the fifth (0.061) token.
DIS_WELL = [WELL * exp(0.2) * -1.0, WELL * exp(1.4) * -0.5]
DIS_BADLY = BADLY * exp(-0.2) * -0.3
# The failure is (0.2 + 2.8) / 2 = 1.5 nats per token from its generator, beyond every filter's 0.5.
BY_HAND = {
    "grpo": -(sum(CLIPPED_WELL) / 3 + sum(CLIPPED_BADLY) / 2) / 2,
    "dr_grpo": -(sum(CLIPPED_WELL) / 8 + sum(CLIPPED_BADLY) / 8) / 2,
    "dapo": -(sum(HIGHER) + sum(CLIPPED_BADLY)) / 5,
    "nois": -(sum(FREE_WELL) / 3 + sum(FREE_BADLY) / 2) / 2,
    "vis": -(sum(VIS_WELL) / 3 + sum(VIS_BADLY) / 2) / 2,
    "tis": -(sum(TIS_WELL) / 3 + sum(TIS_BADLY) / 2) / 2,
    "dis": -(sum(DIS_WELL) / 3 + DIS_BADLY / 2) / 2,
    "f_nois": -(sum(FREE_WELL) / 3) / 2,
    "f_vis": -(sum(VIS_WELL) / 3) / 2,
    "f_tis": -(sum(TIS_WELL) / 3) / 2,
    "sequence_mask": -(sum(CLIPPED_WELL) / 3) / 2,
}


def made(kind: str, **fields: Any) -> LossConfig:
    return LossConfig(kind=kind, **REQUIRED.get(kind, {}) | fields)


def tensor(rows: list[list[float]], grad: bool = False) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, requires_grad=grad)


def on_the_batch(config: LossConfig, **changed: Any) -> LossResult:
    given = {
        "logp": tensor(LOGP, grad=True),
        "gen_logp": tensor(GEN),
        "advantages": torch.tensor([WELL, BADLY], dtype=torch.float64),
        "mask": torch.tensor(MASK),
        "old_logp": tensor(OLD),
        "divisor": divisor_of(config, [3, 2]),
    }
    return policy_loss(config, **(given | changed))


def gradient(config: LossConfig, **changed: Any) -> Tensor:
    logp = tensor(LOGP, grad=True)
    on_the_batch(config, logp=logp, **changed).loss.backward()
    assert logp.grad is not None
    return logp.grad


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_equals_the_value_by_hand(kind: str) -> None:
    assert on_the_batch(made(kind)).loss.item() == pytest.approx(BY_HAND[kind], abs=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_beta_adds_the_divergence_from_the_reference(kind: str) -> None:
    # x = log π_ref − log π_θ is −0.3, 0.1, −0.5 and 0, 1
    well, badly = ([exp(x) - x - 1 for x in row] for row in ([-0.3, 0.1, -0.5], [0.0, 1.0]))
    summed = {"dapo": (sum(well) + sum(badly)) / 5, "dr_grpo": (sum(well) + sum(badly)) / 16}
    kl = summed.get(kind, (sum(well) / 3 + sum(badly) / 2) / 2)
    found = on_the_batch(made(kind, beta=0.1), ref_logp=tensor(REF))
    assert found.loss.item() == pytest.approx(BY_HAND[kind] + 0.1 * kl, abs=1e-14)
    assert found.stats.means()["kl_reference"] == pytest.approx((sum(well) + sum(badly)) / 5, abs=1e-14)


def test_a_reference_without_beta_is_only_measured() -> None:
    found = on_the_batch(made("grpo"), ref_logp=tensor(REF))
    assert found.loss.item() == pytest.approx(BY_HAND["grpo"], abs=1e-14)
    assert found.stats.means()["kl_reference"] > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_old_policy_the_ratio_is_one(kind: str) -> None:
    far = {"filter_kind": "k1_mean", "filter_threshold": 9.0, "mask_threshold": 9.0}
    used = {name: value for name, value in far.items() if kind in USED_BY[name]}
    found = gradient(made(kind, **used), old_logp=None)
    share = {"dapo": [[1 / 5] * 3, [1 / 5] * 2], "dr_grpo": [[1 / 16] * 3, [1 / 16] * 2]}
    well, badly = share.get(kind, [[1 / 6] * 3, [1 / 4] * 2])
    if kind.endswith("tis"):
        well = [well[0] * exp(0.2), well[1] * 2.0, well[2] * exp(-0.5)]
        badly = [badly[0] * exp(-0.2), badly[1] * exp(-2.8)]
    if kind.endswith("vis"):  # R is then π_θ/π_gen, and without gradient where it is clipped
        well = [0.0, 0.0, well[2] * exp(-0.5)]
        badly = [badly[0] * exp(-0.2), 0.0]
    if kind == "dis":  # masked tokens stay in the denominator
        well = [well[0] * exp(0.2), well[1] * exp(1.4), 0.0]
        badly = [badly[0] * exp(-0.2), 0.0]
    expected = [[-WELL * of for of in well], [-BADLY * of for of in badly] + [0.0]]
    torch.testing.assert_close(found, tensor(expected), rtol=0, atol=1e-14)


def test_clipped_tokens_have_no_gradient() -> None:
    expected = [[-WELL * exp(0.1) / 6, 0.0, -WELL * exp(-0.2) / 6], [-BADLY * exp(0.4) / 4, 0.0, 0.0]]
    torch.testing.assert_close(gradient(made("grpo")), tensor(expected), rtol=0, atol=1e-14)


def test_the_gradient_of_beta_is_that_of_k3() -> None:
    pulled = gradient(made("nois", beta=0.1), ref_logp=tensor(REF)) - gradient(made("nois"))
    x = [[-0.3, 0.1, -0.5], [0.0, 1.0]]
    expected = [[0.1 * (1 - exp(v)) / 6 for v in x[0]], [0.1 * (1 - exp(v)) / 4 for v in x[1]] + [0.0]]
    torch.testing.assert_close(pulled, tensor(expected), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["nois", "vis", "tis", "dis", "f_nois", "f_vis", "f_tis", "sequence_mask"])
def test_on_policy_all_losses_equal_grpo(kind: str) -> None:
    own = torch.tensor(LOGP, dtype=torch.float64)
    alike = gradient(made(kind), old_logp=None, gen_logp=own)
    torch.testing.assert_close(alike, gradient(made("grpo"), old_logp=None), rtol=0, atol=1e-15)


# Filters


def test_divergences_equal_the_values_by_hand_without_padding() -> None:
    x = [[-0.2, -1.4, 0.5], [0.2, 2.8]]
    k3 = [[exp(v) - v - 1 for v in row] for row in x]
    expected = {
        "k1_mean": [sum(x[0]) / 3, sum(x[1]) / 2],
        "k3_mean": [sum(k3[0]) / 3, sum(k3[1]) / 2],
        "k3_sum": [sum(k3[0]), sum(k3[1])],
    }
    for kind, values in expected.items():
        found = divergence(kind, tensor(LOGP, grad=True), tensor(GEN), torch.tensor(MASK))
        assert not found.requires_grad
        assert found.tolist() == pytest.approx(values, abs=1e-14)


@pytest.mark.parametrize("kind", ["f_nois", "f_vis", "f_tis"])
@pytest.mark.parametrize("by", ["k1_mean", "k3_mean", "k3_sum"])
def test_the_filter_removes_failures_from_its_threshold_on(kind: str, by: str) -> None:
    # computed in floating point, so that "at the threshold" is exact
    at = divergence(by, tensor(LOGP), tensor(GEN), torch.tensor(MASK))[1].item()
    taken = on_the_batch(made(kind, filter_kind=by, filter_threshold=at))
    spared = on_the_batch(made(kind, filter_kind=by, filter_threshold=at + 1e-9))
    assert (taken.stats.filtered, spared.stats.filtered) == (1, 0)
    assert taken.loss.item() == pytest.approx(BY_HAND[kind], abs=1e-14)
    assert spared.loss.item() == pytest.approx(BY_HAND[kind.removeprefix("f_")], abs=1e-14)


def test_the_sequence_mask_removes_failures_beyond_its_threshold() -> None:
    at = divergence("k1_mean", tensor(LOGP), tensor(GEN), torch.tensor(MASK))[1].item()
    spared = on_the_batch(made("sequence_mask", mask_threshold=at))
    taken = on_the_batch(made("sequence_mask", mask_threshold=at - 1e-9))
    assert (taken.stats.filtered, spared.stats.filtered) == (1, 0)
    assert spared.loss.item() == pytest.approx(BY_HAND["grpo"], abs=1e-14)


@pytest.mark.parametrize(("x", "stays"), [(4.0, True), (4.05, False), (0.6, True), (-40.0, True), (-60.0, False)])
def test_the_published_filter_is_k3_below_50(x: float, stays: bool) -> None:
    """e^x − x − 1 is 49.6 at 4, 52.3 at 4.05 and 59 at −60; the default filter starts at x = 0.5."""
    ours, theirs = made("f_tis", filter_kind="published"), made("f_tis")
    assert (ours.filter, theirs.filter) == (("k3_mean", 50.0), ("k1_mean", 0.5))
    logp = torch.full((1, 4), -70.0, requires_grad=True)
    whole = torch.ones(1, 4, dtype=torch.bool)
    found = [
        policy_loss(config, logp, logp.detach() + x, torch.tensor([-1.0]), whole, divisor=1).stats.filtered == 0
        for config in (ours, theirs)
    ]
    assert found == [stays, x < 0.5]


@pytest.mark.parametrize("kind", ["f_nois", "f_vis", "f_tis", "sequence_mask"])
def test_a_success_is_never_filtered(kind: str) -> None:
    found = on_the_batch(made(kind), gen_logp=tensor([[0.0, 0.0, 8.0], [-0.3, -3.0, 0.0]]))
    assert found.stats.filtered == 0


@pytest.mark.parametrize("kind", ["f_nois", "f_vis", "f_tis"])
def test_a_filtered_sample_counts_in_the_divisor_and_keeps_its_reference_term(kind: str) -> None:
    assert gradient(made(kind))[1].tolist() == [0, 0, 0]
    assert gradient(made(kind, beta=0.1), ref_logp=tensor(REF))[1, 1] != 0
    assert divisor_of(made(kind), [3, 2]) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"filter_threshold": 5.0}, "without loss.filter_kind"),
        ({"filter_kind": "k3_mean"}, "set loss.filter_threshold"),
        ({"filter_kind": "k3_sum"}, "set loss.filter_threshold"),
        ({"kind": "dr_grpo"}, "set loss.length"),
        (
            {"kind": "dis"},
            r"'dis' has no default bounds; set loss\.clip_low \(such as 0\.3\) and loss\.clip_high \(such as 5\)",
        ),
        ({"kind": "dis", "clip_low": 0.3}, r"'dis' has no default bounds; set loss\.clip_high \(such as 5\)"),
        ({"kind": "dis", "clip_high": 5.0}, r"'dis' has no default bounds; set loss\.clip_low \(such as 0\.3\)"),
        ({"kind": "vis", "cap": 1.2}, r"loss\.cap = 1\.2 is not above the clip at 1\.2"),
        ({"kind": "dis", "clip_low": 0.0, "clip_high": 0.0}, "mask every token .* increase them"),
        ({"kind": "grpo", "cap": 9.0}, r"loss\.cap = 9\.0 has no effect with .* 'vis', 'tis', 'f_vis' or 'f_tis'"),
        ({"kind": "tis", "mask_threshold": 0.1}, r"kind = 'tis'; remove it, or use 'sequence_mask' "),
    ],
)
def test_incomplete_settings_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig(**fields)


CHANGES: dict[str, dict[str, Any]] = {
    "clip_low": {"clip_low": 0.1},
    "clip_high": {"clip_high": 0.05},
    "cap": {"cap": 1.5},
    "filter_kind": {"filter_kind": "published"},
    "filter_threshold": {"filter_kind": "k1_mean", "filter_threshold": 9.0},
    "mask_threshold": {"mask_threshold": 9.0},
    "length": {"length": 5},
    "beta": {"beta": 0.1},
    "log_ratio_bound": {"log_ratio_bound": 0.1},
}
"""setting → a change of it"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_a_kind_does_not_use_is_refused(kind: str, name: str) -> None:
    used = kind in USED_BY.get(name, KINDS)

    def losses(config: LossConfig) -> list[float]:
        """Losses with a failure far from its generator, and one near it with a ratio above the cap."""
        claims = [tensor(GEN), tensor([GEN[0], [-1.3, -1.8, NAN]])]
        return [on_the_batch(config, gen_logp=claim, ref_logp=tensor(REF)).loss.item() for claim in claims]

    unvalidated = LossConfig.model_construct(**made(kind).model_dump() | CHANGES[name])
    assert (losses(unvalidated) != losses(made(kind))) is used
    if used:
        assert losses(made(kind, **CHANGES[name])) == losses(unvalidated)
    else:
        with pytest.raises(ValidationError, match=rf"has no effect with loss\.kind = '{kind}'; remove it, or use '"):
            made(kind, **CHANGES[name])


@pytest.mark.parametrize("kind", KINDS)
def test_stated_defaults_are_accepted_with_every_kind(kind: str) -> None:
    assert LossConfig.model_validate(made(kind).model_dump()) == made(kind)


def test_dis_without_a_lower_bound_keeps_every_low_ratio() -> None:
    config = made("dis", clip_low=1.0, clip_high=1e9)
    claims = [0.0, 7.0, 17.0]
    low = gradient(config, gen_logp=tensor([claims, GEN[1]]))[0]
    expected = [-WELL * exp(now - claim) / 6 for now, claim in zip(LOGP[0], claims, strict=True)]
    assert low.tolist() == pytest.approx(expected, rel=1e-12, abs=0)


# Claims


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("claim", [NAN, -INF])
def test_without_a_valid_claim_weight_and_ratio_use_the_old_policy(kind: str, claim: float) -> None:
    claims = tensor(GEN)
    claims[0, 1] = claim
    found = gradient(made(kind), gen_logp=claims)
    own = "nois" if kind in ("f_nois", "dis") else kind if kind in ("dr_grpo", "dapo", "nois") else "grpo"
    torch.testing.assert_close(found[0], gradient(made(own))[0], rtol=0, atol=1e-15)
    torch.testing.assert_close(found[1], gradient(made(kind))[1], rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_without_a_claim_is_filtered_but_not_masked(kind: str) -> None:
    found = on_the_batch(made(kind), gen_logp=tensor(WELL_CLAIMED))
    assert found.stats.filtered == kind.startswith("f_")
    assert found.stats.claimed == 3


def test_without_a_claim_the_sequence_mask_uses_the_old_policy() -> None:
    old = tensor([[-1.1, -0.9, -1.8], [-0.2, -0.2, 0.0]])  # (0.1 + 2.8) / 2 nats away
    found = on_the_batch(made("sequence_mask"), old_logp=old, gen_logp=tensor(WELL_CLAIMED))
    assert found.stats.filtered == 1


@pytest.mark.parametrize("kind", KINDS)
def test_losses_that_compare_with_generators_require_claims(kind: str) -> None:
    if kind in ("grpo", "dr_grpo", "dapo", "nois"):
        assert on_the_batch(made(kind), gen_logp=None).loss.item() == pytest.approx(BY_HAND[kind], abs=1e-14)
    else:
        with pytest.raises(ValueError, match="needs gen_logp"):
            on_the_batch(made(kind), gen_logp=None)


@pytest.mark.parametrize("cap", [0.5, 1.0, 2.0, 3.0])
def test_no_token_weighs_more_than_the_cap(cap: float) -> None:
    terms = [min(exp(w), cap) * t for w, t in zip([0.1, 1.0, -0.3], CLIPPED_WELL, strict=True)]
    found = on_the_batch(made("f_tis", cap=cap))
    assert found.loss.item() == pytest.approx(-sum(terms) / 6, abs=1e-14)
    over = sum(exp(w) > cap for w in [0.1, 1.0, -0.3, -0.6, -2.0])
    assert found.stats.means()["capped"] == pytest.approx(over / 5)


@pytest.mark.parametrize("kind", ["vis", "f_vis"])
def test_a_failure_with_a_tiny_claimed_probability_has_no_gradient_beyond_the_cap(kind: str) -> None:
    claims = tensor([GEN[0], [LOGP[1][0] - 20.0, LOGP[1][1] - 0.5, NAN]])
    found = gradient(made(kind), gen_logp=claims)
    assert found[1].tolist() == pytest.approx([0.0, -BADLY * exp(0.5) / 4, 0.0])
    assert on_the_batch(made(kind), logp=tensor(LOGP), gen_logp=claims).stats.capped == 2, (
        "a success beyond the clip too"
    )


# Invariances

NUMBERS = st.floats(-4.0, -0.01)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    """Completions of up to four tokens with all inputs of a loss."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    shape = (len(lengths), max(lengths))

    def rows() -> Tensor:
        flat = draw(st.lists(NUMBERS, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        return torch.tensor(flat, dtype=torch.float64).reshape(shape)

    advantages = draw(st.lists(st.floats(-2, 2), min_size=len(lengths), max_size=len(lengths)))
    claimed = torch.tensor(draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    return {
        "logp": rows(),
        "gen_logp": rows().masked_fill(~claimed[:, None], NAN),
        "old_logp": rows(),
        "ref_logp": rows(),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "mask": torch.arange(shape[1])[None, :] < torch.tensor(lengths)[:, None],
    }


def with_gradient(config: LossConfig, batch: dict[str, Tensor], divisor: int) -> tuple[float, Tensor, LossStats]:
    logp = batch["logp"].clone().requires_grad_()
    found = policy_loss(config, **(batch | {"logp": logp}), divisor=divisor)
    found.loss.backward()
    assert logp.grad is not None
    return found.loss.item(), logp.grad, found.stats


def lengths_of(batch: dict[str, Tensor]) -> list[int]:
    return batch["mask"].sum(1).tolist()


@pytest.mark.slow
@given(st.sampled_from(KINDS), batches(), st.sampled_from([0.0, NAN, INF, -INF, 1e30]), st.integers(1, 3))
def test_padding_changes_nothing(kind: str, batch: dict[str, Tensor], garbage: float, columns: int) -> None:
    config = made(kind, beta=0.1)
    divisor = divisor_of(config, lengths_of(batch))
    loss, gradients, stats = with_gradient(config, batch, divisor)
    extra = torch.full((len(batch["mask"]), columns), garbage, dtype=torch.float64)
    padded = dict(batch)
    for name in ("logp", "gen_logp", "old_logp", "ref_logp"):
        padded[name] = torch.cat([batch[name].masked_fill(~batch["mask"], garbage), extra], 1)
    padded["mask"] = torch.cat([batch["mask"], torch.zeros_like(extra, dtype=torch.bool)], 1)
    again, more, same = with_gradient(config, padded, divisor)
    assert again == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(more[:, : gradients.shape[1]], gradients, rtol=1e-12, atol=1e-12)
    assert (more[~padded["mask"]] == 0).all()
    assert same.means() == pytest.approx(stats.means(), rel=1e-12, abs=1e-12)


@pytest.mark.slow
@given(st.sampled_from(KINDS), batches(), st.data())
def test_losses_of_microbatches_add_up(kind: str, batch: dict[str, Tensor], data: st.DataObject) -> None:
    config = made(kind, beta=0.1)
    divisor = divisor_of(config, lengths_of(batch))
    loss, gradients, stats = with_gradient(config, batch, divisor)
    cut = data.draw(st.integers(1, len(batch["mask"]) - 1))
    parts = [
        with_gradient(config, {name: of[rows] for name, of in batch.items()}, divisor)
        for rows in (slice(None, cut), slice(cut, None))
    ]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradients, rtol=1e-12, atol=1e-12)
    assert (parts[0][2] + parts[1][2]).means() == pytest.approx(stats.means(), rel=1e-12, abs=1e-12)


# Bounds

Objective = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(log π_θ, log π_gen, Â, mask) → loss over the completions"""


def objective(config: LossConfig) -> Objective:
    """Return the loss of a single update, as peers compute it."""
    return lambda logp, gen, advantages, mask: (
        policy_loss(config, logp, gen, advantages, mask, divisor=divisor_of(config, mask.sum(1).tolist())).loss
    )


def check_weights(loss: Objective, bound: float, log_ratios: list[float], advantages: tuple[float, ...]) -> None:
    """Check that each token's gradient is finite and at most ``bound`` · |Â|, for completions of one token."""
    x, sign = (t.flatten() for t in torch.meshgrid(tensor([log_ratios])[0], tensor([[*advantages]])[0], indexing="ij"))
    logp = torch.full_like(x, -60.0)[:, None].requires_grad_()
    loss(logp, logp.detach() - x[:, None], sign, torch.ones_like(logp, dtype=torch.bool)).backward()
    assert logp.grad is not None
    weights = logp.grad[:, 0].abs() * len(x) / sign.abs()
    assert weights.isfinite().all()
    assert (weights <= bound * (1 + 1e-12)).all(), f"weight {weights.max():.3g}, bound {bound:g}"


BOUNDS = {"vis": 2.0, "f_vis": 2.0, "tis": 2.0, "f_tis": 2.0, "dis": 6.0, "dr_grpo": 1 / 8}
"""maximum weight of a token beside |Â|: the cap, 1 + ε', or by default R = 1"""
LOG_RATIOS = st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=20).map(lambda drawn: [*drawn, -50.0, 0.0, 50.0])


@pytest.mark.parametrize("kind", KINDS)
@given(log_ratios=LOG_RATIOS, size=st.floats(0.01, 5.0))
def test_no_weight_exceeds_the_bound_of_its_loss(kind: str, log_ratios: list[float], size: float) -> None:
    check_weights(objective(made(kind)), BOUNDS.get(kind, 1.0), log_ratios, (size, -size))


def test_the_check_of_bounds_fails_for_a_ratio_to_the_generator() -> None:
    """Clipped on one side only, it is unbounded for a negative advantage: the error that `tis` and `dis` avoid."""

    def one_sided(logp: Tensor, gen: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return policy_loss(made("grpo"), logp, None, advantages, mask, divisor=len(mask), old_logp=gen).loss

    check_weights(one_sided, 1.2, [-50.0, 0.0, 10.0], (1.0,))
    with pytest.raises(AssertionError, match="weight"):
        check_weights(one_sided, 1.2, [-50.0, 0.0, 10.0], (1.0, -1.0))


@given(batches())
def test_dis_with_wide_bounds_equals_the_unmasked_loss(batch: dict[str, Tensor]) -> None:
    wide = made("dis", clip_low=1 - 1e-10, clip_high=1e10)
    divisor = len(batch["mask"])
    _, found, stats = with_gradient(wide, batch | {"old_logp": None}, divisor)
    gen = torch.where(batch["gen_logp"].isfinite(), batch["gen_logp"], batch["logp"])
    _, expected, _ = with_gradient(made("nois"), batch | {"old_logp": gen}, divisor)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert stats.clipped == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("apart", [90.0, -90.0])
@pytest.mark.parametrize("which", ["gen_logp", "old_logp", "ref_logp"])
def test_log_ratios_of_90_leave_loss_and_gradient_finite(kind: str, apart: float, which: str) -> None:
    logp = torch.tensor([[-95.0, -1.0], [-1.0, -95.0]], requires_grad=True)  # fp32, in which e^90 is inf
    others = dict.fromkeys(("gen_logp", "old_logp", "ref_logp"), logp.detach())
    others[which] = logp.detach() - apart
    config = made(kind, beta=0.1)
    advantages = torch.tensor([1.0, -1.0])
    found = policy_loss(config, logp, advantages=advantages, mask=torch.ones(2, 2), divisor=2, **others)
    found.loss.backward()
    assert logp.grad is not None
    assert found.loss.isfinite()
    assert logp.grad.isfinite().all()
    assert all(math.isfinite(value) for value in found.stats.means().values())


def test_the_reference_gradient_does_not_vanish_far_from_the_reference() -> None:
    logp = tensor([[-0.1]], grad=True)  # almost certain, and nearly impossible under the reference
    found = policy_loss(
        made("grpo", beta=1.0), logp, None, torch.zeros(1), torch.ones(1, 1), divisor=1, ref_logp=tensor([[-60.0]])
    )
    found.loss.backward()
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(1.0)


def test_log_ratio_bound_is_an_option() -> None:
    logp = tensor([[-1.0]], grad=True)
    found = policy_loss(
        made("nois", log_ratio_bound=2.0),
        logp,
        None,
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, 1),
        divisor=1,
        old_logp=tensor([[-9.0]]),
    )
    assert found.loss.item() == pytest.approx(-exp(2.0))


# Misuse


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"advantages": torch.tensor([[WELL], [BADLY]])}, r"advantages is \[2, 1\], not \[2\]"),
        ({"mask": torch.ones(2, 4)}, r"mask is \[2, 4\]"),
        ({"gen_logp": tensor(GEN)[:1]}, r"gen_logp is \[1, 3\]"),
        ({"old_logp": tensor(OLD)[:, :1]}, r"old_logp is \[2, 1\]"),
        ({"ref_logp": tensor(REF)[0]}, r"ref_logp is \[3\]"),
        ({"divisor": 0}, "the divisor is 0"),
        ({"config": made("grpo", beta=0.04)}, "needs ref_logp"),
    ],
)
def test_invalid_inputs_are_rejected(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_the_batch(**{"config": made("f_tis")} | changed)


# Stats

STATS: dict[str, Callable[[], float]] = {
    "ratio": lambda: (exp(0.2) + exp(1.4) + exp(-0.5) + exp(-0.2) + exp(-2.8)) / 5,
    "kl_mismatch": lambda: (-0.2 - 1.4 + 0.5 + 0.2 + 2.8) / 5,
}


@pytest.mark.parametrize(
    ("kind", "clipped", "capped", "filtered"),
    [
        ("grpo", 2 / 5, 0, 0),
        ("dapo", 2 / 5, 0, 0),
        ("nois", 0, 0, 0),
        ("vis", 3 / 5, 1 / 5, 0),
        ("tis", 2 / 5, 1 / 5, 0),
        ("dis", 2 / 5, 0, 0),
        ("f_nois", 0, 0, 1),
        ("sequence_mask", 2 / 5, 0, 1),
    ],
)
def test_stats_count_clipped_capped_and_filtered(kind: str, clipped: float, capped: float, filtered: int) -> None:
    found = on_the_batch(made(kind)).stats.means()
    expected = {"clipped": clipped, "capped": capped, "filtered": filtered, "kl_reference": 0}
    assert found == pytest.approx(expected | {name: value() for name, value in STATS.items()}, abs=1e-14)


def test_stats_about_generators_are_means_over_claimed_tokens() -> None:
    found = on_the_batch(made("tis"), gen_logp=tensor(WELL_CLAIMED)).stats.means()
    assert found["ratio"] == pytest.approx((exp(0.2) + exp(1.4) + exp(-0.5)) / 3, abs=1e-14)
    assert found["kl_mismatch"] == pytest.approx((-0.2 - 1.4 + 0.5) / 3, abs=1e-14)
    assert found["capped"] == pytest.approx(1 / 3, abs=1e-14)


def test_a_sample_without_an_advantage_is_not_counted_as_filtered() -> None:
    nothing = torch.tensor([WELL, 0.0], dtype=torch.float64)
    assert on_the_batch(made("f_tis"), advantages=nothing).stats.filtered == 0


def test_stats_omit_means_over_no_token() -> None:
    found = on_the_batch(made("grpo"), gen_logp=None).stats.means()
    assert found.keys() == {"clipped", "kl_reference", "filtered"}
    assert LossStats().means() == {"filtered": 0}
