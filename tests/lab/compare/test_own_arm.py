"""A custom strategy as an arm: raced, kept, and raced again when its code changes."""

from __future__ import annotations

from pathlib import Path

import pytest

import planaria
from support.tiny_recipe import written

OWN = """
from pydantic import Field
from planaria.recovery.checkfree import CheckFree

class Mine(CheckFree):
    noise: float = Field(0.5, ge=0)

    def rebuild(self, stage, donated, inputs):
        rebuilt = super().rebuild(stage, donated, inputs)
        for weight in rebuilt.weights.values():
            weight *= 1 + self.noise
        return rebuilt
"""


@pytest.mark.slow
def test_a_custom_strategy_is_raced_and_repeated_after_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "own_arm.py"
    module.write_text(OWN)
    recipe = written(tmp_path)
    with recipe.open("a") as file:  # two of the stages are lost in a few of the steps
        file.write("[compare.trace]\nhourly = 0.95\nstep_s = 200.0\nexempt = [1, 4]\nforbid_adjacent = true\n")

    def final() -> dict[str, float]:
        arms = ["own_arm:Mine", "checkfree"]
        found = planaria.compare(recipe, seeds=[1], arms=arms, progress=True, allow_code=True, steps=24).results
        return {arm.name: arm.runs[0].final for arm in found.arms}

    first = final()
    assert first.keys() == {"fault-free", "own_arm:Mine", "checkfree"}
    assert first["own_arm:Mine"] > first["checkfree"]
    capsys.readouterr()
    assert final() == first and "run again" not in capsys.readouterr().out
    module.write_text(OWN.replace("1 + self.noise", "1 + 0 * self.noise"))
    edited = final()
    assert "run again" in capsys.readouterr().out
    assert edited["own_arm:Mine"] == first["checkfree"] == edited["checkfree"]
