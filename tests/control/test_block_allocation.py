"""Each block of samples is used exactly once, whichever replicas join and leave."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planaria.control.state.block_allocation import BlockAllocation, BlockSet

blocks = st.sets(st.integers(0, 30))


def next_for(allocation: BlockAllocation, replica: int, present: Collection[int], patience: int) -> int | None:
    """Return the block that a replica takes while ``present`` ones are live."""
    return allocation.next_for(replica, set(range(allocation.lanes)) - set(present), patience)


def used(members: set[int]) -> BlockSet:
    found = BlockSet()
    for block in sorted(members, reverse=True):
        found = found.adding(block)
    return found


@given(blocks, blocks)
def test_used_blocks_behave_like_a_set_of_numbers(members: set[int], gone: set[int]) -> None:
    allocation = used(members)
    assert {block for block in range(40) if block in allocation} == members
    assert len(allocation) == len(members)
    assert allocation.floor not in allocation
    assert all(block > allocation.floor for block in allocation.beyond), "one set has one form"
    less = allocation.without(gone & members)
    assert {block for block in range(40) if block in less} == members - gone
    assert less == used(members - gone)
    for floor in range(3):
        assert BlockSet.of(floor, members) == used({*range(floor), *members})


ACTIONS = ["step", "step", "step", "drop", "reserve", "save", "seal", "give up", "roll back", "leave", "come back"]


@given(
    st.integers(1, 4), st.integers(0, 24), st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=80)
)
def test_every_block_is_used_exactly_once_as_replicas_come_and_go(
    lanes: int, total: int, actions: list[tuple[str, int]]
) -> None:
    allocation = BlockAllocation(lanes, total)
    present = set(range(lanes))
    books: dict[int, list[int]] = {r: [] for r in present}
    durable: dict[int, int] = dict.fromkeys(present, 0)
    saved: dict[int, int] = {}

    for action, who in actions:
        r = who % lanes
        if action == "come back":
            present.add(r)
        elif r not in present:
            continue
        elif action == "step" and (block := next_for(allocation, r, present, 2)) is not None:
            assert all(block not in book for book in books.values()) and block < total
            assert all(other == r or taken != block for other, taken in allocation.in_progress.items())
            assert all(other == r or taken != block for other, taken in allocation.reserved.items())
            allocation = allocation.take(r, block).commit(r)
            books[r].append(block)
        elif action == "drop" and (block := next_for(allocation, r, present, 2)) is not None:
            allocation = allocation.take(r, block)
            assert next_for(allocation, r, present, 2) == block, "a dropped step keeps its samples"
        elif action == "reserve" and (block := next_for(allocation, r, present, 2)) is not None:
            allocation = allocation.reserve(r, block)
            assert next_for(allocation, r, present, 2) == block
            assert block not in {next_for(allocation, other, present, 2) for other in present - {r}}
        elif action == "save":
            allocation, saved[r] = allocation.save(r), len(books[r])
        elif action == "seal":
            durable |= saved
            allocation, saved = allocation.seal(), {}
        elif action == "give up":
            allocation, saved = allocation.give_up_save(), {}
        elif action == "roll back":
            allocation, saved = allocation.roll_back(r).give_up_save(), {}
            books[r] = books[r][: durable[r]]
        elif action == "leave" and len(present) > 1:
            present.discard(r)
            saved.pop(r, None)
            allocation = allocation.remove_replica(r)
        _agrees(allocation, books, saved)

    while not allocation.done:
        turn = [(r, block) for r in sorted(present) if (block := next_for(allocation, r, present, 2)) is not None]
        assert turn, "no replica takes the remaining samples"
        r, block = turn[0]
        allocation = allocation.take(r, block).commit(r)
        books[r].append(block)
    assert sorted(block for book in books.values() for block in book) == list(range(total))
    assert all(next_for(allocation, r, present, 2) is None for r in present)


def _agrees(allocation: BlockAllocation, books: dict[int, list[int]], saved: dict[int, int]) -> None:
    every = sorted(block for book in books.values() for block in book)
    assert [block for block in range(allocation.total) if block in allocation.used] == every
    then = sorted(block for r, book in books.items() for block in book[: saved.get(r)])
    assert [block for block in range(allocation.total) if block in allocation.saved] == then


@given(st.integers(1, 4), st.integers(1, 6), st.randoms())
def test_without_faults_assignments_do_not_depend_on_timing(lanes: int, steps: int, order: Any) -> None:
    """Every replica keeps to its own lane unless another lags too far behind."""
    allocation, took = BlockAllocation(lanes, lanes * steps), dict.fromkeys(range(lanes), 0)
    while not allocation.done:
        r = order.choice([r for r in range(lanes) if took[r] < steps])
        block = next_for(allocation, r, range(lanes), steps)
        assert block == r + lanes * took[r]
        allocation, took[r] = allocation.take(r, block).commit(r), took[r] + 1


def test_a_finished_replica_helps_the_slowest_but_leaves_its_last_blocks() -> None:
    allocation = BlockAllocation(2, 12)
    for _ in range(6):
        block = next_for(allocation, 0, {0, 1}, 3)
        assert block is not None
        allocation = allocation.take(0, block).commit(0)
    assert next_for(allocation, 0, {0, 1}, 3) == 1
    allocation = allocation.take(0, 1).commit(0)
    allocation = allocation.take(1, 3)
    assert next_for(allocation, 0, {0, 1}, 3) == 5
    assert next_for(allocation, 0, {0, 1}, 4) is None
    assert next_for(allocation, 0, {0}, 4) == 5, "no other replica will"


def test_blocks_beyond_the_total_do_not_count_as_used() -> None:
    allocation = BlockAllocation(2, 4, used({0, 1, 2, 5}))
    assert not allocation.done
    assert next_for(allocation, 1, {0, 1}, 9) == 3
