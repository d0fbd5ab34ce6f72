"""The controller's cost per worker does not grow with the number of workers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from benchmarks.controller import LAYOUTS, Obedient

from planaria.control.apply import apply
from planaria.control.apply_base import mark_decided
from planaria.control.decide import decide

FEW, MANY = 16, 128


def calls(layout: str, workers: int) -> tuple[float, int]:
    """Return the functions called by decide and apply: per worker and step (with a tenth of a round), and per loss."""
    fleet = Obedient(LAYOUTS[layout](workers))
    fleet.steps(2)
    found = []
    for lead in (lambda: fleet.steps(10), fleet.loss):
        run, count = fleet.run, 0
        facts = lead()

        def note(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            for fact in facts:
                run = apply(fact, run)
                run = mark_decided(run) if decide(run) is None else run
        finally:
            sys.setprofile(None)
        found.append(count)
    return found[0] / workers / 10, found[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cost_of_decisions_is_linear_in_workers(layout: str) -> None:
    few, many = calls(layout, FEW), calls(layout, MANY)
    assert many[0] <= 1.3 * few[0], "a step"
    assert many[1] <= 1.3 * few[1] * MANY / FEW, "a loss"
