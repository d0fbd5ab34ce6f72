"""Adapters on stages of decoders of ``transformers``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planaria.common.errors import UserError
from planaria.config.model_config import AdapterConfig
from planaria.models.transformers.adapters import PRECISIONS, Lora, base_of, settings_of
from planaria.models.transformers.files import export_adapters
from support.small_decoders import logits, section, small, stages_of

pytest.importorskip("transformers")
PEAK = """
import json, re, sys
from planaria.config.schema import ModelConfig
from planaria.models.transformers.adapters import Lora
from planaria.models.transformers.decoder import Decoder
text, lora, config = json.loads(sys.argv[1])
lora["targets"] = tuple(lora["targets"])
decoder, config = Decoder(text, lora=Lora(**lora)), ModelConfig.model_validate(config)
decoder.build(config.model_copy(update={"layers": 8}), 8, 1)  # imports peft and allocates once
def kilobytes(field): return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
before = kilobytes("VmRSS")
built = decoder.build(config, 4, 2)
frozen = [one.nbytes for one in built.buffers()]
print((kilobytes("VmHWM") - before) * 1024, sum(frozen), max(frozen))
"""
"""prints how far building a stage raises a process's peak, the stage's frozen bytes, and those of its largest tensor"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "ends_layers"),
    [("qwen3", 0), ("qwen3", 1), ("gpt2", 0), ("gemma2", 0), ("gpt_oss", 0), ("granite", 0)],
)
def test_adapters_on_stages_equal_peft_on_the_whole_model(
    kind: str, ends_layers: int, precision: str, tmp_path: Path
) -> None:
    """Logits equal to the last bit, and gradients of adapters within rounding; all else is frozen and no state."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    plain = small(kind)
    config = section(plain, ends_layers=ends_layers, block_layers=(1, 2 - ends_layers, 1))
    base = plain.assemble({name: torch.randn(shape) * 0.05 for name, shape in plain.shapes(config).items()})
    base.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=PRECISIONS[precision])
    decoder = replace(plain, lora=Lora(4, 8.0, ("linear",), **base_of(tmp_path), precision=precision))
    stages, named = stages_of(decoder, config, 3)
    assert named and all("lora_" in name for name in named)
    assert bool([*stages[0].parameters()]) == bool(ends_layers)
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


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe", "llama4_text"])
def test_exported_adapters_of_mixtures_load_in_peft(kind: str, tmp_path: Path) -> None:
    """Also those of dense layers and shared experts, whose matrices have the names of fused experts."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    plain = small(kind)
    config = section(plain)
    base = plain.assemble({name: torch.randn(shape) * 0.05 for name, shape in plain.shapes(config).items()})
    base.save_pretrained(tmp_path / "base")
    decoder = replace(plain, lora=Lora(4, 8.0, ("linear",), **base_of(tmp_path / "base")))
    stages, named = stages_of(decoder, config, 4)
    for one in named.values():
        torch.nn.init.normal_(one, std=0.1)
    assert any("shared_expert" in name for name in named)
    adapted = config.model_copy(update={"lora": AdapterConfig(rank=4, alpha=8.0, **base_of(tmp_path / "base"))})
    (tmp_path / "adapters").mkdir()
    export_adapters(adapted, lambda name: named[name].detach(), tmp_path / "adapters", torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    whole = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    tokens = torch.randint(2, 100, (2, 9))
    ours = logits(stages, tokens)
    torch.testing.assert_close(whole(input_ids=tokens).logits, ours, rtol=0, atol=1e-6)
    assert (whole.merge_and_unload()(input_ids=tokens).logits - ours).abs().max() < 1e-6
    targets = settings_of(tmp_path / "adapters").targets.split(",")
    layers = plain.build(config, 1, 1).layers
    assert set(targets) == decoder.lora.peft(layers).target_modules  # type: ignore[union-attr]


def test_a_base_in_bf16_takes_half_the_memory(tmp_path: Path) -> None:
    plain = small("qwen3")
    config = section(plain)
    plain.assemble({name: torch.randn(shape) for name, shape in plain.shapes(config).items()}).save_pretrained(tmp_path)
    lora = Lora(4, 8.0, ("linear",), **base_of(tmp_path))

    def taken(precision: str, stage: int) -> int:
        built = replace(plain, lora=replace(lora, precision=precision)).build(config, 4, stage)
        return sum(one.nbytes for name, one in built.named_buffers() if name.endswith("weight"))

    for stage in range(5):
        assert taken("fp32", stage) == 2 * taken("bf16", stage) > 0


def test_a_stage_reads_its_own_layers_and_keeps_no_second_copy(tmp_path: Path) -> None:
    """The peak of a process that builds one of four stages is at most that stage's weights and one tensor more."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 300}
    plain = small("qwen3", layer_types=["full_attention"] * 8, **sizes)
    config = section(plain)
    plain.assemble({name: torch.zeros(shape) for name, shape in plain.shapes(config).items()}).save_pretrained(tmp_path)
    lora = Lora(4, 8.0, ("linear",), **base_of(tmp_path))
    job = (plain.text, dataclasses.asdict(lora), config.model_dump(mode="json"))
    found = subprocess.run([sys.executable, "-c", PEAK, json.dumps(job)], capture_output=True, text=True, check=True)
    grown, frozen, largest = map(int, found.stdout.split())
    assert frozen > 50e6 and frozen / 2 < grown < frozen + 2 * largest + 20e6
    assert (tmp_path / "model.safetensors").stat().st_size > 3.9 * frozen


def test_a_base_that_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    plain = small("qwen3")
    config = section(plain)
    plain.assemble({name: torch.zeros(shape) for name, shape in plain.shapes(config).items()}).save_pretrained(tmp_path)
    decoder = replace(plain, lora=Lora(4, 8.0, ("linear",), **base_of(tmp_path)))
    plain.assemble({name: torch.ones(shape) for name, shape in plain.shapes(config).items()}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the base model has changed since the run started"):
        decoder.build(config, 4, 1)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match="the base model is not on this machine"):
        decoder.build(config, 4, 1)
