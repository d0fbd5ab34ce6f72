"""Memory and work of passes, counted on fake tensors: equal to formulas and to real passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.config.schema import ModelConfig
from planaria.models.activations import PassMode
from planaria.models.families import build_stage, make_family
from planaria.models.transformers.stage_costs import count, layer_parameters, layer_work
from support.small_decoders import section, small

CPU = PassMode(samples=2, device_bytes=0)


def counted(model: ModelConfig, stage: int, passes: PassMode) -> tuple[int, int, int]:
    built = build_stage(model, 2, stage, 0, "meta")
    built.recompute = passes.recompute  # type: ignore[assignment]
    return count(built, stage == 0, model.dim, model.context, passes).bytes


@settings(max_examples=12)
@given(st.sampled_from([64, 128]), st.sampled_from([1, 2, 4]), st.sampled_from([96, 352]), st.booleans(), st.booleans())
def test_the_formula_for_llama_on_a_cpu_matches_the_count(
    dim: int, kv: int, hidden: int, recompute: bool, masked: bool
) -> None:
    model = ModelConfig(vocab=512, dim=dim, layers=4, heads=4, kv_heads=kv, hidden=hidden, context=32)
    passes = CPU._replace(recompute=recompute, masked=masked)
    formula = make_family(model).pass_bytes(model, 2, 1, passes)
    assert formula is not None and formula.kept == pytest.approx(counted(model, 1, passes)[0], rel=0.08)


def test_a_chunked_loss_keeps_two_gradients() -> None:
    model = ModelConfig(vocab=32000, dim=64, layers=2, heads=4, hidden=96, context=512)
    formula, found = make_family(model).pass_bytes(model, 2, 0, CPU), counted(model, 0, CPU)
    assert formula is not None and formula.loss == pytest.approx(found[1], rel=0.04)
    assert found[2] / 2 < formula.working < 2 * found[2]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt2", "qwen3_moe"])
def test_the_count_matches_a_real_pass(kind: str) -> None:
    decoder = small(kind)
    model = section(decoder, context=48)
    built = build_stage(model, 2, 1, 0)
    known = {one.untyped_storage().data_ptr() for one in (*built.parameters(), *built.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, 48, model.dim, requires_grad=True)
    known.add(x.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = built(x)
    saved = x.nbytes + out.nbytes + sum(size for place, size in kept.items() if place not in known)
    found = make_family(model).pass_bytes(model, 2, 1, CPU)
    assert found is not None and 0.9 * saved <= found.kept <= 1.35 * saved


def test_adapters_keep_less_state_and_their_passes_are_counted() -> None:
    pytest.importorskip("peft")
    decoder = small("qwen3")
    model = section(decoder, context=48, lora={"rank": 4, "base": "nowhere", "base_sha256": "0"})
    assert (found := make_family(model).pass_bytes(model, 2, 1, CPU)) is not None and found.kept > 0
    assert (ends := make_family(model).pass_bytes(model, 2, 0, CPU)) is not None and ends.loss > 0


def test_recomputed_layers_keep_only_their_inputs() -> None:
    model = section(small("qwen3"), context=48)
    plain, less = (make_family(model).pass_bytes(model, 2, 1, CPU._replace(recompute=on)) for on in (False, True))
    assert plain is not None and less is not None
    assert less.kept < plain.kept / 2 and less.working > plain.working


def test_layers_of_each_kind_have_their_own_size_and_work() -> None:
    decoder = small("deepseek_v3")
    model = section(decoder, context=16)
    sizes, work = layer_parameters(decoder, model), layer_work(decoder, model)
    assert sizes[0] != sizes[1] == sizes[2] == sizes[3] and work[0] != work[1] == work[2] == work[3]
    tables = decoder.facts.vocab * model.dim * (1 if model.tied else 2)
    assert sum(sizes) + tables + model.dim == decoder.facts.parameters
