"""Parities of all stages at one another: whatever so many stages are lost together, they come back bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from tiny import engine_of, losses

from planaria.config import RunConfig
from planaria.engine.inline import InlineEngine
from planaria.engine.prepare import check
from planaria.errors import UserError
from planaria.model.packing import pack
from planaria.recovery.base import Replica
from planaria.recovery.snapshot import Snapshot

Recipe = Callable[..., RunConfig]
STAGES = 4


def made(config: Recipe, tolerate: int, strategy: str = "snapshot", **sections: Any) -> InlineEngine:
    recovery = {"strategy": strategy, "options": {"tolerate": tolerate}}
    return engine_of(config(recovery=recovery, optim={"weight_decay": 0.1, "clip": 0.5}, **sections))


def whole(engine: InlineEngine) -> dict[int, bytes]:
    return {node: pack(runner.state().trained).numpy().tobytes() for node, runner in engine.runners.items()}


def lose(engine: InlineEngine, nodes: tuple[int, ...]) -> str:
    for node in nodes:
        for parameter in engine.runners[node].parameters.values():
            parameter.detach().fill_(math.nan)
    return engine.lose(nodes).reason


@pytest.mark.parametrize("tolerate", [1, 2])
def test_whatever_is_lost_together_comes_back_bit_for_bit(tolerate: int, config: Recipe) -> None:
    struck, untroubled = made(config, tolerate), made(config, tolerate)
    assert losses(struck, 2) == losses(untroubled, 2)
    for size in range(1, tolerate + 1):
        for lost in combinations(range(STAGES + 1), size):
            assert lose(struck, lost) == "", lost
            assert whole(struck) == whole(untroubled), lost
            assert losses(struck, 1) == losses(untroubled, 1), lost


def test_more_than_that_go_to_the_next_strategy_with_the_reason(config: Recipe) -> None:
    engine = made(config, 1)
    losses(engine, 2)
    assert "2 of 5 stages are lost together (1, 2)" in lose(engine, (1, 2))
    chained = made(config, 1, "snapshot, copy")
    losses(chained, 2)
    assert lose(chained, (1, 3)) == ""


def test_a_stage_that_has_not_sent_since_it_is_new_counts_as_lost() -> None:
    once, twice = Snapshot(tolerate=1), Snapshot(tolerate=2)
    ages = {0: 3, 1: 3, 2: 0, 3: 3, 4: 3}
    answer = once.donors(frozenset({4}), Replica(STAGES, ages))
    assert answer.refused == {4: "1 of 5 stages are lost together (4, and 2 have not taken part in a step since)"}
    assert twice.donors(frozenset({4}), Replica(STAGES, ages)).donors == {4: (0, 1, 3)}
    assert once.donors(frozenset({4}), Replica(STAGES, ages | {2: 1})).donors == {4: (0, 1, 2, 3)}


def test_stages_that_may_be_skipped_are_refused(config: Recipe) -> None:
    """Every parity is of all stages: behind those that went on, it would bring back nobody."""
    recipe = config(recovery={"strategy": "snapshot", "meanwhile": "skip"})
    with pytest.raises(
        UserError, match=r"snapshot needs recovery.meanwhile = 'wait', not 'skip': steps that one stage"
    ):
        check(recipe)


def test_a_group_too_small_for_what_it_is_to_survive_is_refused(config: Recipe) -> None:
    with pytest.raises(UserError, match=r"recovery.options.tolerate = 3: the ends and 4 block stages are 5"):
        made(config, 3)
