"""Copies where stages have several nodes: the first node of each stage sends and keeps for all of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny import config_in, engine_of, losses

from planaria.cli.commands.train import check
from planaria.common.errors import UserError
from planaria.lab.inline.engine import InlineEngine
from planaria.models.packing import pack
from planaria.recovery.base import Copy
from schedules import on_schedule, shape

REDUNDANT: dict[str, Any] = {"strategy": "redundant"}


def scheduled(folder: Path, recovery: dict[str, Any]) -> InlineEngine:
    """Two nodes to each of four block stages, and two data nodes."""
    return engine_of(on_schedule(config_in(folder, recovery=recovery, **shape(0.5)), folder))


def whole(engine: InlineEngine) -> dict[int, bytes]:
    return {n: pack(r.state().trained).numpy().tobytes() for n, r in engine.runners.items()}


def lose(engine: InlineEngine, *nodes: int) -> str:
    for node in nodes:
        for parameter in engine.runners[node].parameters.values():
            parameter.detach().fill_(math.nan)
    return engine.lose(nodes).reason


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_stage_that_loses_all_its_nodes_comes_back_from_its_twin(stage: int, tmp_path: Path) -> None:
    struck, untroubled = scheduled(tmp_path, REDUNDANT), scheduled(tmp_path, REDUNDANT)
    plain = scheduled(tmp_path, {"strategy": "checkfree"})
    assert losses(struck, 2) == losses(untroubled, 2) == losses(plain, 2), "what is kept changes no loss"
    assert lose(struck, *struck.there.nodes(stage)) == ""
    assert whole(struck) == whole(untroubled)
    assert losses(struck, 3) == losses(untroubled, 3)


def test_a_twin_dies_with_the_node_that_kept_it_though_its_stage_lives_on(tmp_path: Path) -> None:
    engine = scheduled(tmp_path, REDUNDANT)
    losses(engine, 2)
    host, second = engine.there.nodes(1)
    assert engine.keeping[second].nbytes == 0 < engine.keeping[host].nbytes
    assert "not whole yet" in lose(engine, host, *engine.there.nodes(2))
    engine = scheduled(tmp_path, REDUNDANT)
    losses(engine, 2)
    assert lose(engine, host) == "", "it is copied from the other node of its stage"
    losses(engine, 1)
    before = whole(engine)
    assert lose(engine, *engine.there.nodes(2)) == "" and whole(engine) == before, "and keeps a twin again"


def test_slots_are_placed_at_first_nodes(tmp_path: Path) -> None:
    engine = scheduled(tmp_path, REDUNDANT)
    first = {stage: engine.there.nodes(stage)[0] for stage in engine.there.stages}
    expected = [Copy((first[stage],), first[(stage - 1) % 5]) for stage in range(5)]
    assert [slot.copy for slot in engine._chain.placed(engine.there)] == expected


def test_copies_go_with_a_schedule_but_not_with_replicas_nor_partners_without_swapped_routes(tmp_path: Path) -> None:
    for strategy in ("redundant", "echo, checkpoint"):
        check(on_schedule(config_in(tmp_path, recovery={"strategy": strategy}, **shape(0.5)), tmp_path))
    with pytest.raises(UserError, match="a lost stage is copied from another replica"):
        check(config_in(tmp_path, recovery=REDUNDANT, exchange={"replicas": 2, "kind": "noloco"}))
    swapped = {"routing": {**shape(0.5)["routing"], "kind": "swapped"}, "recovery": {"strategy": "checkfree_plus"}}
    with pytest.raises(UserError, match=r"needs routing.kind = 'swapped', not 'a schedule'"):
        check(on_schedule(config_in(tmp_path, **{**shape(0.5), **swapped}), tmp_path))
