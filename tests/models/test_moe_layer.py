"""Models with several blocks per layer: files, transformers' Mixtral, and generation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from planaria.common import digests
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.decode import decode
from planaria.models.huggingface import WEIGHTS, export_model, import_model, is_ours
from planaria.models.llama_stages import Llama
from planaria.models.moe_layer import ExpertRouting
from planaria.models.transformers.decoder import assemble
from planaria.models.transformers.recipe_section import decoder_of
from planaria.runtime.api.import_export import export_again
from planaria.runtime.preparation.weight_sources import open_weights

SHAPE = ModelConfig(vocab=50, dim=24, layers=2, heads=4, kv_heads=2, hidden=20, context=16, init_std=0.3, tied=False)
TOKENS = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))


def made(top_k: int = 2, bias: bool = False, experts: int = 4) -> Llama:
    model = Llama(SHAPE, seed=3, routing=ExpertRouting(experts, top_k, bias))
    for name, tensor in model.global_state().items():
        if name.endswith(("norm.weight", "router.bias")):
            tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5)
    return model.eval()


def logits(model: Llama) -> Tensor:
    with torch.inference_mode():
        return model(TOKENS)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_transformers_reads_a_model_without_bias_as_a_mixtral(top_k: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export_model(model := made(top_k), tmp_path / "out")
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == "MixtralForCausalLM"
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with torch.no_grad():
        assert float((theirs(TOKENS).logits - logits(model)).abs().max()) <= 1e-4
    assert float(logits(model).std()) > 0.01


def test_a_mixtral_from_elsewhere_is_left_to_transformers(tmp_path: Path) -> None:
    """Keys that its config.json lacks have other defaults than a LLaMA's."""
    pytest.importorskip("transformers")
    export_model(model := made(), tmp_path / "out")
    (tmp_path / "out" / digests.FILE).unlink()
    state = load_file(tmp_path / "out" / WEIGHTS)
    save_file(state, tmp_path / "out" / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"this Mixtral was not exported here; use model.family = 'transformers'"):
        import_model(tmp_path / "out")
    assert not is_ours(tmp_path / "out")
    weights = open_weights(tmp_path / "out", family="")
    theirs = assemble(decoder_of(weights.config), weights.tensor)
    with torch.inference_mode():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_a_round_trip_keeps_every_bit(bias: bool, tmp_path: Path) -> None:
    export_model(model := made(bias=bias), tmp_path / "out")
    again = import_model(tmp_path / "out")
    before, after = model.global_state(), again.global_state()
    assert again.routing == model.routing and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_bias_is_refused_by_mixtral_unless_it_is_constant(tmp_path: Path) -> None:
    export_model(model := made(bias=True), tmp_path / "biased")
    named = r"model\.layers\.0\.mlp\.router\.bias is .*Mixtral's routers have no bias.*--no-bias"
    with pytest.raises(UserError, match=named):
        export_again(tmp_path / "biased", tmp_path / "out")
    for name, tensor in model.global_state().items():
        if name.endswith("router.bias"):
            tensor.fill_(0.7)
    export_model(model, tmp_path / "level")
    plain = import_model(export_again(tmp_path / "level", tmp_path / "out"))
    assert plain.routing == ExpertRouting(4, 2)
    torch.testing.assert_close(logits(plain), logits(model))


def test_decoding_with_a_cache_matches_a_plain_forward() -> None:
    model, prompts = made(), [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    for prompt, found in zip(prompts, decode(model, prompts, 8, temperature=0.0), strict=True):
        whole = list(prompt)
        for token in found.ids:
            with torch.inference_mode():
                last = model(torch.tensor(whole)[None])[0, -1]
            assert float(last[token]) == pytest.approx(float(last.max()), abs=1e-4)
            whole.append(token)


def test_all_blocks_are_trained_if_tokens_pass_all() -> None:
    model = made(top_k=4)
    model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def edit(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: {name: value for name, value in (found | changes).items() if value != "gone"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (edit(num_local_experts=10**9), "num_local_experts = 1000000000 must be a number from 1 to 1024"),
        (edit(num_local_experts=True), "num_local_experts = True must be"),
        (edit(num_local_experts=5), r"mlp\.router\.weight has shape \[4, 24\], not \[5, 24\]"),
        (edit(num_local_experts=2, num_experts_per_tok=3), "num_experts_per_tok = 3 must be a number from 1 to 2"),
        (edit(num_experts_per_tok="gone"), "num_experts_per_tok = None must be"),
        (edit(sliding_window=4), "sliding_window = 4 is not supported"),
        (edit(model_type="llama", architectures=None), "num_local_experts = 4 is not supported"),
    ],
)
def test_an_invalid_config_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], complaint: str, tmp_path: Path
) -> None:
    export_model(made(), folder := tmp_path / "out")
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    digests.replace_list(folder, [one.name for one in folder.iterdir() if one.name != digests.FILE])
    with pytest.raises(UserError, match=complaint) as caught:
        import_model(folder)
    assert "\n" not in str(caught.value)


def test_top_k_is_at_most_the_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="top_k = 3 of 2 blocks"):
        Llama(SHAPE, routing=ExpertRouting(2, 3))
