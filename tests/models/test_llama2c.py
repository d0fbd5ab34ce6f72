"""llama2.c's formats: files written by the test, and a small real model."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.generate import generate
from planaria.models.llama2c import open_llama2c
from planaria.models.llama_stages import Llama

TIED = ModelConfig(vocab=20, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, context=8, norm_eps=1e-5, init_std=0.3)


def to_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, dim = weight.shape
    return weight.view(heads, 2, rows // heads // 2, dim).transpose(1, 2).reshape(rows, dim)


def checkpoint(model: Llama) -> bytes:
    """Return a version-0 file, written field by field."""
    c, state = model.config, model.global_state()

    def layers(name: str, heads: int | None = None) -> list[torch.Tensor]:
        weights = [state[f"model.layers.{i}.{name}.weight"] for i in range(c.layers)]
        return [to_interleaved(w, heads) for w in weights] if heads else weights

    tensors = [state["model.embed_tokens.weight"], *layers("input_layernorm")]
    tensors += layers("self_attn.q_proj", c.heads) + layers("self_attn.k_proj", c.kv)
    tensors += layers("self_attn.v_proj") + layers("self_attn.o_proj") + layers("post_attention_layernorm")
    tensors += layers("mlp.gate_proj") + layers("mlp.down_proj") + layers("mlp.up_proj") + [state["model.norm.weight"]]
    tensors += [torch.full((c.context, c.head_dim // 2), 9.0)] * 2
    tensors += [] if c.tied else [state["lm_head.weight"]]
    vocab = c.vocab if c.tied else -c.vocab
    header = struct.pack("<7i", c.dim, c.hidden, c.layers, c.heads, c.kv, vocab, c.context)
    return header + b"".join(t.contiguous().numpy().tobytes() for t in tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_imported(tied: bool, tmp_path: Path) -> None:
    model = Llama(TIED.model_copy(update={"tied": tied}), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    (tmp_path / "m.bin").write_bytes(checkpoint(model))
    found = open_llama2c(tmp_path / "m.bin").model()
    before, after = model.global_state(), found.global_state()
    assert found.config.model_copy(update={"init_std": 0.3}) == model.config
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:10], "shorter than a llama2.c header"),
        (lambda data: data[:-4], "its header announces"),
        (lambda data: data + b"more", "its header announces"),
        (
            lambda data: struct.pack("<i", 2**31 - 2) + data[4:],
            "is not a multiple|does not divide|header announces|dim = .*: at most",
        ),
        (lambda data: struct.pack("<i", -16) + data[4:], "dim = .*: .*greater than 0"),
        (lambda data: struct.pack("<i", 18) + data[4:], "does not divide"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage: object, message: str, tmp_path: Path) -> None:
    assert callable(damage)
    (tmp_path / "m.bin").write_bytes(damage(checkpoint(Llama(TIED))))
    with pytest.raises(UserError, match=message) as caught:
        open_llama2c(tmp_path / "m.bin").model()
    assert "m.bin" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.bin cannot be read"):
        open_llama2c(tmp_path / "gone.bin")


ONCE_UPON_A_TIME = [1, 403, 407, 261, 378]
"""token ids of the published tokenizer, with the beginning of a text"""
WAS_A_GIRL = [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267, 337, 410, 408, 419, 292, 411]
""", there was a little girl named Lily. She loved to play outs"""


def test_stories260k_generates_a_likely_story(shared_data: Path) -> None:
    model = open_llama2c(shared_data / "stories260K" / "stories260K.bin").model()
    prompt = ONCE_UPON_A_TIME
    assert list(generate(model, prompt, len(WAS_A_GIRL), stops=(1,))) == WAS_A_GIRL

    free = prompt + list(generate(model, prompt, 200, temperature=1.0, seed=1, stops=(1,)))
    shuffled = torch.tensor(free)[torch.randperm(len(free), generator=torch.Generator().manual_seed(0))].tolist()
    with torch.no_grad():
        likely, unlikely = (model.loss(torch.tensor([t[:-1]]), torch.tensor([t[1:]])) for t in (free, shuffled))
    assert likely < 1.6 and unlikely > 4
