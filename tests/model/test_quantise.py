"""Few bits a number: how large the error is, how many bytes it takes, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.model.quantise import GROUP, SCALE_BYTES, STEPS, coded_bytes, decode, encode

BITS = st.sampled_from([2, 4, 8])
PUBLISHED = {2: 0.1188, 4: 0.01154}
"""mean square errors of the best uniform levels for a normal variable of variance 1 (Max 1960, table 2)"""


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def there_and_back(x: Tensor, bits: int) -> Tensor:
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
def test_no_other_spacing_serves_a_normal_variable_better(bits: int) -> None:
    best = expected_error(STEPS[bits], bits)
    assert best < min(expected_error(STEPS[bits] * near, bits) for near in (0.97, 1.03))
    if bits in PUBLISHED:
        assert best == pytest.approx(PUBLISHED[bits], rel=2e-3)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("spread", [1e-2, 1.0, 100.0])
def test_normal_numbers_come_back_with_the_published_error(bits: int, spread: float) -> None:
    x = spread * normal(100_000)
    error = (there_and_back(x, bits) - x).square().mean().item() / spread**2
    # A group's own root mean square fits its numbers a little better than the distribution's does.
    assert 0.9 * expected_error(STEPS[bits], bits) < error < 1.01 * expected_error(STEPS[bits], bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("count", [20, GROUP - 1, GROUP + 20])
def test_a_group_that_is_not_full_is_no_worse(bits: int, count: int) -> None:
    rows = [normal(count, seed) for seed in range(200)]
    tails = [(there_and_back(x, bits) - x)[-(count % GROUP) :] for x in rows]
    assert torch.cat(tails).square().mean().item() < 1.05 * expected_error(STEPS[bits], bits)


@given(st.integers(0, 600), BITS, st.floats(1e-3, 1e3), st.integers(0, 99))
def test_no_number_within_the_levels_is_off_by_more_than_half_a_step(
    count: int, bits: int, spread: float, seed: int
) -> None:
    x = spread * normal(count, seed)
    found = there_and_back(x, bits)
    assert found.shape == x.shape and found.dtype == torch.float32
    for start in range(0, count, GROUP):
        group, back = x[start : start + GROUP], found[start : start + GROUP]
        step = max(group.square().mean().sqrt().item() * STEPS[bits], torch.finfo(torch.float16).tiny)
        reach = step * (1 << (bits - 1))
        # Beyond the outermost level it is the distance to that; half precision of the scale costs 2⁻¹¹ of the level.
        allowed = (group.abs() - reach + step / 2).clamp(min=step / 2) + 1e-3 * reach
        assert ((back - group).abs() <= allowed).all()


@given(st.integers(0, 2000), BITS)
def test_it_takes_the_bytes_that_are_announced(count: int, bits: int) -> None:
    coded = encode(normal(count), bits)
    assert coded.dtype == torch.uint8 and coded.shape == (coded_bytes(count, bits),)
    groups = math.ceil(count / GROUP)
    assert coded_bytes(count, bits) == groups * (SCALE_BYTES + GROUP * bits // 8)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_are_read_lowest_bits_first(bits: int) -> None:
    half = 1 << (bits - 1)
    levels = torch.arange(GROUP) % (2 * half) - half + 0.5
    # A step that is a power of two, which half precision holds exactly.
    x = levels * 0.25
    scale = torch.tensor([0.25]).half().view(torch.uint8)
    coded = torch.cat([scale, packed_by_hand((levels + half - 0.5).long().tolist(), bits)])
    assert torch.equal(decode(coded, GROUP, bits), x)


def packed_by_hand(levels: list[int], bits: int) -> Tensor:
    """The lowest bits of a byte hold the first of its levels."""
    per = 8 // bits
    rows = [levels[i : i + per] for i in range(0, len(levels), per)]
    return torch.tensor([sum(level << (bits * place) for place, level in enumerate(row)) for row in rows]).byte()


@given(st.sampled_from([0.0, 1e-30, 1e-6, 1e5, 1e30, 3e38]), BITS)
def test_extremes_stay_finite_and_keep_their_sign(size: float, bits: int) -> None:
    x = size * torch.where(torch.arange(300) % 2 == 0, 1.0, -1.0)
    found = there_and_back(x, bits)
    assert found.isfinite().all()
    if size:
        assert torch.equal(found.sign(), x.sign())
    else:
        assert found.abs().max() < 1e-4


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
