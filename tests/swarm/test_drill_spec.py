"""Recipes of drills."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.swarm.drill import load
from planaria.swarm.recipe import of_peer

BASE = "[drill.arms.control]\n"


def recipe(folder: Path, text: str) -> Path:
    file = folder / "drill.toml"
    file.write_text(text)
    return file


def test_arms_overlay_the_recipe(tmp_path: Path) -> None:
    text = (
        "size = 4\n[defence]\nchecks = 'surprisal'\n[drill]\nseeds = [5, 6]\nlast = 2\n[drill.arms.control]\n"
        "[drill.arms.'H, TEXT']\npeers.p3.attack.kind = 'text'\ndefence.options.threshold = 2.0\n"
        "[drill.controls]\n'H, TEXT' = 'control'\n"
    )
    spec, (control, arm) = load(recipe(tmp_path, text), {"rounds.count": "9"})
    assert spec.seeds == [5, 6] and spec.last == 2 and (control.name, control.control) == ("control", "")
    assert arm.control == "control" and arm.attackers == ["p3"] and control.attackers == []
    assert arm.config.rounds.count == control.config.rounds.count == 9
    assert arm.config.defence.options == {"threshold": 2.0} and arm.config.defence.checks == "surprisal"
    assert control.config.defence.options == {}
    assert of_peer(arm.config, "p3").attack.kind == "text"


def test_a_seed_sets_problems_draws_and_school(tmp_path: Path) -> None:
    _, (arm,) = load(recipe(tmp_path, BASE), {})
    seeded = arm.seeded(7)
    assert seeded.seed == seeded.school.seed == 7
    assert seeded.model_copy(update={"seed": arm.config.seed, "school": arm.config.school}) == arm.config


def test_attackers_are_found_in_recipe_and_peer_tables(tmp_path: Path) -> None:
    text = "[drill.arms.all]\nattack.kind = 'text'\npeers.p1.attack.kind = 'none'\npeers.p2.defence.checks = ''\n"
    _, (arm,) = load(recipe(tmp_path, text), {})
    assert arm.attackers == ["p0", "p2", "p3"]


def test_withholding_counts_as_an_attack(tmp_path: Path) -> None:
    text = "[drill.arms.all]\npeers.p1.attack = { kind = 'text', dose = 0.0, withhold = 0.5 }\n"
    _, (arm,) = load(recipe(tmp_path, text), {})
    assert arm.attackers == ["p1"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("size = 4", ["no [drill] table", "planaria swarm train"]),
        ("drill = 3", ["drill", "is a section"]),
        ("[drill]", ["drill.arms", "there are none"]),
        ("[drill]\nseeds = []\n" + BASE, ["drill.seeds", "one seed or more"]),
        ("[drill]\nseeds = [1, 1]\n" + BASE, ["drill.seeds", "each once"]),
        ("[drill]\nseeds = [-1]\n" + BASE, ["drill.seeds"]),
        ("[drill]\nlast = 0\n" + BASE, ["drill.last = 0"]),
        ("[drill]\nlats = 1\n" + BASE, ["drill.lats", "unknown key", "last"]),
        ("[drill]\narms.control = 3", ["drill.arms.control"]),
        ("[drill.arms.X]\nquarantine = 1", ["drill.arms.X", "quarantine", "unknown key", "defence.quarantine"]),
        ("[drill.arms.X.defence]\nquarantin = 1", ["drill.arms.X", "defence.quarantin", "unknown key"]),
        ("[drill.arms.X]\ndefence = 1", ["drill.arms.X", "defence", "is a section"]),
        ("[drill.arms.X.peers.p3]\nattak.kind = 'text'", ["drill.arms.X", "peers.p3", "attak", "unknown key"]),
        ("[drill.arms.X.peers.p7]\nattack.kind = 'text'", ["drill.arms.X", "peers.p7", "no such peer"]),
        ("[drill.arms.X.peers.p3]\nseed = 3", ["drill.arms.X", "peers.p3.seed", "all peers must have the same"]),
        ("[drill.arms.X]\nrounds.count = 3", ["drill.arms.X.rounds.count = 3", "80", "arms may differ in"]),
        ("[drill.arms.X]\nschool.steps = 3", ["drill.arms.X.school.steps", "arms may differ in"]),
        ("[drill.arms.X]\npolicy.kind = 'x'", ["drill.arms.X.policy.kind", "arms may differ in"]),
        ("[drill.arms.X]\ntask.name = 'gsm8k'", ["drill.arms.X.task.name", "arms may differ in"]),
        ("[drill.arms.X]\nevaluate.phrases.text = 'x'", ["drill.arms.X.evaluate.phrases.text", "arms may differ in"]),
        ("[drill.arms.X]\nseed = 4", ["drill.arms.X.seed = 4", "arms may differ in"]),
        ("[drill.controls]\nX = 'control'\n" + BASE, ["drill.controls.X = 'control'", "both must be arms"]),
        ("[drill.controls]\ncontrol = 'X'\n" + BASE, ["drill.controls.control = 'X'", "both must be arms"]),
    ],
)
def test_mistakes_are_reported_with_their_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as found:
        load(recipe(tmp_path, text), {})
    said = str(found.value)
    assert "drill.toml" in said and all(part in said for part in parts), said
    assert "\n" not in said


def test_arms_may_differ_in_attack_defence_and_loss(tmp_path: Path) -> None:
    text = (
        "[drill.arms.A]\nloss.kind = 'tis'\nrounds.mode = 'vertical'\nrounds.gather = false\nshadow = true\n"
        "optim.lr = 3e-4\npeers.p0.task.options.style = 'words'\n"
    )
    _, (arm,) = load(recipe(tmp_path, text), {})
    assert arm.config.rounds.mode == "vertical" and of_peer(arm.config, "p0").task.options == {"style": "words"}
