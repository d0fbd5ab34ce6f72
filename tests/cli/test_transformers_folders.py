"""Runs that start from folders of ``transformers`` models, are cut differently on resumption, and are exported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import planaria
from planaria import cli
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.faults.trace import Fault, Trace, write
from planaria.models.hf_config import to_config
from planaria.models.transformers.recipe_section import model_section
from planaria.runtime.preparation.weight_sources import open_weights, with_inherited_settings
from support import dialogue_corpus
from support.decoder_folders import RECIPE, given, train, transformers

SCRATCH = 'context = 24, family = "transformers", options = { config = "./given/config.json" }'


@pytest.mark.parametrize("kind", ["gemma2", "mixtral", "gpt2"])
def test_an_untrained_model_is_exported_as_it_was(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = given(tmp_path, kind)
    assert train(tmp_path, "same", 1e-30, "--train.steps", "1") == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/same/model", dtype=torch.float32)
    tokens = torch.arange(3, 23)[None]
    assert torch.allclose(again(tokens).logits, model(tokens).logits, atol=1e-6)
    saved, ours = (open_weights(Path(path), "transformers") for path in ("given", "runs/same/model"))
    assert saved.shapes == ours.shapes
    for name in saved.shapes:  # a rate of 1e-30 changes zeros
        torch.testing.assert_close(saved.tensor(name), ours.tensor(name), rtol=0, atol=1e-20)


def test_a_run_continues_in_another_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "qwen3")
    assert train(tmp_path, "whole", 1e-3) == 0
    assert train(tmp_path, "cut", 1e-3, "--train.steps", "2") == 0
    more = ["--train.steps", "4", "--pipeline.stages", "4", "--quiet"]
    assert cli.run(["train", "--resume", "runs/cut", *more]) == 0
    one, other = (open_weights(Path(f"runs/{name}/model"), "transformers") for name in ("whole", "cut"))
    assert all(torch.allclose(one.tensor(name), other.tensor(name), atol=1e-6) for name in one.shapes)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_merged_adapters_are_a_whole_model(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 stores its matrices transposed."""
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    base = given(tmp_path, kind)
    assert train(tmp_path, "adapted", 1e-2, "--model.lora.rank", "4") == 0
    assert cli.run(["export", "runs/adapted", "--to", "merged", "--merge"]) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, "runs/adapted/model").merge_and_unload()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(whole.state_dict()[name], tensor, rtol=0, atol=1e-7)
    assert cli.run(["eval", "merged", "--text", "text.txt"]) == 0
    assert train(tmp_path, "plain", 1e-2) == 0
    with pytest.raises(UserError, match=r"runs/plain: it trained no adapters to merge; remove --merge"):
        cli.run(["export", "runs/plain", "--to", "none", "--merge"])
    with pytest.raises(UserError, match=r"model holds adapters without their model; use .*--merge"):
        cli.run(["export", "runs/adapted/model", "--to", "none"])


