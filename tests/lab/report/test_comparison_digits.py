"""The printed digits of comparisons, against a second program that reads their JSON."""

from __future__ import annotations

import json

import pytest
from benchmarks.harness import saved

from planaria.lab.compare.race_results import ComparisonResults
from planaria.lab.report.comparison_table import columns, rows
from support.recomputed_comparison import table_cells
from support.report.synthetic_comparison import HELD, MANNERS, Manner, compared

FORMER = {
    "inputs": "given",
    "repeated_steps": "again",
    "traffic_per_weight_byte": "weights",
    "loss_events": "met",
    "replica_failures": "further",
    "failure_domain": "blows",
}


def printed(found: ComparisonResults) -> dict[str, dict[str, str]]:
    head = columns(found)
    return {row[0].removesuffix(" (control)"): dict(zip(head, row, strict=True)) for row in rows(found)}


def differences(found: ComparisonResults, but: tuple[str, ...] = ()) -> list[tuple[str, str, str, str]]:
    cells, reported = table_cells(json.loads(found.model_dump_json())), printed(found)
    return [
        (arm, column, cell, reported[arm][column])
        for arm, own in cells.items()
        for column, cell in own.items()
        if column not in but and reported[arm][column] != cell and not reported[arm][column].startswith("not reached")
    ]


@pytest.mark.parametrize("manners", [MANNERS, HELD])
def test_steps_and_hours_of_a_synthetic_comparison_follow_from_its_json(manners: dict[str, Manner]) -> None:
    found = compared(manners)
    assert differences(found, but=("traffic",)) == []


@pytest.mark.parametrize(
    ("name", "arms"), [("race_small", 17), ("race_large", 11), ("race_gpu", 7), ("race_one_array", 8)]
)
def test_steps_hours_and_traffic_of_a_saved_race_follow_from_its_json(name: str, arms: int) -> None:
    found = ComparisonResults.model_validate_json(json.dumps(saved(name)))
    assert len(found.arms) == arms and differences(found) == []


def test_another_digit_is_noticed() -> None:
    found = compared(HELD)
    run = found.arms[3].runs[0]
    changed = found.arms[3].model_copy(
        update={"runs": [run.model_copy(update={"hours": (run.hours or 0) + 0.2}), *found.arms[3].runs[1:]]}
    )
    arms = [*found.arms[:3], changed, *found.arms[4:]]
    assert differences(found.model_copy(update={"arms": arms}), but=("traffic",)) != []


def test_results_with_former_names_are_read() -> None:
    found = compared()
    written = found.model_dump_json()
    for name, was in FORMER.items():
        assert f'"{name}":' in written
        written = written.replace(f'"{name}":', f'"{was}":')
    assert ComparisonResults.model_validate_json(written) == found
