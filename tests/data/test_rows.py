"""Packing dialogues into rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planaria.data.dataset import LEARNED, START
from planaria.data.dialogues import Dialogue
from planaria.data.rows import DialogueCounts, Packer, learnable_dialogues, padded_row, split

SIZES = st.lists(st.integers(2, 40), max_size=60)


def dialogue(number: int, size: int) -> Dialogue:
    return Dialogue(np.full(size, number, np.uint32), np.ones(size, np.bool_))


@given(sizes=SIZES, length=st.integers(4, 40))
def test_every_dialogue_is_in_one_row_whole_or_cut(sizes: list[int], length: int) -> None:
    packer, count, rows = Packer(length, together=True), DialogueCounts(), []
    for one in learnable_dialogues((dialogue(n, size) for n, size in enumerate(sizes)), length, count):
        rows += [content] if (content := packer.add(one)) else []
    rows += packer.rest()
    placed = sorted(int(one.ids[0]) for content in rows for one in content)
    assert placed == [*range(len(sizes))] and count.taken == len(sizes)
    assert count.longer == sum(size > length for size in sizes)
    for content in rows:
        ids, marks = padded_row(content, length, padding=999)
        used = sum(len(one.ids) for one in content)
        assert (ids[used:] == 999).all() and not (marks[used:] & LEARNED).any()
        assert int((marks & START > 0).sum()) == len(content) + (used < length)
        assert int((marks & LEARNED).sum()) == used - len(content), "a first token is no target"


@given(sizes=SIZES)
def test_best_fit_needs_no_more_rows_than_first_come(sizes: list[int]) -> None:
    """The bound of any packing that closes a row only when a dialogue does not fit: neighbours exceed a row."""
    packer = Packer(40, together=True)
    rows = [content for n, size in enumerate(sizes) if (content := packer.add(dialogue(n, size)))] + [*packer.rest()]
    assert len(rows) <= 2 * sum(sizes) / 40 + 1


@given(sizes=SIZES, share=st.floats(0, 0.5))
def test_validation_gets_its_share_of_the_tokens(sizes: list[int], share: float) -> None:
    found = [*split((dialogue(n, size) for n, size in enumerate(sizes)), share)]
    held = sum(len(one.ids) for withheld, one in found if withheld)
    assert len(found) == len(sizes) and held <= share * sum(sizes)
    assert held > share * sum(sizes) - 41
