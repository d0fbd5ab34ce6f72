from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.observe.theme import thinned

HEIGHTS = st.lists(st.none() | st.floats(-9, 9), max_size=300)


@given(HEIGHTS, st.integers(4, 40))
def test_a_thinned_curve_has_the_same_extremes_ends_and_order(heights: list[float | None], most: int) -> None:
    places = thinned(heights, most)
    assert len(places) <= max(most, 4) + 4
    assert places == sorted(set(places)) and set(places) <= set(range(len(heights)))
    assert not heights or places[-1] == len(heights) - 1
    known, kept = ([y for y in some if y is not None] for some in (heights, [heights[place] for place in places]))
    assert (min(known, default=0), max(known, default=0)) == (min(kept, default=0), max(kept, default=0))
    assert (None in heights) == (None in [heights[place] for place in places])
    if len(heights) <= most:
        assert places == list(range(len(heights)))