def test_adapters_survive_kills_and_load_in_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fleet, exact copies of adapters; frozen weights come from the base model's folder."""
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    base = given(tmp_path, "qwen3")
    kills = (Fault(step=1, stage=1), Fault(step=2, stage=2), Fault(step=3, stage=0))
    lora = ["--model.lora.rank", "4", "--recovery.strategy", "redundant"]
    write(Trace(faults=kills), tmp_path / "kills.jsonl")
    assert train(tmp_path, "unharmed", 1e-2, *lora) == 0
    assert train(tmp_path, "killed", 1e-2, *lora, "--engine", "fleet", "--chaos.trace", "kills.jsonl") == 0
    one, other = (
        load_file(tmp_path / f"runs/{name}/model/adapter_model.safetensors") for name in ("unharmed", "killed")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    tokens = torch.arange(3, 23)[None]
    before = base(tokens).logits.detach().clone()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "runs/killed/model")
    assert not torch.equal(adapted(tokens).logits, before)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/killed/model")
    assert torch.equal(whole(tokens).logits, adapted(tokens).logits), "transformers finds the base model"
    loaded = {name.replace(".default.", "."): tensor for name, tensor in adapted.state_dict().items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in other.items()), "peft has the exported numbers"
    saved = sum(file.stat().st_size for file in (tmp_path / "runs/killed/checkpoints").rglob("*.safetensors"))
    assert saved < (tmp_path / "given/model.safetensors").stat().st_size


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("strategy", ["echo", "snapshot", "redundant"])
def test_ends_without_adapters_are_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """They have no trained tensor, so their copies are empty."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "qwen3")
    write(Trace(faults=(Fault(step=1, stage=0), Fault(step=2, stage=1))), tmp_path / "kills.jsonl")
    flags = ["--model.lora.rank", "4", "--model.ends_layers", "0", "--recovery.strategy", f"{strategy}, checkpoint"]
    assert train(tmp_path, "calm", 1e-2, *flags) == 0
    assert train(tmp_path, "killed", 1e-2, *flags, "--engine", "fleet", "--chaos.trace", "kills.jsonl") == 0


def test_adapters_have_twins_unless_the_recipe_states_a_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "qwen3")
    stated = 'recovery = { strategy = "checkpoint" }'
    recipe = RECIPE.format(rate=1e-3)
    for content, expected in ((recipe, "checkpoint"), (recipe.replace(stated, ""), "redundant, checkpoint")):
        (tmp_path / "adapted.toml").write_text(content)
        config = planaria.configure("adapted.toml", settings={"model.lora.rank": 4})
        assert config.recovery.strategy == expected
    assert planaria.configure("adapted.toml").recovery.strategy == "checkfree"
    several = planaria.configure("adapted.toml", settings={"model.lora.rank": 4, "exchange.replicas": 2})
    assert several.recovery.strategy == "checkpoint", "replicas keep no copies"


def test_the_shipped_recipe_for_qwen3_trains_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many layers as Qwen3-4B, of small widths, on a CPU."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "qwen3", layers=36)
    flags = {f"data.{name}": value for name, value in dialogue_corpus.write_dialogues(tmp_path).items()}
    flags |= {
        "train.start": "./given",
        "train.device": "cpu",
        "train.precision": "fp32",
        "train.steps": "3",
        "data.validation": "0.2",
    }
    flags |= {"engine": "inline", "data.cache": "cache", "out": "runs", "model.context": "48"}
    flags |= {"pipeline.microbatches": "2", "recovery.strategy": "checkpoint"}
    assert cli.run(["train", "qwen3_lora", "--quiet", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    run = planaria.load("runs/qwen3_lora")
    assert len(run.losses) == 3 and all(map(math.isfinite, run.losses))
    adapters = load_file(tmp_path / "runs/qwen3_lora/model/adapter_model.safetensors")
    assert len(adapters) == 36 * 7 * 2 and all(one.abs().sum() > 0 for one in adapters.values())


def test_a_recipe_with_a_llamas_own_sizes_trains_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for the family llama that equal config.json's are accepted; all layers have adapters, the ends' too."""
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    base = given(tmp_path, "llama")
    place = tmp_path / "given" / "config.json"
    found = json.loads(place.read_text()) | {"rms_norm_eps": 9.999999747378752e-06}  # 1e-5, once stored in fp32
    place.write_text(json.dumps(found))
    sizes = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    flags = [f"--model.{name}={found[key]}" for name, key in sizes.items()]
    flags += ["--model.norm_eps=1e-5", "--model.ends_layers=2", "--model.lora.rank=4"]
    assert train(tmp_path, "adapted", 1e-2, *flags) == 0
    adapters = load_file(tmp_path / "runs/adapted/model/adapter_model.safetensors")
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "runs/adapted/model").state_dict()
    assert len(adapters) == sum("lora_" in name for name in expected)
    assert all(one.abs().sum() > 0 for one in adapters.values()), "every layer was trained"
    with pytest.raises(UserError, match=r"config.json determines model.heads \(.*\); remove them"):
        train(tmp_path, "bad", 1e-2, *flags, "--model.heads=2")


