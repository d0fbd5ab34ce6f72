"""Runs of ``transformers`` models on the fleet, through kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.config.schema import ModelConfig, RunConfig
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault
from planaria.models.transformers.adapters import base_of
from planaria.models.transformers.check import shrink_config
from planaria.models.transformers.decoder import PLACE, Decoder
from planaria.models.transformers.recipe_section import model_section
from planaria.models.transformers.skeleton import read_config
from planaria.runtime.checkpoint.loading import weights_of
from support.live.harness import ending, folder_of, in_one_process, losses, newest, tiny, train

pytest.importorskip("transformers")


def values_of(kind: str) -> dict[str, Any]:
    """The config.json of a small model that a tokenizer of bytes suits."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[kind]().get_text_config().to_dict() | {"model_type": kind}
    return shrink_config(read_config(whole, PLACE)) | {"vocab_size": 260}


def run_of(folder: Path, kind: str, options: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """``options``: further ones of the family."""
    model = model_section(values_of(kind), "config.json") | {"context": 32}
    model["options"] |= options or {}
    given = {"model": model, "pipeline": {"microbatches": 2}, "checkpoint": {"every": 3}}
    given |= {name: {**given.get(name, {}), **fields} for name, fields in sections.items()}
    return tiny(folder, stages=2, steps=6, **given)


def weights(config: RunConfig) -> dict[str, Tensor]:
    return {atom.name: atom.read("weights") for atom in weights_of(newest(folder_of(config)))}


def trained(folder: Path, kind: str) -> dict[str, Any]:
    """Write a base model with random weights in bf16; return the settings of adapters on it, with it in bf16."""
    decoder = Decoder.of(values_of(kind))
    shapes = decoder.shapes(ModelConfig.model_validate(model_section(decoder.values, "config.json")))
    generator = torch.Generator().manual_seed(1)
    whole = decoder.assemble({name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()})
    whole.to(torch.bfloat16).save_pretrained(folder)
    return {"rank": 4, "precision": "bf16", **base_of(folder)}


def require_unharmed(config: RunConfig, faults: list[Fault]) -> RunRecord:
    """Require the losses and weights of a run without ``faults``, to the last bit."""
    record = train(config, faults)
    assert ending(record).outcome == "finished", ending(record)
    assert len(losses(record)) == config.train.steps
    unharmed = config.model_copy(update={"name": "unharmed"})
    assert losses(in_one_process(unharmed, name="unharmed")) == losses(record)
    found, expected = weights(config), weights(unharmed)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    return record


def test_kills_change_nothing_under_redundant_copies(tmp_path: Path) -> None:
    """Each stage has one layer, of which every other has a sliding window: no spare may take over with another's."""
    config = run_of(tmp_path, "gemma2", recovery={"strategy": "redundant"}, pipeline={"stages": 4})
    faults = [Fault(step=1, stage=1), Fault(step=2, stage=2, moment="backward"), Fault(step=4, stage=0)]
    require_unharmed(config, faults)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_a_kill_of_each_stage_changes_nothing(tmp_path: Path, kind: str, seed: int) -> None:
    sections = {"recovery": {"strategy": "redundant"}, "pipeline": {"stages": 4}, "train": {"steps": 16}}
    config = run_of(tmp_path, kind, **sections)
    moments = ("forward", "backward", "commit")
    faults = [Fault(step=3 * stage + 2, stage=stage, moment=moments[(stage + seed) % 3]) for stage in range(5)]
    require_unharmed(config.model_copy(update={"seed": seed}), faults)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["forward", "backward", "commit"])
def test_a_kill_in_every_step_changes_nothing(tmp_path: Path, moment: Any) -> None:
    """Each commit makes the twins whole again, so that the next loss is recovered."""
    sections = {"recovery": {"strategy": "redundant"}, "pipeline": {"stages": 4}, "train": {"steps": 8}}
    config = run_of(tmp_path, "qwen3", **sections)
    require_unharmed(config, [Fault(step=n, stage=(n + 1) % 5, moment=moment) for n in range(7)])


@pytest.mark.parametrize("strategy", ["redundant", pytest.param("redundant, checkpoint", marks=pytest.mark.slow)])
def test_a_stage_lost_before_its_twin_is_filled_again_is_not_rebuilt(tmp_path: Path, strategy: str) -> None:
    """Stage 1, the twin's host, dies after the commit of a step, and stage 2 in the next step."""
    config = run_of(tmp_path, "qwen3", recovery={"strategy": strategy}, pipeline={"stages": 4})
    record = train(config, [Fault(step=1, stage=1, moment="commit"), Fault(step=2, stage=2, moment="forward")])
    if strategy == "redundant":
        assert ending(record).outcome == "cannot"
        assert ending(record).reason.startswith(
            "redundant cannot rebuild it: stage 2's twin at stage 1 is incomplete "
            "(0 of 1 steps since stage 1 got a new worker); "
        )
    else:
        assert ending(record).outcome == "finished" and len(losses(record)) == config.train.steps


@pytest.mark.parametrize("kind", ["gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_kills_change_nothing_for_adapters_on_a_base_in_bf16(tmp_path: Path, kind: str) -> None:
    """Frozen weights come from the base's file again; adapters and moments, in fp32, from a twin."""
    pytest.importorskip("peft")
    lora = trained(tmp_path / "base", kind)
    config = run_of(tmp_path, kind, model={"lora": lora}, recovery={"strategy": "redundant"}, optim={"lr": 0.01})
    require_unharmed(config, [Fault(step=1, stage=1), Fault(step=3, stage=2, moment="backward")])
    assert all(one.dtype == torch.float32 and one.abs().sum() > 0 for one in weights(config).values())


@pytest.mark.slow
def test_kills_change_nothing_in_packed_documents(tmp_path: Path) -> None:
    """A model that takes the library's masks, since it does not find documents by positions."""
    lines = (json.dumps({"text": f"{number} times {number * 7}"}) for number in range(900))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    data = {"source": str(tmp_path / "texts.jsonl"), "document_mask": True}
    config = run_of(tmp_path, "opt", recovery={"strategy": "redundant"}, data=data)
    record = require_unharmed(config, [Fault(step=1, stage=1), Fault(step=3, stage=0)])
    unmasked = config.model_copy(update={"data": config.data.model_copy(update={"document_mask": False})})
    assert losses(in_one_process(unmasked, name="unmasked")) != losses(record)
