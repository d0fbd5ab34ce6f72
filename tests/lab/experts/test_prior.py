"""What is believed before a text begins; above all, that no prior collapses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.lab.experts.posterior import cached, nearest, uniform


def test_at_zero_gap_the_cached_prior_stays_uniform() -> None:
    assert cached(torch.full((3, 50, 2), -50.0), decay=0.3).exp().tolist() == pytest.approx([1 / 3] * 3)


def test_a_hairs_breadth_does_not_silence_anybody() -> None:
    """0.001 nats a token over 100 texts of 128 tokens: as a running product that would be (1, 0)."""
    logps = torch.full((2, 100, 1), -300.0, dtype=torch.float64)
    logps[0] += 0.128
    first, second = cached(logps, decay=0.3).exp().tolist()
    assert 0.5 < first < 0.54
    assert first + second == pytest.approx(1)


def test_the_moving_average_worked_by_hand() -> None:
    """From (1/2, 1/2): a text that only the first can read, then one that only the second can."""
    logps = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])[..., None]
    first = 0.7 * (0.7 * 0.5 + 0.3)
    assert cached(logps, decay=0.3).exp().tolist() == pytest.approx([first, 1 - first])


def test_a_decay_of_seven_tenths_multiplies_the_old_by_three() -> None:
    """As HDEE's code weighs old and new: π ← 0.3 π + 0.7 posterior."""
    logps = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf, 0.0, 0.0]])[..., None]
    first = 0.3 * (0.3 * (0.3 * 0.5 + 0.7)) + 0.7 * 0.5
    assert cached(logps, decay=0.7).exp().tolist() == pytest.approx([first, 1 - first])


@given(st.lists(st.lists(st.floats(-1e5, 0), min_size=3, max_size=3), min_size=1, max_size=30))
def test_the_cached_prior_is_a_distribution_that_excludes_nobody(texts: list[list[float]]) -> None:
    found = cached(torch.tensor(texts, dtype=torch.float64).T[..., None], decay=0.3).exp()
    assert float(found.sum()) == pytest.approx(1)
    assert (found >= (1 / 3) * 0.7 ** len(texts) - 1e-12).all()


def test_the_order_of_domains_says_nothing() -> None:
    """Three experts, each by far the best on its own domain."""
    logps = torch.full((3, 20, 3), -400.0)
    logps[range(3), :, range(3)] = -100.0
    assert cached(logps, decay=0.3).exp().tolist() == pytest.approx([1 / 3] * 3)


def test_not_even_a_decay_of_one_excludes_anybody() -> None:
    assert torch.isfinite(cached(torch.tensor([[0.0], [-2000.0]])[..., None], decay=1.0)).all()


def test_whoever_is_nearest_is_believed_most_and_temperature_sharpens() -> None:
    centres, texts = torch.eye(2), torch.tensor([[1.0, 0.0], [0.7071, 0.7071]])
    found = nearest(texts, centres, temperature=0.1).exp()
    assert found[0, 0] == pytest.approx(1 / (1 + math.exp(-2 / 0.1)))
    assert found[:, 1].tolist() == pytest.approx([0.5, 0.5])
    assert nearest(texts, centres, temperature=10.0).exp()[0, 0] < 0.6


def test_uniform() -> None:
    assert uniform(4).exp().tolist() == pytest.approx([0.25] * 4)
