from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.config.schema import RunConfig
from planaria.control.decisions import Replan
from planaria.control.events import Replanned
from planaria.runtime.engine import fleet as replanner
from planaria.runtime.engine.fleet import Replanner
from planaria.runtime.engine.resolved import ResolvedRun
from schedules import on_schedule, shape


def made(config: Callable[..., RunConfig], folder: Path) -> Replanner:
    schedule = ResolvedRun(on_schedule(config(**shape(0.5)), folder)).schedule
    assert schedule is not None
    return Replanner(schedule, seed=1)


def answer(planner: Replanner, seconds: float = 60.0) -> Replanned:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (found := planner.answer()) is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("no answer")


def test_answers_come_in_the_order_of_questions(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    planner = made(config, tmp_path)
    assert planner.answer() is None
    for nodes in ([*range(9)], [0, *range(2, 10)]):
        planner.ask(Replan(nodes=nodes))
    for nodes in ([*range(9)], [0, *range(2, 10)]):
        found = answer(planner)
        assert found.nodes == nodes and found.step_s > 0
        assert {node for route in found.routes for node in route} <= set(nodes)


def test_what_goes_wrong_reaches_whoever_waits(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room for a plan")

    monkeypatch.setattr(replanner, "replan", broken)
    planner = made(config, tmp_path)
    planner.ask(Replan(nodes=[*range(9)]))
    with pytest.raises(MemoryError, match="no room"):
        answer(planner)