def test_a_run_from_scratch_takes_sizes_from_a_config_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "qwen3")
    scratch = RECIPE.format(rate=1e-3).replace(', start = "./given"', "").replace("context = 24", SCRATCH)
    (tmp_path / "scratch.toml").write_text(scratch)
    assert cli.run(["train", "scratch.toml", "--quiet", "--data.tokenizer", "bytes"]) == 0
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/scratch/model")
    assert made.config.model_type == "qwen3" and made.config.num_hidden_layers == 4
    location = tmp_path / "given" / "config.json"
    found = planaria.configure("scratch.toml", settings={"model.options.config": location, "data.tokenizer": "bytes"})
    assert found.model.layers == 4, "paths may be objects in Python"
    with pytest.raises(UserError, match=r"given/config.json': its model has layers = 4, the recipe 8"):
        cli.run(["train", "scratch.toml", "--quiet", "--data.tokenizer", "bytes", "--model.layers", "8"])


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model.heads", "4"], "config.json determines model.heads"),
        (["--recovery.strategy", "checkfree"], "kinds of layers (A and B); they are alike with pipeline.stages = 2"),
        (["--model.lora.rank", "4", "--model.lora.targets", "q"], "'q' is not a linear layer of this model"),
        (["--model.lora.rank", "4", "--recovery.strategy", "checkfree"], "up to a change of basis"),
        (["--model.lora.alpha", "8"], "has no effect without model.lora.rank"),
        (["--model.family", "llama"], "architecture ['Gemma2ForCausalLM'] is not supported"),
    ],
)
def test_bad_settings_are_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "gemma2")
    with pytest.raises(UserError) as raised:
        train(tmp_path, "bad", 1e-3, "--pipeline.stages", "4", *flags)
    assert complaint in str(raised.value) and "\n" not in str(raised.value)


def test_gemma_3_is_cut_into_stages_of_six_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers with a sliding window, then one with full attention, three times as in Gemma 3 270M."""
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "gemma3_text", layers=18)
    averages = ["--recovery.strategy", "checkfree"]
    for wrong in (["2"], ["4", "--model.ends_layers", "2"], ["2", "--pipeline.layers", "[9, 9]"]):
        with pytest.raises(UserError) as raised:
            train(tmp_path, "bad", 1e-3, *averages, "--pipeline.stages", *wrong)
        line = str(raised.value)
        assert "they are alike with pipeline.stages = 3, model.ends_layers = 0" in line and "\n" not in line
        assert ("without pipeline.layers" in line) == ("--pipeline.layers" in wrong)
    assert train(tmp_path, "alike", 1e-3, *averages, "--pipeline.stages", "3", "--train.steps", "1") == 0


def test_a_runs_configuration_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "gpt2")
    assert train(tmp_path, "first", 1e-3, "--train.steps", "2") == 0
    recorded = json.loads(Path("runs/first/config.json").read_text())
    assert with_inherited_settings(recorded)["model"]["options"] == recorded["model"]["options"]


def changed_weights(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of the given folder; None removes one."""
    from safetensors.torch import load_file, save_file

    file = folder / "given" / "model.safetensors"
    tensors = {name: one for name, one in (load_file(file) | changed).items() if one is not None}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "changed", "complaint"),
    [
        ("qwen3", {"model.norm.weight": None}, "model.norm.weight is missing; download it again"),
        ("mixtral", {"model.layers.1.mlp.experts.down_proj": None, "model.norm.weight": None}, "is missing"),
        ("qwen3", {"model.layers.7.mlp.up_proj.weight": torch.ones(3)}, "layers.7.mlp.up_proj.weight has no place"),
        ("gemma2", {"lm_head.weight": torch.ones(300, 64)}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_weights_that_differ_from_config_json_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changed: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, kind)
    changed_weights(tmp_path, changed)
    with pytest.raises(UserError, match=complaint):
        train(tmp_path, "bad", 1e-3)


def test_a_copy_of_a_tied_head_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = given(tmp_path, "gemma2")
    changed_weights(tmp_path, {"lm_head.weight": model.lm_head.weight.detach().clone()})
    assert "lm_head.weight" not in open_weights(Path("given"), "transformers").shapes


def test_a_context_beyond_learned_positions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "gpt2")
    with pytest.raises(UserError, match=r"^model.context = 65: the model has 64 positions"):
        train(tmp_path, "bad", 1e-3, "--model.context", "65")


def test_options_are_given_beside_starting_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "qwen3")
    assert train(tmp_path, "eager", 1e-3, "--train.steps", "1", "--model.options.attention", "eager") == 0
    with pytest.raises(UserError, match=r"remove model.options.config"):
        train(tmp_path, "bad", 1e-3, "--model.options.config", "./given/config.json")


def test_swapped_routes_need_stages_that_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given(tmp_path, "gemma2")
    with pytest.raises(UserError, match=r"routing.kind = 'swapped' swaps .* \(A and B\)"):
        train(tmp_path, "bad", 1e-3, "--pipeline.stages", "4", "--routing.kind", "swapped")


def test_the_text_model_of_a_model_for_pictures_is_exported_alone() -> None:
    from transformers import Gemma3Config

    values = Gemma3Config().to_dict()
    section = model_section(values, "config.json")
    assert to_config(ModelConfig.model_validate(section))["model_type"] == "gemma3_text"
