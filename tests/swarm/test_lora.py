"""Adapters on our own LLaMA are peft's: the same numbers from the same files, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_swarm import MODEL, byte_tokenizer

from planaria.models.lora import adapt, has_adapters, load_adapters, merged, save_adapters
from planaria.models.stages import Llama
from planaria.swarm.policy.policies import LlamaPolicy, open_policy

TOKENS = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(rank: int = 3, seed: int = 1) -> Llama:
    """With products that are not 0."""
    model = Llama(MODEL.model_copy(update={"layers": 2, "ends_layers": 1, "kv_heads": 2}), seed=seed)
    adapt(model, rank, 2 * rank, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_up"):
                parameter.normal_(0, 0.1, generator=generator)
    return model


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def test_an_adapter_that_has_learned_nothing_adds_nothing() -> None:
    plain, model = Llama(MODEL, seed=1), Llama(MODEL, seed=1)
    adapt(model, 4, 8, 0)
    assert torch.equal(model(TOKENS), plain(TOKENS)) and has_adapters(model) and not has_adapters(plain)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 * MODEL.layers and all("lora_" in name for name in trained)


def test_merged_matrices_do_the_same() -> None:
    model = adapted()
    assert not torch.allclose(model(TOKENS), Llama(model.config, seed=1)(TOKENS), atol=1e-3), "they do add something"
    model, plain = model.double(), Llama(model.config).double()
    plain.load_global_state(merged(model))
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=0, atol=1e-12)


def test_peft_reads_the_files_and_finds_the_same_numbers(tmp_path: Path) -> None:
    """Logits and gradients of transformers' Llama with peft, from what is exported here."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = adapted()
    bare = Llama(model.config)
    bare.load_global_state({name: one for name, one in model.global_state().items() if "lora_" not in name})
    LlamaPolicy(bare, byte_tokenizer()).export(tmp_path / "base")
    save_adapters(model, tmp_path / "adapters", "base")
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    other = peft.PeftModel.from_pretrained(other, tmp_path / "adapters", is_trainable=True).eval()
    torch.testing.assert_close(other(input_ids=TOKENS).logits, model(TOKENS), rtol=0, atol=1e-5)
    loss_of(model(TOKENS)).backward()
    loss_of(other(input_ids=TOKENS).logits).backward()
    theirs = {name: p.grad for name, p in other.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(theirs) == len(ours)
    norms = [sorted(float(grad.norm()) for grad in grads.values()) for grads in (ours, theirs)]
    torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-4, atol=1e-7)


def test_files_give_the_adapters_back(tmp_path: Path) -> None:
    first, other = adapted(seed=1), adapted(seed=1)
    adapters = [p for name, p in other.named_parameters() if "lora_" in name]
    with torch.no_grad():
        for parameter in adapters:
            parameter.add_(1.0)
    assert not torch.equal(first(TOKENS), other(TOKENS))
    save_adapters(first, tmp_path / "adapters", "base")
    load_adapters(other, load_file(tmp_path / "adapters" / "adapter_model.safetensors"))
    assert torch.equal(first(TOKENS), other(TOKENS))
    with pytest.raises(OSError):
        save_adapters(first, tmp_path / "adapters", "base")


def test_an_adapted_policy_draws_and_is_exported_as_one_without(tmp_path: Path) -> None:
    policy = LlamaPolicy(adapted(), byte_tokenizer())
    (drawn,) = policy.sample([[1, 2, 3]], 2, 6, 1.0, 0, torch.Generator().manual_seed(0))
    policy.export(tmp_path / "model")
    merged_policy = open_policy(str(tmp_path / "model"))
    assert isinstance(merged_policy, LlamaPolicy) and not merged_policy.adapted
    (again,) = merged_policy.sample([[1, 2, 3]], 2, 6, 1.0, 0, torch.Generator().manual_seed(0))
    assert [one.ids for one in drawn] == [one.ids for one in again]
