"""Runs of ``transformers`` models on the fleet, through kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import ending, folder_of, in_one_process, losses, newest, tiny, train
from planaria.config.schema import RunConfig
from planaria.faults.trace import Fault
from planaria.models.transformers.decoder import PLACE
from planaria.models.transformers.family import model_section
from planaria.models.transformers.shrinking import shrunk
from planaria.models.transformers.skeleton import read_config
from planaria.runtime.checkpoint.loading import weights_of

pytest.importorskip("transformers")


def values_of(kind: str) -> dict[str, Any]:
    """The config.json of a small model that a tokenizer of bytes suits."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[kind]().get_text_config().to_dict() | {"model_type": kind}
    return shrunk(read_config(whole, PLACE)) | {"vocab_size": 260}


def run_of(folder: Path, kind: str, **sections: dict[str, Any]) -> RunConfig:
    model = model_section(values_of(kind), "config.json") | {"context": 32}
    given = {"model": model, "pipeline": {"microbatches": 2}, "checkpoint": {"every": 3}}
    given |= {name: {**given.get(name, {}), **fields} for name, fields in sections.items()}
    return tiny(folder, stages=2, steps=6, **given)


def weights(config: RunConfig) -> dict[str, Tensor]:
    return {atom.name: atom.read("weights") for atom in weights_of(newest(folder_of(config)))}


@pytest.mark.parametrize("kind", ["gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_kills_of_every_stage_change_nothing_under_redundant_copies(tmp_path: Path, kind: str) -> None:
    """Each stage has one layer, of which every other has a sliding window: no spare may take over with another's."""
    config = run_of(tmp_path, kind, recovery={"strategy": "redundant"}, pipeline={"stages": 4})
    faults = [Fault(step=1, stage=1), Fault(step=2, stage=2, moment="backward"), Fault(step=4, stage=0)]
    record = train(config, faults)
    assert ending(record).outcome == "finished" and len(losses(record)) == 6
    unharmed = config.model_copy(update={"name": "unharmed"})
    assert losses(in_one_process(unharmed, name="unharmed")) == losses(record)
    found, expected = weights(config), weights(unharmed)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
