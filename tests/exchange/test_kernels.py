"""Kernels compiled by numba have the bits of torch's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.exchange.robust import combining, coordinate
from planaria.exchange.robust.combining import combine
from planaria.exchange.robust.coordinate import trimmed_mean
from planaria.exchange.robust.products import NotFinite
from planaria.exchange.robust.rules import RULES

pytest.importorskip("numba")
ODD = (0.0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 1.0, -1.0)


@contextmanager
def numba(there: bool) -> Iterator[None]:
    """Enable or disable numba."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (coordinate, combining):
            patch.setattr(module, "COMPILED", there)
        yield


def both(made: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the results with and without numba."""
    with numba(True):
        one = made()
    with numba(False):
        return one, made()


def same(one: Tensor, other: Tensor) -> bool:
    """To the last bit, the signs of zeros included."""
    return torch.equal(one, other) and torch.equal(torch.signbit(one), torch.signbit(other))


def drawn(n: int, d: int, seed: int) -> Tensor:
    """fp32 of all sizes, with subnormal numbers and zeros of both signs."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw) * 10.0 ** torch.randint(-8, 9, (n, d), generator=draw)
    odd = torch.tensor(ODD)[torch.randint(0, len(ODD), (n, d), generator=draw)]
    return torch.where(torch.rand(n, d, generator=draw) < 0.3, odd, x)


@settings(max_examples=60)
@given(n=st.integers(1, 17), d=st.integers(1, 700), data=st.data(), seed=st.integers(0, 10**6))
def test_compiled_and_plain_trimmed_means_have_the_same_bits(n: int, d: int, data: st.DataObject, seed: int) -> None:
    trim = data.draw(st.integers(0, (n - 1) // 2))
    x = drawn(n, d, seed)
    before = x.clone()
    assert same(*both(lambda: trimmed_mean(list(x), trim)))
    assert same(x, before)


def test_a_middle_of_zeros_has_no_sign() -> None:
    """The smaller of two zeros is another one on other machines."""
    for rows in ([0.0, -0.0, -0.0], [-0.0, -0.0, -0.0], [-0.0]):
        x = [torch.full((9,), row) for row in rows]
        assert not any(bool(torch.signbit(found).any()) for found in both(lambda x=x: trimmed_mean(x, 0)))


def test_vectors_of_several_chunks_have_the_same_bits() -> None:
    x = [*torch.randn(5, 150_001, generator=torch.Generator().manual_seed(1))]
    cut = [[row[:70_000], row[70_000:70_000], row[70_000:]] for row in x]
    for rule, mix in (("median", "none"), ("trimmed_mean", "none"), ("median", "nnm")):
        assert same(*both(lambda r=rule, m=mix: combine(RULES.make(r, {}), cut, m).value)), rule


def test_rows_may_have_any_memory_layout() -> None:
    x = drawn(5, 40, 3)
    assert same(*both(lambda: trimmed_mean([*x.T.contiguous().T], 1))), "columns of a matrix"
    assert same(*both(lambda: trimmed_mean([x[4], x[0], x[0], x[2, :].clone(), x[1]], 2))), "in any order, and twice"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 30_000])
def test_numbers_that_are_not_finite_are_found_by_both(odd: float, where: int) -> None:
    for rule in ("median", "multikrum", "clipping"):
        x = torch.randn(5, 30_001, generator=torch.Generator().manual_seed(2))
        x[3, where] = odd
        for there in (True, False):
            with numba(there), pytest.raises(NotFinite):
                combine(RULES.make(rule, {}), list(x))
