"""Custom tasks, checks and policies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.swarm.assemble import make_policy, make_task, selected_custom_classes
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import run_rules

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task.py"
POLICY = """
from planaria.swarm.policy.sources import Small

class Shy(Small):
    width: int = 8

    def open(self, config, task, on_progress=None):
        model = config.policy.model.model_copy(update={"dim": self.width})
        policy = config.policy.model_copy(update={"model": model})
        return super().open(config.model_copy(update={"policy": policy}), task, on_progress)
"""
RECIPE = """
size = 2
task = { name = "own_task:Backwards", options.letters = 2 }
defence = { checks = "own_task:Short, support", options.max_characters = 1 }
policy = { kind = "shy:Shy", options.width = 16, model.layers = 1 }
warmup = { steps = 20, batch = 4, strays = 0.0 }
rounds = { count = 2, prompts = 2, group = 4 }
sampling = { max_new = 8 }
evaluate = { problems = 10, every = 0 }
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of her own, with a task, a check, a policy and a recipe."""
    (tmp_path / "own_task.py").write_text(EXAMPLE.read_text())
    (tmp_path / "shy.py").write_text(POLICY)
    (tmp_path / "mine.toml").write_text(RECIPE)
    return tmp_path


def swarm(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planaria", "swarm", "train", "mine.toml", "--quiet", "--allow-code", *flags],
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_a_swarm_learns_a_custom_task_with_a_custom_check(own: Path) -> None:
    done = swarm(own)
    assert done.returncode == 0, done.stderr
    for peer in ("p0", "p1"):
        lines = (own / f"runs/mine/peers/{peer}/log.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["kind"] for record in records].count("round") == 2
        assert records[0]["parameters"] == 11_328, "of the width that her policy has as an option"
        found = [record["layers"] for record in records if record["kind"] == "round"]
        assert all(set(layers) == {"support", "Short"} for layers in found)
        assert sum(counts["rejected"] for layers in found for counts in layers["Short"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--task.name", "own_task:Forwards"), "task.name = 'own_task:Forwards': own_task has no 'Forwards'"),
        (("--defence.checks", "own_task:Backwards"), "is not derived from planaria.swarm.checks.base.Check"),
        (
            ("--defence.options.max_characters", "0"),
            "defence.options.max_characters = 0: input should be greater than 0",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    ("--task.options.letter", "3"),
                    "task.options.letter: no option of 'own_task:Backwards'; did you mean",
                ),
                (
                    ("--task.options.letters", "1"),
                    "task.options.letters = 1: input should be greater than or equal to 2",
                ),
                (("--policy.kind", "shi:Shy"), "policy.kind = 'shi:Shy': there is no module 'shi'"),
                (
                    ("--policy.options.widht", "8"),
                    "policy.options.widht: no option of 'shy:Shy'; did you mean 'width'?",
                ),
                (("--attack.kind", "own_task:Short"), "is not derived from planaria.swarm.attacks.base.Attack"),
            )
        ),
    ],
)
def test_invalid_choices_are_refused_before_a_peer_starts(own: Path, flags: tuple[str, ...], message: str) -> None:
    done = swarm(own, *flags)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (own / "runs").exists()


@pytest.mark.usefixtures("allow_code")
def test_peers_share_the_source_of_their_task(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    monkeypatch.setattr("sys.path", [*sys.path])
    (own / "lent_task.py").write_text(EXAMPLE.read_text())
    config = SwarmConfig.model_validate({"task": {"name": "lent_task:Backwards"}, "attack": {"kind": "text"}})
    agreed = run_rules(config, make_task(config))
    assert agreed["task"] == {"name": "lent_task:Backwards", "reward": "verified", "agreement": 0.5}
    assert [chosen.__name__ for chosen in selected_custom_classes(config)] == ["Backwards"]
    (own / "lent_task.py").write_text(EXAMPLE.read_text().replace('"abcde"', '"abc"'))
    assert run_rules(config, make_task(config)) != agreed
    other = config.model_copy(update={"task": config.task.model_copy(update={"options": {"letters": 4}})})
    assert run_rules(other, make_task(other)) != run_rules(config, make_task(config))


@pytest.mark.usefixtures("allow_code")
def test_a_task_without_solutions_needs_a_pretrained_policy(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "mute.py").write_text(EXAMPLE.read_text().replace("def solution", "def worked"))
    monkeypatch.chdir(own)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(own / "cache"))
    config = SwarmConfig.model_validate({"task": {"name": "mute:Backwards"}})
    with pytest.raises(UserError, match=r"task 'Backwards' has no worked solutions .*policy\.kind = 'pretrained'"):
        make_policy(config, make_task(config))
