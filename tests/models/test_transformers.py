"""Decoders of ``transformers`` in stages: equal to the library's whole model, or refused in one line."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.transformers.adapters import Lora, base_of
from planaria.models.transformers.alike import unlike_stages
from planaria.models.transformers.check import LIMIT, compared, require_cuttable
from planaria.models.transformers.decoder import PLACE, Decoder
from planaria.models.transformers.family import model_section
from planaria.models.transformers.shrinking import chosen_layers, shrunk
from planaria.models.transformers.skeleton import read_config

pytest.importorskip("transformers")

ARCHITECTURES = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "smollm3", "olmo2"),
    *("phi3", "gpt2", "gpt_neox", "granite", "cohere2", "glm4", "deepseek_v3", "gpt_oss", "falcon", "opt", "mamba"),
]
LEAKING = {"gpt_oss", "falcon", "opt", "mamba"}
"""architectures whose documents see each other although their positions begin anew"""
MIXTURES = {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"}
"""their experts' sums depend on the order of rows"""


def library_config(kind: str) -> dict[str, Any]:
    """The library's default configuration of an architecture, as in its config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values: dict[str, Any] = CONFIG_MAPPING[kind]().get_text_config().to_dict()
    return values | {"model_type": kind}


def small(kind: str, **changed: Any) -> Decoder:
    config = read_config(library_config(kind), PLACE)
    return Decoder.of(shrunk(config) | changed)


def section(decoder: Decoder, **changed: Any) -> ModelConfig:
    return ModelConfig.model_validate(model_section(decoder.values, "config.json") | changed)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_cut_model_equals_the_whole_one(kind: str) -> None:
    found = compared(small(kind))
    assert found.loss == 0 and found.gradient <= (1e-6 if kind in MIXTURES else 0) and found.future == 0
    assert (found.leak > LIMIT) == (kind in LEAKING)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma3_text"])
def test_initial_weights_do_not_depend_on_the_cut(kind: str) -> None:
    decoder = small(kind)
    config = section(decoder)

    def weights(stages: int) -> dict[str, torch.Tensor]:
        cut = config.model_copy(update={"block_layers": None})
        found = {}
        for stage in range(stages + 1):
            built = decoder.build(cut, stages, stage)
            decoder.initialise(built, cut, stages, stage, 7)
            named = built.named_parameters()
            found |= {decoder.global_name(cut, stages, stage, name): p.detach() for name, p in named}
        return found

    one, two = weights(1), weights(4)
    assert one.keys() == two.keys() == decoder.shapes(config).keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert set(dict(decoder.whole(one).named_parameters())) == set(one)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"model_type": "nothing_like_it"}, "model_type = 'nothing_like_it'"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map: the model needs code from its repository"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: the model is quantised"),
        ({"hidden_size": "wide"}, "model_type = 'qwen3'"),
        ({"model_type": "bart"}, "model_type = 'bart'"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers = 1000000000 is not between"),
        ({"num_hidden_layers": 0, "layer_types": []}, "num_hidden_layers = 0 is not between"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=f"^config.json: {complaint}"):
        model_section(library_config("qwen3") | values, "config.json")


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("bert", "tokens see later ones"),
        ("xlm", "a decoder layer cannot be called alone|its loss differs|see later"),
        ("ctrl", "cannot be built|its loss differs"),
        ("zamba2", "share|differs|cannot be|no plain list|no counterpart"),
    ],
)
def test_the_check_refuses_what_would_train_wrongly(kind: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        require_cuttable(Decoder.of(library_config(kind)), masked=False)


def test_masked_documents_are_refused_where_they_leak() -> None:
    with pytest.raises(UserError, match=r"^data.document_mask: .*'mamba': documents of one sample see each other"):
        require_cuttable(small("mamba"), masked=True)


def test_a_model_without_finite_numbers_is_refused() -> None:
    with pytest.raises(UserError, match="its loss differs by nan"):
        require_cuttable(small("qwen3", rms_norm_eps=float("nan")), masked=False)


def test_experts_take_no_matrix_for_each_token() -> None:
    """The library's implementation for "meta" would take 2 * 4096 matrices of 64 KiB here, 512 MiB."""
    decoder = small("mixtral", hidden_size=128, intermediate_size=64)
    config = section(decoder)
    block = decoder.build(config, config.layers, 1)
    decoder.initialise(block, config, config.layers, 1, 7)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        block(torch.randn(1, 4096, 128))
    assert max(event.cpu_memory_usage for event in profile.events()) < 128 << 20


def test_shapes_of_a_hostile_config_take_no_memory() -> None:
    decoder = small("gpt_oss", num_local_experts=10**9)
    config = section(decoder)
    assert decoder.shapes(config)["model.layers.0.mlp.experts.gate_up_proj"][0] == 10**9


def test_randomness_in_training_is_switched_off_with_a_warning() -> None:
    clauses = [*Decoder.of(library_config("gpt2") | {"attn_pdrop": 0.2}).differences]
    assert len(clauses) == 1 and "attn_pdrop = 0.2" in clauses[0]
    assert "balancing" in next(small("mixtral").differences) and [*small("qwen3").differences] == []
    config = read_config(library_config("gpt2") | {"attn_pdrop": 0.2, "summary_first_dropout": 0.3}, PLACE)
    assert (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) == (0, 0, 0)


