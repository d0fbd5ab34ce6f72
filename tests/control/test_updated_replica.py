"""Fast updates of a replica keep its cached properties, so they may not change what these derive from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.control.facts.events import RunStarted
from planaria.control.state.replica import ReplicaState, updated
from planaria.control.state.run import RunState

STARTED = RunStarted(name="r", seed=1, stages=2, steps=9, first_step=0, samples_per_step=4, wall_time=0.0)


def replica() -> ReplicaState:
    return RunState.start(STARTED).live[0]


def test_a_phase_is_updated() -> None:
    assert updated(replica(), phase="idle").phase == "idle"


@pytest.mark.parametrize("changes", [{"holders": {}}, {"phase": "left"}, {"unknown": 1}])
def test_what_cached_properties_derive_from_needs_a_new_replica(changes: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(changes))):
        updated(replica(), **changes)


def test_a_replica_that_has_left_returns_as_a_new_one() -> None:
    with pytest.raises(TypeError, match="phase"):
        updated(replace(replica(), phase="left"), phase="idle")
