"""Controls of codecs between stages, in two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from benchmarks.harness import Row
from benchmarks.wire_controls import LEGS, NOISE, ROTATIONS, run_legs, run_lies, run_projection, run_rotation

from benchmarks import harness


def measured(command: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Return the rows of a small run."""
    found: list[Row] = []

    def keep(name: str, args: object, rows: Sequence[Row], *more: object) -> int:
        found.extend(rows)
        return 0

    small = ["--seeds", "1", "--steps", "2", "--width", "32", "--microbatches", "1"]
    monkeypatch.setattr("sys.argv", ["wire_controls", *small])
    monkeypatch.setattr(harness, "conclude", keep)
    assert command() == 0
    return found


def test_each_rotation_has_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.what: row.value for row in measured(run_rotation, monkeypatch)}
    extra = {name: rows[f"{name} - bf16, 4/6, nats"] for name in ROTATIONS}
    assert all(0 < abs(loss) < 0.1 for loss in extra.values())
    assert rows["whole - none, mean nats"] == pytest.approx(extra["whole"] - extra["none"])


def test_false_scales_change_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(row.value for row in measured(run_lies, monkeypatch))


@pytest.mark.usefixtures("allow_code")
def test_a_projection_of_all_channels_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.what: row.value for row in measured(run_projection, monkeypatch)}
    whole, quarter = (rows[f"learned, {part} - bf16, embedding N(0, 1), nats"] for part in ("D", "D/4"))
    assert abs(whole) < abs(quarter) < 0.5


@pytest.mark.slow
def test_each_leg_has_a_loss_from_scratch_and_in_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    *rows, law = measured(run_legs, monkeypatch)
    assert len(rows) == 2 * len(LEGS) + len(NOISE) and all(abs(row.value) < 0.1 for row in rows)
    extra = {row.what: row.value for row in rows}
    assert law.value == pytest.approx(extra["8/3 - bf16, from scratch, nats"] / extra["8/4 - bf16, from scratch, nats"])
