"""A folder of ``transformers`` and a run that starts from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planaria import cli
from planaria.models.transformers.check import LAYERS, shrink_config
from planaria.models.transformers.decoder import PLACE
from planaria.models.transformers.skeleton import read_config

transformers = pytest.importorskip("transformers")

RECIPE = """
out = "runs"
engine = "inline"
model = {{ context = 24 }}
pipeline = {{ stages = 2, microbatches = 2, microbatch_size = 2 }}
data = {{ source = "text.txt", cache = "cache" }}
optim = {{ lr = {rate}, weight_decay = 0.0, clip = 1e9 }}
train = {{ steps = 4, eval_every = 4, eval_microbatches = 2, start = "./given" }}
recovery = {{ strategy = "checkpoint" }}
"""


def given(folder: Path, kind: str, layers: int = 0) -> Any:
    """Save a small model with a tokenizer of bytes in ``folder``; return the model. ``layers``: 0 for a few."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[kind]().get_text_config().to_dict() | {"model_type": kind}
    if layers:
        whole |= {"num_hidden_layers": layers, "layer_types": (whole["layer_types"] * layers)[:layers]}
    values = shrink_config(read_config(whole, PLACE), layers or LAYERS) | {"vocab_size": 300}
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values)).float()
    model.save_pretrained(folder / "given")
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "given" / "tokenizer.json"))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return model


def train(folder: Path, name: str, rate: float, *flags: str) -> int:
    (folder / f"{name}.toml").write_text(RECIPE.format(rate=rate))
    return cli.run(["train", str(folder / f"{name}.toml"), "--quiet", *flags])
