"""Copies where stages have several nodes: the first node of each stage sends and keeps for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import config_in, engine_of, lose, losses, whole

from planaria.cli.commands.train import check
from planaria.common.errors import UserError
from planaria.lab.inline.engine import InlineEngine
from planaria.recovery.base import Copy
from schedules import on_schedule, shape

REDUNDANT: dict[str, Any] = {"strategy": "redundant"}


def scheduled(folder: Path, recovery: dict[str, Any]) -> InlineEngine:
    """Two nodes to each of four block stages, and two data nodes."""
    return engine_of(on_schedule(config_in(folder, recovery=recovery, **shape(0.5)), folder))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_stage_without_nodes_is_restored_from_its_copy(stage: int, tmp_path: Path) -> None:
    struck, undisturbed = scheduled(tmp_path, REDUNDANT), scheduled(tmp_path, REDUNDANT)
    plain = scheduled(tmp_path, {"strategy": "checkfree"})
    assert losses(struck, 2) == losses(undisturbed, 2) == losses(plain, 2), "what is kept changes no loss"
    assert lose(struck, *struck.active_nodes.nodes(stage)).reason == ""
    assert whole(struck) == whole(undisturbed)
    assert losses(struck, 3) == losses(undisturbed, 3)


def test_a_copy_is_lost_with_the_node_that_kept_it(tmp_path: Path) -> None:
    engine = scheduled(tmp_path, REDUNDANT)
    losses(engine, 2)
    host, second = engine.active_nodes.nodes(1)
    assert engine.copies[second].nbytes == 0 < engine.copies[host].nbytes
    assert "not whole yet" in lose(engine, host, *engine.active_nodes.nodes(2)).reason
    engine = scheduled(tmp_path, REDUNDANT)
    losses(engine, 2)
    assert lose(engine, host).reason == "", "it is copied from the other node of its stage"
    losses(engine, 1)
    before = whole(engine)
    assert lose(engine, *engine.active_nodes.nodes(2)).reason == "" and whole(engine) == before, (
        "and keeps a twin again"
    )


def test_copies_are_kept_at_first_nodes(tmp_path: Path) -> None:
    engine = scheduled(tmp_path, REDUNDANT)
    first = {stage: engine.active_nodes.nodes(stage)[0] for stage in engine.active_nodes.stages}
    expected = [Copy((first[stage],), first[(stage - 1) % 5]) for stage in range(5)]
    assert [slot.copy for slot in engine._chain.placed(engine.active_nodes)] == expected


def test_copies_need_one_replica_and_partners_need_swapped_routes(tmp_path: Path) -> None:
    for strategy in ("redundant", "echo, checkpoint"):
        check(on_schedule(config_in(tmp_path, recovery={"strategy": strategy}, **shape(0.5)), tmp_path))
    with pytest.raises(UserError, match="a lost stage is copied from another replica"):
        check(config_in(tmp_path, recovery=REDUNDANT, exchange={"replicas": 2, "kind": "noloco"}))
    swapped = {"routing": {**shape(0.5)["routing"], "kind": "swapped"}, "recovery": {"strategy": "checkfree_plus"}}
    with pytest.raises(UserError, match=r"needs routing.kind = 'swapped', not 'a schedule'"):
        check(on_schedule(config_in(tmp_path, **{**shape(0.5), **swapped}), tmp_path))
