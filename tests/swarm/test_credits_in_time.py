"""The synchronous protocol: nobody honest loses anything while messages come in time, and somebody may when not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.credits.simulate import SyncScene, simulate_sync


def test_without_faults_and_in_time_it_is_paid() -> None:
    found = [simulate_sync(SyncScene(hops=hops, faulty=False), seed) for hops in (1, 4, 7) for seed in range(10)]
    assert all(one.paid and not one.losers for one in found)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2), st.integers())
def test_in_time_nobody_honest_loses_whoever_fails(hops: int, tolerated: int, seed: int) -> None:
    assert simulate_sync(SyncScene(hops, tolerated), seed).losers == 0


def test_late_messages_cost_honest_parties_even_if_nobody_fails() -> None:
    found = [simulate_sync(SyncScene(faulty=False, longest=8.0), seed) for seed in range(60)]
    assert any(one.losers for one in found)


def test_some_faults_stop_it() -> None:
    found = {simulate_sync(SyncScene(), seed).paid for seed in range(40)}
    assert found == {True, False}


def test_a_scene_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="delays above 0"):
        SyncScene(longest=0.0)
