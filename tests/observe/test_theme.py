from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.observe.theme import thinned

POINTS = st.lists(st.none() | st.floats(-9, 9), max_size=300).map(lambda ys: [(float(x), y) for x, y in enumerate(ys)])


@given(POINTS, st.integers(4, 40))
def test_a_thinned_curve_has_the_same_extremes_ends_and_order(
    points: list[tuple[float, float | None]], most: int
) -> None:
    few = thinned(points, most)
    assert len(few) <= max(most, 4) + 4
    assert few == sorted(few, key=lambda point: point[0]) and set(few) <= set(points)
    assert few[-1:] == points[-1:]
    heights, kept = ([y for _, y in some if y is not None] for some in (points, few))
    assert (min(heights, default=0), max(heights, default=0)) == (min(kept, default=0), max(kept, default=0))
    assert (None in [y for _, y in points]) == (None in [y for _, y in few])
    if len(points) <= most:
        assert few == points
