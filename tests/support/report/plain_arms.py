"""Scored arms with plain numbers, changed where a test needs others."""

from __future__ import annotations

from typing import Any

from planaria.lab.compare.race_results import ArmRun, ArmScore, ComparisonResults


def arm_run(hours: float | None, ratio: float | None = 1.0, ticks: float | None = 100.0, **changes: Any) -> ArmRun:
    """A run to the target; without hours, one that missed it."""
    reached = {"ticks": ticks, "ratio": ratio, "hours_ratio": ratio} if hours is not None else {}
    plain = {"ticks": None, "ratio": None, "hours_ratio": None, "saves": 0, "steps_lost": 0, "stopped": ""}
    named = {"seed": 1, "trace": "t", "target": 2.0, "hours": hours, "final": 2.0, "failures": 1}
    return ArmRun.model_validate(plain | named | reached | changes)


def arm_score(name: str, *runs: ArmRun, **changes: Any) -> ArmScore:
    plain = {"changes": {}, "faults": True, "routing": "full", "step_s": 36.0, "save_s": 0.0, "step_bytes": 0.0}
    free = {"traffic": 0.0, "memory": 0.0, "curves": []}
    return ArmScore.model_validate({"name": name, "runs": list(runs)} | plain | free | changes)


def results(*arms: ArmScore, **changes: Any) -> ComparisonResults:
    plain = {"name": "x", "clock": "", "steps": 200, "stages": 4, "target_at": 0.5, "hourly": 0.1, "failures": []}
    return ComparisonResults.model_validate({"arms": list(arms)} | plain | changes)
