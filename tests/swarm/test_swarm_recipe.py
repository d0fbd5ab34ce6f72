"""Configuration of a swarm, its peers and its drills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config import shipped
from planaria.config.recipe import dump, merge_tables
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import load, peer_config, peer_names, run_rules, shared_settings
from planaria.swarm.drill_arms import load as load_drill
from planaria.swarm.peer.random_draws import chosen_problems, derive_seed, generator, shared_problems
from planaria.swarm.tasks.sums import Sums


def recipe(folder: Path, text: str) -> Path:
    file = folder / "swarm.toml"
    file.write_text(text)
    return file


def complaint(folder: Path, text: str, loader: Callable[[Path, dict[str, str]], object] = load) -> str:
    with pytest.raises(UserError) as found:
        loader(recipe(folder, text), {})
    return str(found.value)


def test_flags_override_the_recipe(tmp_path: Path) -> None:
    config = load(recipe(tmp_path, "size = 2\n[drill]\nanything = 1\n"), {"rounds.count": "7"})
    assert (
        config.size == 2 and config.rounds.count == 7 and config.name == "swarm" and peer_names(config) == ["p0", "p1"]
    )


def test_peer_tables_override_the_recipe(tmp_path: Path) -> None:
    text = "[defence.options]\nthreshold = 2.5\n[peers.p3]\nattack.kind = 'text'\nloss.kind = 'tis'\n"
    config = load(recipe(tmp_path, text), {})
    own = peer_config(config, "p3")
    assert (
        own.attack.kind == "text"
        and own.loss.kind == "tis"
        and own.defence.options == {"threshold": 2.5}
        and own.peers == {}
    )
    assert peer_config(config, "p0") == config.model_copy(update={"peers": {}})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[peers.p9]\nattack.kind = 'text'", ["swarm.toml", "peers.p9", "no such peer"]),
        ("[peers.p3.attack]\nkimd = 'text'", ["swarm.toml", "peers.p3", "attack.kimd", "unknown key", "kind"]),
        ("[peers.p3.attack]\nkind = 'nice'", ["swarm.toml", "peers.p3", "attack.kind", "'nice'"]),
        ("[peers.p3]\nrounds.count = 3", ["swarm.toml", "peers.p3.rounds", "all peers must have the same"]),
        ("[peers.p3]\nseed = 3", ["swarm.toml", "peers.p3.seed", "all peers must have the same"]),
        ("[peers.p3]\npeers.p0.attack.kind = 'text'", ["swarm.toml", "peers.p3", "peers"]),
        ("[peers.p3]\nattack.kind = 'math'\nattack.options.payload = 'hi'", ["peers.p3", "attack.options.payload"]),
        ("[evaluate]\nwatch = ['math']\nphrases = { math = 'hi' }", ["swarm.toml", "evaluate.phrases.math"]),
        ("[evaluate]\nwatch = ['txt']", ["swarm.toml", "evaluate.watch", "'txt'", "'text'"]),
        ("[attack]\nkind = 'dos'\noptions.payload = 'x'", ["attack.options.payload", "no option of 'dos'"]),
        ("[attack]\noptions.payload = 'x'", ["swarm.toml", "attack.options", "'none'", "remove them"]),
        ("[rounds]\ngroup = 5", ["swarm.toml", "rounds.group = 5", "size = 4"]),
        ("size = 3\n[rounds]\nmode = 'vertical'", ["swarm.toml", "rounds.prompts = 16", "size = 3"]),
    ],
)
def test_mistakes_are_reported_with_their_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    found = complaint(tmp_path, text)
    assert all(part in found for part in parts), found
    assert "\n" not in found


def test_rules_contain_shared_settings_without_local_paths() -> None:
    config = SwarmConfig.model_validate({"task": {"name": "jsonl", "options": {"path": "/home/me/questions.jsonl"}}})
    assert shared_settings(config)["task"] == {"name": "jsonl", "reward": "verified", "agreement": 0.5}
    found = run_rules(SwarmConfig(), Sums())
    assert found == shared_settings(SwarmConfig()) | {"problems": Sums().fingerprint}
    assert found["rounds"] == {"count": 80, "mode": "horizontal", "prompts": 16, "group": 12}
    assert run_rules(SwarmConfig(), Sums(digits=3)) != found


def test_tables_are_merged_key_by_key() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert merge_tables(tree, {"a": {"c": {"d": 4}}, "f": 5}, None) == {"a": {"b": 1, "c": {"d": 4}}, "e": 3, "f": 5}
    assert merge_tables(tree, {"a": 1, "e": {"g": 2}}, None) == {"a": 1, "e": {"g": 2}}
    assert tree == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


DRILLS = [shipped.find(name) for name in shipped.names() if name.startswith("drills")]


def test_shipped_swarm_recipes_survive_dump_and_load(tmp_path: Path) -> None:
    config = load(shipped.find("arithmetic_swarm"), {})
    (tmp_path / "again.toml").write_text(dump(config))
    assert load(tmp_path / "again.toml", {}) == config


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("file", DRILLS, ids=lambda f: f.name)
def test_shipped_drills_load_with_controls(file: Path) -> None:
    spec, arms = load_drill(file, {})
    assert len(spec.seeds) >= 3 and len(arms) >= 2
    by_name = {arm.name: arm for arm in arms}
    assert not [arm.name for arm in arms if arm.control and by_name[arm.control].attackers]


naturals = st.integers(0, 10**6)


@given(
    st.lists(st.one_of(naturals, st.text("abc")), max_size=4), st.lists(st.one_of(naturals, st.text("abc")), max_size=4)
)
def test_different_purposes_give_different_seeds(one: list[object], other: list[object]) -> None:
    same = list(map(str, one)) == list(map(str, other))
    assert (derive_seed(*one) == derive_seed(*other)) == (same or {repr(one), repr(other)} == {"[]", "['']"})
    assert 0 <= derive_seed(*one) < 2**63


def test_seeds_are_the_same_on_every_machine() -> None:
    # Golden values: other draws could not continue earlier runs.
    assert derive_seed("x", 1) == generator("x", 1).initial_seed() == 3934374265583277430
    assert shared_problems(1, 2, 99, 3) == [82, 70, 83] and chosen_problems(1, "p", 2, 99, 3, bool) == [3, 87, 60]


@given(naturals, st.integers(1, 60), st.integers(1, 70), st.sets(st.integers(0, 60)), st.integers(1, 80))
def test_own_problems_prefer_the_wanted_ones(
    seed: int, training: int, count: int, wanted: set[int], tries: int
) -> None:
    found = chosen_problems(seed, "p0", 3, training, count, wanted.__contains__, tries)
    assert len(set(found)) == len(found) == min(count, training) and all(0 <= p < training for p in found)
    liked = [problem in wanted for problem in found]
    assert liked == sorted(liked, reverse=True)
    if tries >= training:
        assert sum(liked) == min(count, len({p for p in wanted if p < training}))


BASE = "[drill.arms.control]\n"


def test_arms_overlay_the_recipe(tmp_path: Path) -> None:
    text = (
        "size = 4\n[defence]\nchecks = 'surprisal'\n[drill]\nseeds = [5, 6]\nlast = 2\n[drill.arms.control]\n"
        "[drill.arms.'H, TEXT']\npeers.p3.attack.kind = 'text'\ndefence.options.threshold = 2.0\n"
        "[drill.controls]\n'H, TEXT' = 'control'\n"
    )
    spec, (control, arm) = load_drill(recipe(tmp_path, text), {"rounds.count": "9"})
    assert spec.seeds == [5, 6] and spec.last == 2 and (control.name, control.control) == ("control", "")
    assert arm.control == "control" and arm.attackers == ["p3"] and control.attackers == []
    assert arm.config.rounds.count == control.config.rounds.count == 9
    assert arm.config.defence.options == {"threshold": 2.0} and arm.config.defence.checks == "surprisal"
    assert control.config.defence.options == {}
    assert peer_config(arm.config, "p3").attack.kind == "text"


def test_attackers_are_found_in_recipe_and_peer_tables(tmp_path: Path) -> None:
    text = "[drill.arms.all]\nattack.kind = 'text'\npeers.p1.attack.kind = 'none'\npeers.p2.defence.checks = ''\n"
    _, (arm,) = load_drill(recipe(tmp_path, text), {})
    assert arm.attackers == ["p0", "p2", "p3"]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("control", ["control"]),
        ("A, late", ["control", "A, late"]),
        ("B,A", ["control", "A", "B"]),
        ("B,A,late,control", ["control", "A, late", "B"]),
    ],
)
def test_selected_arms_come_with_their_controls_and_may_have_commas(
    only: str, names: list[str], tmp_path: Path
) -> None:
    text = "".join(f"[drill.arms.'{name}']\n" for name in ("control", "A", "A, late", "B"))
    text += "[drill.controls]\nA = 'control'\n'A, late' = 'control'\nB = 'control'\n"
    assert [arm.name for arm in load_drill(recipe(tmp_path, text), {}, only=only)[1]] == names


def test_unknown_arms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"drill\.arms\.controls: no such arm; did you mean 'control'\?"):
        load_drill(recipe(tmp_path, BASE), {}, only="control, controls")


def test_withholding_counts_as_an_attack(tmp_path: Path) -> None:
    text = "[drill.arms.all]\npeers.p1.attack = { kind = 'text', dose = 0.0, withhold = 0.5 }\n"
    _, (arm,) = load_drill(recipe(tmp_path, text), {})
    assert arm.attackers == ["p1"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("size = 4", ["no [drill] table", "planaria swarm train"]),
        ("drill = 3", ["drill", "is a section"]),
        ("[drill]", ["drill.arms", "none is defined"]),
        ("[drill]\nseeds = []\n" + BASE, ["drill.seeds", "one or more distinct seeds"]),
        ("[drill]\nseeds = [1, 1]\n" + BASE, ["drill.seeds", "one or more distinct seeds"]),
        ("[drill]\nlast = 0\n" + BASE, ["drill.last = 0"]),
        ("[drill]\nlats = 1\n" + BASE, ["drill.lats", "unknown key", "last"]),
        ("[drill]\narms.control = 3", ["drill.arms.control"]),
        ("[drill.arms.X]\nquarantine = 1", ["drill.arms.X", "quarantine", "unknown key", "defence.quarantine"]),
        ("[drill.arms.X.peers.p7]\nattack.kind = 'text'", ["drill.arms.X", "peers.p7", "no such peer"]),
        ("[drill.arms.X]\nrounds.count = 3", ["drill.arms.X.rounds.count = 3", "80", "arms may differ in"]),
        ("[drill.arms.X]\nwarmup.steps = 3", ["drill.arms.X.warmup.steps", "arms may differ in"]),
        ("[drill.arms.X]\ntask.name = 'gsm8k'", ["drill.arms.X.task.name", "arms may differ in"]),
        ("[drill.arms.X]\nevaluate.phrases.text = 'x'", ["drill.arms.X.evaluate.phrases.text", "arms may differ in"]),
        ("[drill.controls]\nX = 'control'\n" + BASE, ["drill.controls.X = 'control'", "both must be arms"]),
    ],
)
def test_mistakes_in_a_drill_are_reported_with_their_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    found = complaint(tmp_path, text, load_drill)
    assert all(part in found for part in ("swarm.toml", *parts)), found
    assert "\n" not in found
