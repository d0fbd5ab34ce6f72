"""Frames as merge patches, also after old ones were joined."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planaria.report.live_page.frames import Frames, StateChange, apply_patch, difference, merge_patches

leaves = st.one_of(st.integers(0, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2), max_size=2))
states = st.recursive(
    st.dictionaries(st.sampled_from("wxyz"), leaves, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from("wxyz"), st.one_of(leaves, inner), max_size=4),
    max_leaves=12,
)
numbers = st.fixed_dictionaries({"step": st.integers(0, 99), "loss": st.fixed_dictionaries({"value": st.floats(0, 9)})})


@given(states, states)
def test_a_difference_leads_from_one_state_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply_patch(before, difference(before, after)) == after


@given(st.lists(numbers, min_size=3, max_size=3))
def test_joined_changes_do_what_both_do(three: list[dict[str, Any]]) -> None:
    first, second, third = three
    one, two = difference(first, second), difference(second, third)
    assert apply_patch(first, merge_patches(one, two)) == third


@given(
    st.lists(st.tuples(states, st.booleans()), max_size=120), st.integers(8, 40), st.integers(1, 6), st.integers(0, 120)
)
def test_any_number_of_frames_leads_to_the_same_state(
    reported: list[tuple[dict[str, Any], bool]], most: int, detailed: int, seen: int
) -> None:
    frames, state, drawn = Frames(most, min(detailed, most // 4)), dict[str, Any](), dict[str, Any]()
    last = -1
    for number, (after, routine) in enumerate(reported):
        if number == seen:  # a watcher stops reading and continues at the end
            for frame in frames.after(-1, len(frames)):
                drawn, last = apply_patch(drawn, frame.change), frame.number
        frames.add(StateChange(number, float(number), difference(state, after), routine=routine))
        state = after
    for frame in frames.after(last, len(frames)):
        drawn = apply_patch(drawn, frame.change)
    assert drawn == state
    everything = frames.after(-1, len(frames))
    assert [frame.number for frame in everything] == sorted({frame.number for frame in everything})
    assert everything[-1].number == len(reported) - 1 if reported else not everything


def test_a_long_run_is_as_fine_at_its_beginning_as_later() -> None:
    frames = Frames(600, 100)
    for number in range(100_000):
        frames.add(StateChange(number, float(number), {"step": number}, routine=number % 1000 != 500))
    kept = frames.after(-1, len(frames))
    assert len(kept) <= 600 and kept[-1].number == 99_999
    gaps = [after.number - before.number for before, after in pairwise(kept)]
    assert max(gaps) <= 1001
    assert sum(not frame.routine for frame in kept) == 100, "what is worth telling stays"
    assert sum(frame.weight for frame in kept) == 100_000
