"""Exports of decoders of ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from planaria.models.huggingface import INDEX
from planaria.models.transformers.files import write_weights
from small_decoders import section, small

pytest.importorskip("transformers")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


@pytest.mark.parametrize("largest", [1 << 30, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_export_has_the_names_and_tensors_of_the_library(
    kind: str, dtype: torch.dtype, largest: int, tmp_path: Path
) -> None:
    """One file, or one for each layer and one around them."""
    decoder = small(kind)
    config = section(decoder)
    named = {name: torch.randn(shape) for name, shape in decoder.shapes(config).items()}
    (ours := tmp_path / "ours").mkdir()
    write_weights(config, named.__getitem__, ours, dtype, largest)
    decoder.whole(named).to(dtype).save_pretrained(tmp_path / "theirs")
    found, expected = tensors(ours), tensors(tmp_path / "theirs")
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) and one.dtype == expected[name].dtype for name, one in found.items())
    files = [*ours.glob("*.safetensors")]
    assert len(files) == (1 if largest > 1 else config.layers + 1)
    if largest == 1:
        assert json.loads((ours / INDEX).read_text())["weight_map"].keys() == found.keys()


def test_an_export_holds_one_file_at_a_time(tmp_path: Path) -> None:
    decoder = small("qwen3")
    config = section(decoder)
    shapes, read = decoder.shapes(config), list[str]()

    def one(name: str) -> Tensor:
        layer = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else ""
        if not read or read[-1] != layer:
            assert len([*tmp_path.glob("*.safetensors")]) == len(read), "the files before it are written"
            read.append(layer)
        return torch.zeros(shapes[name])

    write_weights(config, one, tmp_path, torch.float32, 1)
    assert len(read) == len(set(read)) == config.layers + 1