@pytest.mark.parametrize(
    ("kinds", "stages", "ends", "expected"),
    [
        ([0, 0, 0, 0], 2, 0, ""),
        ([0, 1, 0, 1], 2, 0, ""),
        ([0, 1, 0, 1], 4, 0, r"\(A and B\); they are alike with pipeline.stages = 2 and model.ends_layers = 0"),
        ([1, 0, 0, 0], 2, 0, r"\(BA and AA\); they are alike with pipeline.stages = 3 and model.ends_layers = 1"),
        ([0, 1, 2, 3], 2, 0, "no cut has equal ones"),
    ],
)
def test_unlike_stages_and_the_next_cut(kinds: list[int], stages: int, ends: int, expected: str) -> None:
    config = ModelConfig(layers=len(kinds), ends_layers=ends)
    assert re.search(expected or "^$", unlike_stages(kinds, config, stages))


@pytest.mark.parametrize(
    ("kind", "period"), [("qwen3", 1), ("gemma2", 2), ("gpt_oss", 2), ("smollm3", 4), ("gemma3_text", 6)]
)
def test_alike_stages_are_multiples_of_a_models_period(kind: str, period: int) -> None:
    """Layers of equal shapes may behave differently: sliding or full attention, with or without positions."""
    decoder = Decoder.of(library_config(kind))
    layers = decoder.facts.layers
    config = section(decoder)
    for each in range(1, 7):
        used = layers // each * each
        cut = config.model_copy(update={"ends_layers": layers - used})
        assert (unlike_stages(decoder.facts.kinds, cut, used // each) == "") == (each % period == 0), each


def test_a_small_model_has_every_kind_of_layer() -> None:
    kinds = {"layer_types": ["a", "a", "a", "b", "a", "c"]}
    assert chosen_layers(kinds, 6, 4) == [0, 1, 3, 5]
    assert chosen_layers({}, 6, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_layers_in_the_ends_stage(kind: str) -> None:
    decoder = small(kind)
    config = section(decoder, ends_layers=2)
    torch.manual_seed(3)
    stages = [decoder.build(config, 2, stage) for stage in range(3)]
    for stage, built in enumerate(stages):
        decoder.initialise(built, config, 2, stage, 7)
    named = {
        decoder.global_name(config, 2, stage, name): p
        for stage, built in enumerate(stages)
        for name, p in built.named_parameters()
    }
    tokens = torch.randint(2, 100, (2, 9))
    x = stages[0].embed(tokens)
    for block in stages[1:]:
        x = block(x)
    expected = decoder.whole(named)(input_ids=tokens).logits
    assert torch.equal(stages[0].logits(x), expected)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gpt_oss"])
def test_adapters_on_stages_equal_peft_on_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Logits and gradients of adapters, to the last bit; all else is frozen and no state."""
    peft = pytest.importorskip("peft")
    plain = small(kind)
    config = section(plain, block_layers=(1, 2, 1))
    base = plain.whole({name: torch.randn(shape) * 0.05 for name, shape in plain.shapes(config).items()})
    base.save_pretrained(tmp_path)
    decoder = replace(plain, lora=Lora(4, 8.0, ("linear",), **base_of(tmp_path)))
    stages = [decoder.build(config, 3, stage) for stage in range(4)]
    named = {}
    for stage, built in enumerate(stages):
        decoder.initialise(built, config, 3, stage, 7)
        named |= {decoder.global_name(config, 3, stage, name): one for name, one in built.named_parameters()}
    assert named and all("lora_" in name for name in named) and not [*stages[0].parameters()]
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
    loss = stages[0].loss(x, targets)
    logits = whole(input_ids=tokens).logits
    assert torch.equal(stages[0].logits(x), logits)
    loss.backward()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for name, one in named.items():
        torch.testing.assert_close(one.grad, theirs[name].grad, rtol=1e-5, atol=1e-8)


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


def test_a_copy_of_tied_ends_stays_tied() -> None:
    decoder = small("gpt2")
    config = section(decoder)
    ends = decoder.build(config, 4, 0)
    decoder.initialise(ends, config, 4, 0, 7)
    other = copy.deepcopy(ends)
    with torch.no_grad():
        other.table.add_(1.0)
    x = torch.randn(1, 3, config.dim)
    assert not torch.equal(other.logits(x), ends.logits(x))


def test_the_loss_in_chunks_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small("gemma2")
    config = section(decoder)
    ends = decoder.build(config, 4, 0)
    decoder.initialise(ends, config, 4, 0, 7)
    x, targets = torch.randn(2, 8, config.dim, requires_grad=True), torch.randint(0, config.vocab, (2, 8))

    def gradients() -> list[torch.Tensor]:
        x.grad = None
        ends.zero_grad()
        ends.loss(x, targets).backward()
        ends.fold_gradients()
        return [x.grad.clone(), *(p.grad.clone() for p in ends.parameters() if p.grad is not None)]

    whole = gradients()
    monkeypatch.setattr("planaria.models.transformers.stages.LOGIT_BYTES", 4 * config.vocab * 3)
    for one, other in zip(whole, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
