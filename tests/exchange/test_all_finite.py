"""The check that no number of a message is infinite or NaN."""

from __future__ import annotations

import math

import pytest
import torch

from planaria.common.tensors import all_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (1 << 16,)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_anywhere(
    dtype: torch.dtype, shape: tuple[int, ...], bad: float
) -> None:
    numbers = torch.full(shape, torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(numbers) and all_finite(-numbers), "a sum would overflow"
    for place in (0, numbers.numel() // 2, numbers.numel() - 1):
        damaged = numbers.clone()
        damaged.view(-1)[place] = bad
        assert not all_finite(damaged)


def test_no_numbers_are_finite() -> None:
    assert all_finite(torch.empty(0)) and all_finite(torch.empty(3, 0))
