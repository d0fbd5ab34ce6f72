"""Quantisation: error, size, and refusal of invalid bytes."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.quantisation import (
    GROUP,
    LARGEST,
    NORMAL_STEP,
    SCALE_BYTES,
    SMALLEST,
    coded_bytes,
    decode,
    encode,
    has_finite_scales,
)

BITS = st.sampled_from([2, 4, 8])
WHOLE = st.sampled_from([4, 8])
"""bits with levels at whole steps, the lowest at the largest number"""
FITTED = {8: 0.0308, 4: 0.3352, 2: NORMAL_STEP}
"""the best spacing for a normal variable, in standard deviations (Max 1960; 8 bits by the same criterion)"""
PUBLISHED = {2: 0.1188, 4: 0.01154}
"""mean square errors of the best uniform levels for a normal variable of variance 1 (Max 1960, table 2)"""


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def round_trip(x: Tensor, bits: int) -> Tensor:
    return decode(encode(x, bits), len(x), bits)


def expected_error(step: float, bits: int) -> float:
    """Mean square error for a standard normal variable of 2^bits levels at ±½, ±1½, … steps, by integrals."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def mass(low: float, high: float) -> float:
        return 0.5 * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2)))

    half, total = 1 << (bits - 1), 0.0
    for number in range(half):
        low, high, level = number * step, (number + 1) * step, (number + 0.5) * step
        if number == half - 1:
            high = 40.0
        squares = mass(low, high) + low * density(low) - high * density(high)
        total += squares - 2 * level * (density(low) - density(high)) + level * level * mass(low, high)
    return 2 * total


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_spacing_is_best_for_a_normal_variable(bits: int) -> None:
    best = expected_error(FITTED[bits], bits)
    assert best < min(expected_error(FITTED[bits] * near, bits) for near in (0.97, 1.03))
    if bits in PUBLISHED:
        assert best == pytest.approx(PUBLISHED[bits], rel=2e-3)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("spread", [1e-2, 1.0, 100.0])
def test_normal_numbers_have_at_most_the_published_error(bits: int, spread: float) -> None:
    x = spread * normal(100_000)
    error = (round_trip(x, bits) - x).square().mean().item() / spread**2
    # Levels up to a group's own largest number fit better than those for the distribution; with 8 bits twice as well.
    share = {2: (0.9, 1.01), 4: (0.9, 0.97), 8: (0.45, 0.55)}[bits]
    assert share[0] < error / expected_error(FITTED[bits], bits) < share[1]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("count", [20, GROUP - 1, GROUP + 20])
def test_a_partial_group_has_no_larger_error(bits: int, count: int) -> None:
    rows = [normal(count, seed) for seed in range(200)]
    tails = [(round_trip(x, bits) - x)[-(count % GROUP) :] for x in rows]
    assert torch.cat(tails).square().mean().item() < 1.05 * expected_error(FITTED[bits], bits)


@given(st.integers(0, 600), st.floats(1e-3, 1e3), st.integers(0, 99))
def test_two_bits_have_an_error_of_half_a_step_or_of_clipping(count: int, spread: float, seed: int) -> None:
    x = spread * normal(count, seed)
    found = round_trip(x, 2)
    assert found.shape == x.shape and found.dtype == torch.float32
    for group, back in zip(x.split(GROUP), found.split(GROUP), strict=True):
        step = max(group.square().mean().sqrt().item() * NORMAL_STEP, SMALLEST) if count else 0.0
        # Half precision of the scale costs 2⁻¹¹ of the level.
        allowed = (group.abs() - 1.5 * step).clamp(min=step / 2) + 2e-3 * step
        assert ((back - group).abs() <= allowed).all()


OUTLIERS = st.dictionaries(st.integers(0, 599), st.floats(-500_000, 500_000, width=32), max_size=6)


def trained(count: int, spread: float, outliers: dict[int, float], seed: int) -> Tensor:
    """Return normal numbers with outliers."""
    x = spread * normal(count, seed)
    for place, value in outliers.items():
        if place < count:
            x[place] = value
    return x


@given(st.integers(0, 600), WHOLE, st.sampled_from([0.0, 1e-8, 1e-6, 1e-4, 0.02, 1e3]), OUTLIERS, st.integers(0, 99))
def test_the_error_is_bounded_by_the_largest_number_of_the_group(
    count: int, bits: int, spread: float, outliers: dict[int, float], seed: int
) -> None:
    x, half = trained(count, spread, outliers, seed), 1 << (bits - 1)
    found = round_trip(x, bits)
    assert found.shape == x.shape and found.dtype == torch.float32
    for group, back in zip(x.split(GROUP), found.split(GROUP), strict=True):
        if not count:
            continue
        largest = group[group.abs().argmax()]
        step = (largest.abs() / half).clamp(min=SMALLEST)
        # Numbers of the other sign have no level at the far end.
        far = (group * -largest.sign() - (half - 1) * step).clamp(min=0)
        rounding = 2.0**-10 * largest.abs() + half * SMALLEST / 2
        assert ((back - group).abs() <= torch.maximum(step / 2, far) + rounding).all()
        assert (back[group.abs().argmax()] - largest).abs() <= rounding + (step / 2 if step <= SMALLEST else 0)


