"""``planaria drill``: arms as real processes, and nothing run twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria import __version__, cli
from planaria.cli.commands import drill as module
from planaria.lab.trials import identity
from planaria.swarm.drills.drill_results import Drill

RECIPE = """
size = 2
policy = {{ kind = "pretrained", options.path = "{pupil}" }}
rounds = {{ count = 2, prompts = 2, group = 4 }}
evaluate = {{ every = 1, problems = 10, watch = ["text"] }}

[drill]
seeds = [1]
last = 1

[drill.arms."control"]
peers.p1.attack = {{ kind = "text", dose = 0.0 }}

[drill.arms."attacked"]
peers.p1.attack = {{ kind = "text" }}
defence.checks = "surprisal, duplicates, steps"

[drill.controls]
"attacked" = "control"
"""


def test_a_drill_tells_what_came_of_its_arms_and_is_not_run_twice_wherever_it_lies(
    tmp_path: Path, pupil: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(RECIPE.format(pupil=pupil))
    assert cli.run(["drill", "tiny.toml", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "attacked" in shown and "TEXT success" in shown and "every peer's accuracy" in shown
    found = Drill.model_validate_json(Path("runs/tiny-drill/drill.json").read_text())
    assert [(arm.name, arm.control, arm.attackers) for arm in found.arms] == [
        ("control", "", []),
        ("attacked", "control", ["p1"]),
    ]
    stopped, misjudged = found.arm("attacked").layer("all layers")
    assert stopped.eligible > 0 == misjudged.eligible, "the only other peer attacks"
    assert Path("runs/tiny-drill/report.html").stat().st_size > 10_000

    Path("runs").rename("elsewhere")
    monkeypatch.setattr(module, "LiveSwarm", None)  # whoever would run an arm fails
    assert cli.run(["drill", "tiny.toml", "--quiet", "--out", "elsewhere"]) == 0
    again = Drill.model_validate_json(Path("elsewhere/tiny-drill/drill.json").read_text())
    assert again == found

    monkeypatch.setattr(identity, "__version__", "9.9")
    capsys.readouterr()
    with pytest.raises(TypeError):  # it is run
        cli.run(["drill", "tiny.toml", "--out", "elsewhere"])
    assert f"run again, planaria {__version__} made it, this is 9.9" in capsys.readouterr().out
