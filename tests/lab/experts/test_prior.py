"""Priors before a text begins, which never collapse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.lab.experts.posterior import cached_prior, centre_scores

APART = torch.full((3, 20, 3), -400.0)
APART[range(3), :, range(3)] = -100.0


@pytest.mark.parametrize(
    ("logps", "decay", "expected"),
    [
        (torch.full((3, 50, 2), -50.0), 0.3, [1 / 3] * 3),  # no gap
        (APART, 0.3, [1 / 3] * 3),  # the order of domains does not matter: each expert is by far the best on its own
        # From (1/2, 1/2): a text that only the first can read, then one that only the second can.
        (torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])[..., None], 0.3, [0.7 * (0.7 * 0.5 + 0.3), None]),
        # HDEE's code: π ← 0.3 π + 0.7 posterior.
        (
            torch.tensor([[0.0, -math.inf, 0.0], [-math.inf, 0.0, 0.0]])[..., None],
            0.7,
            [0.3 * (0.3 * (0.3 * 0.5 + 0.7)) + 0.7 * 0.5, None],
        ),
    ],
)
def test_the_cached_prior_is_a_moving_average(logps: Tensor, decay: float, expected: list[float | None]) -> None:
    numbers = [1 - (expected[0] or 0) if number is None else number for number in expected]
    assert cached_prior(logps, decay).exp().tolist() == pytest.approx(numbers)


def test_a_tiny_difference_does_not_exclude_an_expert() -> None:
    """0.001 nats per token over 100 texts of 128 tokens; as a running product that would be (1, 0)."""
    logps = torch.full((2, 100, 1), -300.0, dtype=torch.float64)
    logps[0] += 0.128
    first, second = cached_prior(logps, decay=0.3).exp().tolist()
    assert 0.5 < first < 0.54
    assert first + second == pytest.approx(1)


@given(st.lists(st.lists(st.floats(-1e5, 0), min_size=3, max_size=3), min_size=1, max_size=30))
def test_the_cached_prior_is_a_distribution_without_zeros(texts: list[list[float]]) -> None:
    found = cached_prior(torch.tensor(texts, dtype=torch.float64).T[..., None], decay=0.3).exp()
    assert float(found.sum()) == pytest.approx(1)
    assert (found >= (1 / 3) * 0.7 ** len(texts) - 1e-12).all()


def test_the_nearest_expert_has_the_largest_prior_and_temperature_sharpens_it() -> None:
    centres, texts = torch.eye(2), torch.tensor([[1.0, 0.0], [0.7071, 0.7071]])
    found = (centre_scores(texts, centres) / 0.1).softmax(1)
    assert found[0, 0] == pytest.approx(1 / (1 + math.exp(-2 / 0.1)))
    assert found[1].tolist() == pytest.approx([0.5, 0.5])
    assert (centre_scores(texts, centres) / 10.0).softmax(1)[0, 0] < 0.6
