"""Thinned curves, and colours that differ for colour-blind readers and can be read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.report.theme import DARK, PAPER, SERIES, luminance, points_to_draw, text_colour_on

HEIGHTS = st.lists(st.none() | st.floats(-9, 9), max_size=300)


@given(HEIGHTS, st.integers(4, 40))
def test_a_thinned_curve_has_the_same_extremes_ends_and_order(heights: list[float | None], most: int) -> None:
    places = points_to_draw(heights, most)
    assert len(places) <= max(most, 4) + 4
    assert places == sorted(set(places)) and set(places) <= set(range(len(heights)))
    assert not heights or places[-1] == len(heights) - 1
    known, kept = ([y for y in some if y is not None] for some in (heights, [heights[place] for place in places]))
    assert (min(known, default=0), max(known, default=0)) == (min(kept, default=0), max(kept, default=0))
    assert (None in heights) == (None in [heights[place] for place in places])
    if len(heights) <= most:
        assert places == list(range(len(heights)))


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SEEN = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ],
}  # fmt: skip


def lab(colour: str, seen: object) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as it is seen."""
    shares = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(xyz) @ np.clip(np.array(seen) @ linear, 1e-4, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", SEEN)
@pytest.mark.parametrize("dark", [False, True])
def test_the_first_curves_differ_for_colour_blind_readers(vision: str, dark: bool) -> None:
    """A difference of 2.3 is just seen; curves differ in dash and mark, too."""
    colours = [DARK.get(colour, colour) if dark else colour for colour in SERIES[:6]]
    for one, other in itertools.combinations(colours, 2):
        assert np.linalg.norm(lab(one, SEEN[vision]) - lab(other, SEEN[vision])) > 10, (one, other)


def test_words_on_bars_and_curves_on_the_ground_can_be_read() -> None:
    def contrast(one: str, other: str) -> float:
        light, deep = sorted((luminance(one), luminance(other)), reverse=True)
        return (light + 0.05) / (deep + 0.05)

    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    for colour in SERIES:
        assert contrast(text_colour_on(colour), colour) > 4.4
        assert contrast(DARK.get(colour, colour), DARK[PAPER]) > 3
