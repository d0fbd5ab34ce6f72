"""Arms: allowed changes, common settings, and the arms and failures of a comparison."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.lab.compare import race_spec
from planaria.trials.arms import ArmRules, SeededTrials, file_name, read_table

RULES = ArmRules("trial", RunConfig, free=("recovery", "routing.kind"))
PATH = Path("mine.toml")


def arms(tree: dict[str, Any], flags: dict[str, str] | None = None, **changes: dict[str, Any]) -> dict[str, RunConfig]:
    return RULES.arms(tree, changes, flags or {}, PATH)[1]


def test_an_arm_is_the_recipe_with_its_changes_and_common_flags() -> None:
    tree = {"train": {"steps": 9}, "recovery": {"strategy": "echo"}}
    base, found = RULES.arms(tree, {"a": {"recovery": {"options": {"bits": 2}}}, "b": {}}, {"seed": "7"}, PATH)
    assert found["a"].recovery.strategy == "echo" and found["a"].recovery.options == {"bits": 2}
    assert found["b"] == base and found["a"].seed == 7 == base.seed and base.train.steps == 9


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"seed": 5}, "seed = 5"),
        ({"data": {"source": "other"}}, "data.source = 'other'"),
        ({"chaos": {"trace": "other.json"}}, "chaos.trace = 'other.json'"),
        ({"train": {"steps": 5}}, "train.steps = 5"),
        ({"routing": {"data_nodes": 2}}, "routing.data_nodes = 2"),
    ],
)
def test_seed_data_failures_and_budget_are_the_same_for_all_arms(change: dict[str, Any], place: str) -> None:
    with pytest.raises(UserError) as refused:
        arms({}, unfair=change)
    assert str(refused.value).startswith(f"mine.toml: trial.arms.unfair.{place}: the recipe has ")
    assert str(refused.value).endswith("arms may differ in recovery, routing.kind only")


def test_a_setting_with_a_free_prefix_is_not_free() -> None:
    narrow = ArmRules("trial", RunConfig, free=("train.eval",))
    with pytest.raises(UserError, match=r"train\.eval_every = 3"):
        narrow.arms({}, {"a": {"train": {"eval_every": 3}}}, {}, PATH)


def test_names_of_equal_files_are_rejected() -> None:
    assert file_name("H, TEXT/../") == "H--TEXT----"
    with pytest.raises(UserError, match=r"trial\.arms: two names differ only in special characters"):
        arms({}, **{"a b": {}, "a-b": {}})


@pytest.mark.parametrize(
    ("kind", "table", "complaint"),
    [
        (SeededTrials, {"seeds": []}, "train.seeds = []: use one or more distinct seeds"),
        (SeededTrials, {"seeds": [1, 2, 1]}, "train.seeds = [1, 2, 1]: use one or more distinct seeds"),
        (SeededTrials, {"sed": [1]}, "train.sed: unknown key"),
    ],
)
def test_an_invalid_trial_table_is_rejected(
    tmp_path: Path, kind: type[SeededTrials], table: dict[str, Any], complaint: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(tomli_w.dumps({"train": table}))
    with pytest.raises(UserError, match=re.escape(complaint)):
        read_table(file, "train", kind, "train")


def compared(folder: Path, arms_table: str) -> Path:
    file = folder / "race.toml"
    file.write_text(f"train = {{ steps = 20, eval_every = 2 }}\n[compare]\nseeds = [1]\n{arms_table}")
    return file


def test_arms_may_be_excluded_from_failures_and_fault_free_is_first(tmp_path: Path) -> None:
    text = "[compare.arms.a]\nfaults = false\nrouting.kind = 'swapped'\n[compare.arms.b]\nrecovery.strategy = 'echo'\n"
    _, found = race_spec.load(compared(tmp_path, text), {})
    own = [("fault-free", False), ("a", False), ("b", True)]
    assert [(arm.name, arm.faults) for arm in found] == [*own, ("oracle", True), ("reset", True)]
    assert found[0].config.routing.kind == "full" and found[1].config.routing.kind == "swapped"
    assert [arm.config.recovery.strategy for arm in found[3:]] == ["oracle", "reset"]


def test_a_comparison_of_recoveries_has_controls_by_default(tmp_path: Path) -> None:
    echo, lr = "[compare.arms.b]\nrecovery.strategy = 'echo'\n", "[compare.arms.b]\noptim.lr = 0.1\n"

    def names(text: str, only: list[str] | None = None) -> list[str]:
        return [arm.name for arm in race_spec.load(compared(tmp_path, text), {}, only=only)[1]][1:]

    assert names(echo) == ["b", "oracle", "reset"]
    assert names(f"controls = false\n{echo}") == ["b"]
    assert names(lr) == ["b"], "no arm changes the recovery"
    assert names(f"[compare.trace]\nhourly = 0.0\n{echo}") == ["b"], "nothing is lost"
    own = "[compare.arms.reset]\nrecovery.strategy = 'reset'\nrouting.kind = 'skipping'\n"
    assert names(echo + own) == ["b", "reset", "oracle"]
    assert names(echo, only=["b"]) == ["b"]
    assert names(echo, only=["b", "reset", "oracle"]) == ["b", "reset", "oracle"]


def test_a_search_tries_all_combinations_except_the_recipe_s_own(tmp_path: Path) -> None:
    text = "[compare.search]\nlr = [0.001, 0.002]\nbeta2 = [0.95, 0.999]\n[compare.arms.b]\noptim.beta2 = 0.9\n"
    _, found = race_spec.load(compared(tmp_path, text), {})
    points = [arm for arm in found if arm.searched]
    assert [arm.name for arm in points] == [
        "lr 0.001, beta2 0.95", "lr 0.002, beta2 0.95", "lr 0.002, beta2 0.999",
    ]  # fmt: skip
    assert not any(arm.faults for arm in points)
    assert [(p.config.optim.lr, p.config.optim.beta2) for p in points] == [(0.001, 0.95), (0.002, 0.95), (0.002, 0.999)]
    _, all_at_once = race_spec.load(compared(tmp_path, text), {"optim.lr": "0.002"})
    assert [arm.name for arm in all_at_once if arm.searched] == ["lr 0.001, beta2 0.95"], "a flag makes others equal"


def test_an_arm_with_a_list_of_rates_is_one_arm_for_each(tmp_path: Path) -> None:
    text = '[compare.arms.a]\noptim = { kind = "muon", lr = [5e-4, 0.004, 1.0] }\n[compare.arms.b]\noptim.lr = 0.1\n'
    _, found = race_spec.load(compared(tmp_path, text), {})
    assert {arm.name: (arm.config.optim.kind, arm.config.optim.lr) for arm in found[1:]} == {
        "a_5e-4": ("muon", 0.0005), "a_4e-3": ("muon", 0.004), "a_1e+0": ("muon", 1.0), "b": ("adamw", 0.1),
    }  # fmt: skip
    for rates in ("[]", "['fast']"):
        with pytest.raises(UserError, match=r"compare\.arms\.a: optim\.lr"):
            race_spec.load(compared(tmp_path, f"[compare.arms.a]\noptim.lr = {rates}\n"), {})


def test_arms_may_differ_in_their_optimizer(tmp_path: Path) -> None:
    _, found = race_spec.load(compared(tmp_path, '[compare.arms.a]\noptim = { kind = "muon", lr = 0.004 }'), {})
    assert [arm.config.optim.kind for arm in found] == ["adamw", "muon"]


def test_an_arm_may_be_a_narrower_model(tmp_path: Path) -> None:
    _, found = race_spec.load(compared(tmp_path, "[compare.arms.a]\nmodel.dim = 16\n"), {})
    assert found[1].config.model.dim == 16 < found[0].config.model.dim


@pytest.mark.parametrize("name", ["tuned", "fault-free"])
def test_names_of_added_arms_are_reserved(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"compare.arms.{name}: the name is reserved"):
        race_spec.load(compared(tmp_path, f"[compare.arms.{name}]\n"), {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "compare.arms: none is defined; add a table [compare.arms.NAME] for each"),
        ("[compare.arms.a]\nfaults = 3", "compare.arms.a.faults = 3 must be true or false"),
        ("[compare.arms.'fault free']\n", "compare.arms.fault free: the name is reserved"),
        (
            "[compare.arms.a]\nexchange.replicas = 2",
            "race.toml: compare.arms.a: exchange.replicas = 2 with pipeline.microbatches = 8 take 64 samples a step, "
            "the recipe 32; set pipeline.microbatches = 4",
        ),
        (
            "[compare.arms.a]\nexchange.replicas = 3\npipeline.microbatches = 3",
            "exchange.replicas = 3 with pipeline.microbatches = 3 take 36 samples a step, the recipe 32; set "
            "exchange.replicas that divide 8",
        ),
        ("[compare.arms.a]\npipeline.microbatches = 4", "take 16 samples a step, the recipe 32; set pipeline.micro"),
        (
            "[compare.arms.a]\npipeline.microbatch_size = 8\npipeline.microbatches = 4",
            "compare.arms.a.pipeline.microbatch_size = 8: the recipe has 4; arms may differ in ",
        ),
    ],
)
def test_an_invalid_comparison_is_rejected(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)):
        race_spec.load(compared(tmp_path, text), {})


def test_bursts_add_failures_of_the_next_stages_to_the_same_trace() -> None:
    def struck(**spec: object) -> set[tuple[int, int]]:
        plain = {"hourly": 0.5, "step_s": 600.0, "ends": True} | spec
        comparison = race_spec.Comparison.model_construct(trace=race_spec.TraceSpec.model_validate(plain))
        return {(fault.step, fault.stage) for fault in race_spec.trace_for(comparison, RunConfig(), 3).faults}

    alone, bursts = struck(), struck(together=0.5)
    assert alone < bursts
    assert all((step, (stage - 1) % 5) in bursts for step, stage in bursts - alone)
