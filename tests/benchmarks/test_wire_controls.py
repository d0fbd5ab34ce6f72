"""Controls of codecs between stages, in two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from benchmarks.harness import Row
from benchmarks.wire_controls import LEGS, NOISE, ROTATIONS, Raced, run_legs, run_lies, run_projection, run_rotation

from benchmarks import harness


def measured(command: Callable[[], int], monkeypatch: pytest.MonkeyPatch, *flags: str, steps: int = 2) -> list[Row]:
    """Return the rows of a small run."""
    found: list[Row] = []

    def keep(name: str, args: object, rows: Sequence[Row], *more: object) -> int:
        found.extend(rows)
        return 0

    small = ["--seeds", "1", "--steps", str(steps), "--width", "32", "--microbatches", "1"]
    monkeypatch.setattr("sys.argv", ["wire_controls", *small, *flags])
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


def test_a_projection_is_compared_with_other_codecs_at_their_best_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.what: row.value for row in measured(run_projection, monkeypatch, "--rates", "1", steps=20)}
    plain, anchored = (rows[f"learned, D/4{kind} - bf16, mean nats"] for kind in ("", ", anchors"))
    assert 0 < abs(anchored) < 0.5 and 0 < abs(plain) < 0.5
    assert rows["6/4 / 6/4, time"] == 1 and rows["bf16 / 6/4, time"] > 1.5


def test_time_is_that_of_the_first_mean_of_three_at_the_target() -> None:
    raced = Raced(1.0, [{10: 5.0, 20: 4.0, 30: 3.0, 40: 2.0}, {10: 5.0, 20: 5.0, 30: 5.0}], step_s=0.5)
    assert raced.seconds_to([3.0, 3.0]) == [20.0, None]


@pytest.mark.slow
def test_each_leg_has_a_loss_from_scratch_and_in_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    *rows, three, two = measured(run_legs, monkeypatch)
    assert len(rows) == len(LEGS | NOISE) + len(LEGS) + len(NOISE) and all(abs(row.value) < 0.1 for row in rows)
    continued = {row.what.partition(" ")[0]: row.value for row in rows if "continued" in row.what}
    assert three.value == pytest.approx(continued["8/3"] / continued["8/4"])
    assert two.value == pytest.approx(continued["8/2"] / continued["8/3"])
