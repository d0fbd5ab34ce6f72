"""Adapters on stages of decoders of ``transformers``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planaria.common.errors import UserError
from planaria.models.transformers.adapters import PRECISIONS, Lora, base_of
from small_decoders import section, small, stages_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2", "gpt_oss", "granite"])
def test_adapters_on_stages_equal_peft_on_the_whole_model(kind: str, precision: str, tmp_path: Path) -> None:
    """Logits and gradients of adapters, to the last bit; all else is frozen and no state."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    plain = small(kind)
    config = section(plain, block_layers=(1, 2, 1))
    base = plain.whole({name: torch.randn(shape) * 0.05 for name, shape in plain.shapes(config).items()})
    base.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=PRECISIONS[precision])
    decoder = replace(plain, lora=Lora(4, 8.0, ("linear",), **base_of(tmp_path), precision=precision))
    stages, named = stages_of(decoder, config, 3)
    assert named and all("lora_" in name for name in named) and not [*stages[0].parameters()]
    assert all(one.dtype == torch.float32 for one in named.values())
    assert stages[0].head_alias is None or not stages[0].head_alias.requires_grad
    torch.manual_seed(1)
    for name, one in named.items():
        if ".lora_B." in name:
            torch.nn.init.normal_(one, std=0.1)
    assert decoder.lora is not None
    whole = peft.get_peft_model(base, decoder.lora.peft(plain.build(config, 3, 1).layers)).train()
    theirs = {name.removeprefix("base_model.model."): one for name, one in whole.named_parameters()}
    with torch.no_grad():
        for name, one in named.items():
            theirs[name].copy_(one)
    tokens, targets = torch.randint(2, 100, (2, 9)), torch.randint(2, 100, (2, 9))
    x = stages[0].embed(tokens)
    for block in stages[1:]:
        x = block(x)
    assert x.dtype == torch.float32
    loss = stages[0].loss(x, targets)
    expected = whole(input_ids=tokens).logits
    assert torch.equal(stages[0].logits(x), expected)
    loss.backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1).float(), targets.flatten()).backward()
    for name, one in named.items():
        torch.testing.assert_close(one.grad, theirs[name].grad, rtol=1e-5, atol=1e-8)


def test_a_base_in_bf16_takes_half_the_memory(tmp_path: Path) -> None:
    plain = small("qwen3")
    config = section(plain)
    plain.whole({name: torch.randn(shape) for name, shape in plain.shapes(config).items()}).save_pretrained(tmp_path)
    lora = Lora(4, 8.0, ("linear",), **base_of(tmp_path))

    def taken(precision: str, stage: int) -> int:
        built = replace(plain, lora=replace(lora, precision=precision)).build(config, 4, stage)
        return sum(one.nbytes for name, one in built.named_buffers() if name.endswith("weight"))

    for stage in range(5):
        assert taken("fp32", stage) == 2 * taken("bf16", stage) > 0


def test_a_base_that_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    plain = small("qwen3")
    config = section(plain)
    plain.whole({name: torch.zeros(shape) for name, shape in plain.shapes(config).items()}).save_pretrained(tmp_path)
    decoder = replace(plain, lora=Lora(4, 8.0, ("linear",), **base_of(tmp_path)))
    plain.whole({name: torch.ones(shape) for name, shape in plain.shapes(config).items()}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the base model has changed since the run started"):
        decoder.build(config, 4, 1)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match="the base model is not on this machine"):
        decoder.build(config, 4, 1)
