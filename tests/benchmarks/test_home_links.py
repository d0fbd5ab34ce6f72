"""The clock of Protocol NanoGPT, as planaria simulates it."""

from __future__ import annotations

import pytest
from benchmarks.home_links import RECORDS, Published, closed_form, step_seconds


@pytest.mark.parametrize("record", RECORDS)
def test_published_steps_are_met(record: Published) -> None:
    legs = record.token_bytes, record.token_bytes
    assert step_seconds(legs, record.sequences, computing=True) == pytest.approx(record.step_s, rel=0.005)


@pytest.mark.parametrize(("legs", "sequences"), [((2048, 2048), 8), ((800, 544), 16), ((266, 136), 32), ((16, 16), 64)])
def test_the_simulator_meets_the_closed_form(legs: tuple[int, int], sequences: int) -> None:
    assert step_seconds(legs, sequences) == pytest.approx(closed_form(legs, sequences), abs=1e-4)
