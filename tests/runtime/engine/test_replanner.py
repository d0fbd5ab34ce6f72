from __future__ import annotations

import time
from pathlib import Path

import pytest

from planaria.control.facts.decisions import Replan
from planaria.control.facts.events import Replanned
from planaria.runtime.engine import replanner
from planaria.runtime.engine.replanner import Replanner
from planaria.runtime.resolved_run import ResolvedRun
from support.schedules import on_schedule, shape
from support.tiny_engine import Recipe
from support.waiting import until


def made(config: Recipe, folder: Path) -> Replanner:
    return Replanner(ResolvedRun(on_schedule(config(**shape(0.5)), folder)).schedule, seed=1)


def answer(planner: Replanner) -> Replanned:
    found: list[Replanned] = []

    def look() -> None:
        time.sleep(0.005)  # a loop without it takes time from the thread that plans
        found.extend(filter(None, [planner.answer()]))

    until(lambda: found, 60.0, look)
    return found[0]


def test_answers_come_in_the_order_of_questions(config: Recipe, tmp_path: Path) -> None:
    planner = made(config, tmp_path)
    assert planner.answer() is None
    for nodes in ([*range(9)], [0, *range(2, 10)]):
        planner.ask(Replan(nodes=nodes))
    for nodes in ([*range(9)], [0, *range(2, 10)]):
        found = answer(planner)
        assert found.nodes == nodes and found.step_s > 0
        assert {node for route in found.routes for node in route} <= set(nodes)


def test_an_error_reaches_the_caller(config: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room for a plan")

    monkeypatch.setattr(replanner, "replan", broken)
    planner = made(config, tmp_path)
    planner.ask(Replan(nodes=[*range(9)]))
    with pytest.raises(MemoryError, match="no room"):
        answer(planner)