@given(st.integers(1, 600), WHOLE, st.sampled_from([0.0, 0.02, 1e3]), OUTLIERS, st.integers(0, 99))
def test_a_second_round_trip_changes_nothing(
    count: int, bits: int, spread: float, outliers: dict[int, float], seed: int
) -> None:
    """For scales in fp16's normal range."""
    once = round_trip(trained(count, spread, outliers, seed), bits)
    assert torch.equal(round_trip(once, bits), once)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_beside_an_outlier_are_exact(bits: int) -> None:
    x = torch.zeros(3 * GROUP)
    x[5], x[GROUP + 7] = 1000.0, -1000.0
    assert torch.equal(round_trip(x, bits), x)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nan_marks_the_scale_and_infinity_becomes_the_largest_number(bits: int) -> None:
    x = normal(2 * GROUP)
    x[3] = math.nan
    assert not has_finite_scales(encode(x, bits), bits)
    for infinite in (math.inf, -math.inf):
        x[3] = infinite
        found = round_trip(x, bits)
        assert has_finite_scales(encode(x, bits), bits) and found.isfinite().all()
        assert abs(found[3]) >= LARGEST and found[3].sign() == x[3].sign()
        assert torch.equal(found[GROUP:], round_trip(x[GROUP:], bits)), "other groups are unaffected"


@given(st.integers(0, 2000), BITS)
def test_the_size_is_as_computed(count: int, bits: int) -> None:
    coded = encode(normal(count), bits)
    assert coded.dtype == torch.uint8 and coded.shape == (coded_bytes(count, bits),)
    groups = math.ceil(count / GROUP)
    assert coded_bytes(count, bits) == groups * (SCALE_BYTES + GROUP * bits // 8)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_levels_are_packed_lowest_bits_first(bits: int) -> None:
    half = 1 << (bits - 1)
    places = torch.arange(GROUP) % (2 * half)
    levels = places - half + (0.5 if bits == 2 else 0.0)
    for step in (0.25, -0.25):  # a power of two, which half precision holds exactly
        scale = torch.tensor([step]).half().view(torch.uint8)
        coded = torch.cat([scale, packed_by_hand(places.tolist(), bits)])
        assert torch.equal(decode(coded, GROUP, bits), levels * step)


def packed_by_hand(levels: list[int], bits: int) -> Tensor:
    """The lowest bits of a byte hold the first of its levels."""
    per = 8 // bits
    rows = [levels[i : i + per] for i in range(0, len(levels), per)]
    return torch.tensor([sum(level << (bits * place) for place, level in enumerate(row)) for row in rows]).byte()


@given(st.sampled_from([0.0, 1e-30, 1e-6, 1e5, 1e30, 3e38]), BITS)
def test_extremes_stay_finite_and_keep_their_sign_or_vanish(size: float, bits: int) -> None:
    x = size * torch.where(torch.arange(300) % 2 == 0, 1.0, -1.0)
    found = round_trip(x, bits)
    assert found.isfinite().all()
    if size > SMALLEST or (size and bits == 2):
        assert torch.equal(found.sign(), x.sign())
    else:
        assert found.abs().max() < 1e-4 and (bits == 2 or not found.any())


@pytest.mark.slow
@given(BITS, st.integers(1, 400), st.integers(-3, 3).filter(bool))
def test_bytes_of_another_length_are_refused(bits: int, count: int, off: int) -> None:
    coded = encode(normal(count), bits)
    wrong = torch.cat([coded, coded])[: len(coded) + off]
    with pytest.raises(ValueError, match=f"{count} numbers of {bits} bits are {len(coded)} bytes, not torch.uint8"):
        decode(wrong, count, bits)
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        decode(coded.float(), count, bits)
    with pytest.raises(ValueError, match="bytes, not"):
        decode(coded.view(1, -1), count, bits)


@pytest.mark.parametrize(
    ("bits", "digest"), [(2, "d3921ab3ec542e7c"), (4, "27bf02f5c5b0641a"), (8, "7a9e37389c84fc5b")]
)
def test_encoded_numbers_are_golden(bits: int, digest: str) -> None:
    """Stored copies and messages of another release have the same bytes."""
    x = (torch.arange(1000) * 7919 % 2003 - 1001) / 64
    assert hashlib.sha256(encode(x, bits).numpy().tobytes()).hexdigest()[:16] == digest
