from __future__ import annotations

from planaria.control.state.replica import after_commit

PAIRS = [(0, 1), (2, 3)]


def test_a_commit_of_all_nodes_increments_all_ages() -> None:
    assert after_commit({0: 3, 1: 0, 2: 5}, frozenset(), (), PAIRS) == ({0: 4, 1: 1, 2: 6}, frozenset())


def test_ages_stop_while_a_node_is_skipped() -> None:
    assert after_commit({0: 3, 1: 0}, frozenset({2}), {1}, PAIRS) == ({0: 3, 1: 0}, frozenset({1, 2}))


def test_ages_restart_at_both_ends_of_a_copy_that_missed_steps() -> None:
    staleness, rested = after_commit({0: 3, 1: 2, 2: 5, 3: 7, 4: 9}, frozenset({1}), (), PAIRS)
    assert (staleness, rested) == ({0: 1, 1: 1, 2: 6, 3: 8, 4: 10}, frozenset())
