"""Any value in a config.json gives a model or an error of one line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.hf_config import ARCHITECTURES, SUPPORTED_VALUES, to_config
from planaria.models.huggingface import WEIGHTS, is_huggingface, is_ours, open_folder
from planaria.models.llama_stages import Llama
from planaria.models.moe_layer import ExpertRouting, to_file
from planaria.swarm.policy.policies import folder_tokenizer

FAMILIES = ("llama", "planaria_routed")
CONFIG = ModelConfig(vocab=16, dim=8, layers=2, heads=2, kv_heads=1, hidden=12, context=16)
TABLES = ("rope_parameters", "rope_scaling")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 70_000) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@cache
def valid(family: str) -> dict[str, Any]:
    """Return a valid config.json of a family."""
    routing = ExpertRouting(2, 1, bias=True) if family == "planaria_routed" else None
    found = to_config(CONFIG, routing) | {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    return found | {"sliding_window": None}


def folder(path: Path, family: str) -> Path:
    routing = ExpertRouting(2, 1, bias=True) if family == "planaria_routed" else None
    model = Llama(CONFIG, routing=routing)
    named = to_file if routing else str
    state = {named(name): tensor.contiguous() for name, tensor in model.global_state().items()}
    save_file(state, path / WEIGHTS, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: folder(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def outcome(place: Path, config: object) -> str:
    """Open a folder with this config.json; return the error, or "" if there is none."""
    (place / "config.json").write_text(json.dumps(config))
    try:
        is_huggingface(place), is_ours(place)
        open_folder(place)
    except UserError as error:
        assert "\n" not in str(error) and str(place) in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_valid_files_are_read(folders: dict[str, Path], family: str) -> None:
    assert outcome(folders[family], valid(family)) == ""
    assert "rope_parameters" in outcome(folders[family], valid(family) | {"rope_parameters": 5})


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=120)
@given(data=st.data())
def test_any_value_of_any_key_is_read_or_refused(folders: dict[str, Path], family: str, data: st.DataObject) -> None:
    known = [
        *valid(family),
        *SUPPORTED_VALUES,
        *TABLES,
        "rope_theta",
        "head_dim",
        "num_experts_per_tok",
        "use_sliding_window",
    ]
    tables = st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), json_values, max_size=3)
    changes = data.draw(st.dictionaries(st.sampled_from(known), json_values | tables, min_size=1, max_size=3))
    outcome(folders[family], valid(family) | changes)


@settings(max_examples=40)
@given(config=json_values)
def test_any_json_is_read_or_refused(folders: dict[str, Path], config: object) -> None:
    outcome(folders["llama"], config)


@settings(max_examples=60)
@given(value=json_values)
def test_any_end_token_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    place = tmp_path_factory.mktemp("end")
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"</s>": 0}, "merges": []}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (place / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": level, "decoder": level}))
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    try:
        folder_tokenizer(place)
    except UserError as error:
        assert "\n" not in str(error) and str(place) in str(error)
