"""Twenty random LLaMA shapes: equal logits after import from and export to ``transformers``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.config.schema import ModelConfig
from planaria.models.huggingface import export_model, open_folder

transformers = pytest.importorskip("transformers")


def drawn(seed: int) -> ModelConfig:
    """Grouped, multi-query and plain heads; tied and untied; widths that are not powers of two."""
    rng = random.Random(f"shape {seed}")
    kv, group, half = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 8)
    heads = kv * group
    return ModelConfig(
        vocab=rng.randint(2, 97),
        dim=heads * 2 * half,
        layers=rng.randint(1, 4),
        heads=heads,
        kv_heads=kv,
        hidden=rng.randint(1, 80),
        context=rng.randint(2, 24),
        rope_theta=rng.choice([100.0, 1e4, 5e5]),
        norm_eps=rng.choice([1e-6, 1e-5, 1e-3]),
        tied=rng.random() < 0.5,
        init_std=0.2,
    )


def theirs_of(config: ModelConfig, seed: int) -> Any:
    torch.manual_seed(seed)
    made = transformers.LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.dim,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv,
        max_position_embeddings=config.context,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied,
        initializer_range=config.init_std,
    )
    model = transformers.LlamaForCausalLM(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide exchanged norms
                parameter.uniform_(0.5, 1.5)
    return model


def tokens_of(config: ModelConfig, seed: int) -> torch.Tensor:
    return torch.randint(0, config.vocab, (2, config.context), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(20))
def test_logits_are_equal_after_import_and_export(seed: int, tmp_path: Path) -> None:
    config = drawn(seed)
    theirs, tokens = theirs_of(config, seed), tokens_of(config, seed)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = open_folder(tmp_path / "theirs").model()
    assert ours.config == config
    export_model(ours, tmp_path / "ours")
    again, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(again).__name__ == "LlamaForCausalLM"
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.01
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_in_several_files_are_read(tied: bool, tmp_path: Path) -> None:
    config = drawn(0).model_copy(update={"tied": tied})
    theirs, tokens = theirs_of(config, 0), tokens_of(config, 0)
    theirs.save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        torch.testing.assert_close(open_folder(tmp_path).model()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
