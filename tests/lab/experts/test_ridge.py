"""Closed-form ridge regression against least squares, and additivity of its sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from planaria.common.errors import UserError
from planaria.lab.experts import ridge


def drawn(seed: int, domains: int, dim: int, rows: int = 60) -> list[Tensor]:
    """Return rows of each domain around its own centre, in fp64."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows + n, dim, generator=draw, dtype=torch.float64) + torch.randn(dim, generator=draw)
        for n in range(domains)
    ]


def by_qr(rows: list[Tensor], lam: float, bias: bool) -> Tensor:
    """Minimise ‖[X 1] W - Y‖² + λ‖W‖² as least squares with additional rows √λ I, by QR."""
    x = torch.cat(rows)
    x = F.pad(x, (0, 1), value=1.0) if bias else x
    y = F.one_hot(torch.cat([torch.full((len(own),), n) for n, own in enumerate(rows)])).double()
    q, r = torch.linalg.qr(torch.cat((x, lam**0.5 * torch.eye(x.shape[1], dtype=x.dtype))))
    return torch.linalg.solve_triangular(r, q.T @ F.pad(y, (0, 0, 0, x.shape[1])), upper=True)


@settings(max_examples=40)
@given(
    st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 20), st.sampled_from([0.0, 1e-2, 1.0, 1e3]), st.booleans()
)
def test_the_closed_form_is_least_squares(seed: int, domains: int, dim: int, lam: float, bias: bool) -> None:
    rows = drawn(seed, domains, dim)
    expected, sums = by_qr(rows, lam, bias), [ridge.sums(own) for own in rows]
    assert float((ridge.router(sums, lam, bias, unit=False) - expected).abs().max()) <= 1e-8
    norms = expected[:dim].norm(dim=0)
    if float(norms.min()) > 1e-6:  # a single domain needs only the bias
        assert torch.allclose(ridge.router(sums, lam, bias), expected / norms, rtol=1e-6, atol=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 59))
def test_sums_of_two_halves_are_those_of_the_whole(seed: int, cut: int) -> None:
    (rows,) = drawn(seed, 1, 8)
    whole = ridge.sums(rows)
    torch.testing.assert_close(ridge.sums(rows[:cut]) + ridge.sums(rows[cut:]), whole, rtol=1e-12, atol=1e-10)
    assert torch.allclose(whole, whole.T) and float(whole[-1, -1]) == len(rows)


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_a_removed_domain_leaves_no_trace(seed: int) -> None:
    """Even if one total is kept, to which domains are added and from which they are subtracted."""
    rows = drawn(seed, 3, 6)
    sums = [ridge.sums(own) for own in rows]
    total = sums[0] + sums[1] + sums[2] - sums[1]
    regular = total + ridge.RIDGE * torch.eye(7, dtype=torch.float64)
    by_total = torch.linalg.solve(regular, torch.stack([sums[0][:, -1], sums[2][:, -1]], 1))
    never = ridge.router([sums[0], sums[2]], ridge.RIDGE, unit=False)
    assert float((by_total - never).abs().max()) <= 1e-6


def test_columns_have_unit_weights_and_scaled_biases() -> None:
    sums = [ridge.sums(own) for own in drawn(0, 3, 5)]
    raw, unit = ridge.router(sums, 1.0, unit=False), ridge.router(sums, 1.0)
    assert unit[:5].norm(dim=0).tolist() == pytest.approx([1.0] * 3)
    torch.testing.assert_close(unit[-1], raw[-1] / raw[:5].norm(dim=0))


@pytest.mark.parametrize(("count", "bias"), [(3, True), (5, True), (4, False)])
def test_fewer_rows_than_numbers_need_a_lambda(count: int, bias: bool) -> None:
    sums = [ridge.sums(torch.randn(count, 5).double())]
    with pytest.raises(UserError, match=rf"λ = 0: {count} tokens for {5 + bias} numbers .* use a larger λ"):
        ridge.router(sums, 0.0, bias)
    assert ridge.router(sums, 1e-2, bias).isfinite().all()


def test_identical_rows_need_a_lambda() -> None:
    sums = [ridge.sums(torch.ones(50, 5).double())]
    with pytest.raises(UserError, match="leave more than one solution"):
        ridge.router(sums, 0.0)
