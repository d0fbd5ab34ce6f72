"""Decoders of ``transformers`` in stages: equal to the whole model, documents in one sample, exports, refusals."""

from __future__ import annotations

import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.families import make_family
from planaria.models.huggingface import INDEX
from planaria.models.llama_layers import document_mask
from planaria.models.transformers.alike import unlike_stages
from planaria.models.transformers.check import (
    MAX_RELATIVE_DIFFERENCE,
    choose_layers,
    compare_with_whole,
    require_cuttable,
)
from planaria.models.transformers.decoder import PLACE, Decoder
from planaria.models.transformers.files import open_decoder
from planaria.models.transformers.loading import load_weights
from planaria.models.transformers.recipe_section import model_section
from planaria.models.transformers.skeleton import read_config, skeleton
from planaria.runtime.checkpoint.foreign.huggingface import write_decoder
from support.small_decoders import library_config, logits, section, small, stages_of

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
ARCHITECTURES = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "smollm3", "olmo2"),
    *("phi3", "gpt2", "gpt_neox", "granite", "cohere2", "glm4", "deepseek_v3", "gpt_oss", "falcon", "opt", "mamba"),
]
LEAKING = {"mamba"}
"""architectures whose documents see each other"""
MIXTURES = {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"}
"""their experts' sums depend on the order of rows"""


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_cut_model_equals_the_whole_one(kind: str) -> None:
    found = compare_with_whole(small(kind))
    assert found.loss == 0 and found.gradient <= (1e-6 if kind in MIXTURES else 0) and found.future == 0
    assert (found.leak > MAX_RELATIVE_DIFFERENCE) == (kind in LEAKING)


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
    assert set(dict(decoder.assemble(one).named_parameters())) == set(one)


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
        ("roberta", "tokens see later ones"),
        ("deepseek_v4", r"hidden states have shape \[1, 4, 4, 4096\]"),
        ("hy_v4", r"hidden states have shape \[1, 4, 4, 2816\]"),
        ("gemma3n_text", "layer types producing a cache"),
        ("gemma4_text", "cannot be built"),
        ("longcat_flash", "no plain list of decoder layers"),
        ("hrm_text", "no plain list of decoder layers"),
        ("xlnet", "a decoder layer cannot be called alone"),
        ("cpmant", "cannot be built"),
        ("xlm", "a decoder layer cannot be called alone|its loss differs|see later"),
        ("ctrl", "cannot be built|its loss differs"),
        ("zamba", "share|cannot be built"),
        ("zamba2", "share|differs|cannot be|no plain list|no counterpart"),
    ],
)
def test_the_check_refuses_what_would_train_wrongly(kind: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as raised:
        require_cuttable(Decoder.of(library_config(kind)), masked=False)
    assert "\n" not in str(raised.value)


def all_architectures() -> list[str]:
    """The architectures that ``python -m benchmarks.pretrained decoders`` cut."""
    saved = json.loads((ROOT / "results" / "pretrained.json").read_text())
    return [row["what"] for row in saved["decoders"]["rows"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", all_architectures())
def test_every_listed_decoder_equals_the_whole_one_and_is_exported(kind: str, tmp_path: Path) -> None:
    found = require_cuttable(Decoder.of(library_config(kind)), masked=False)
    assert found.loss == found.gradient == found.future == 0
    compare_exports(small(kind), torch.bfloat16, 1, tmp_path)


def test_frequencies_that_depend_on_the_length_need_all_tokens() -> None:
    scaled = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for changes, accepts in (({}, True), ({"rope_scaling": scaled}, False)):
        config = section(small("qwen3")).model_copy(update={"options": {"config": json.dumps(changes)}})
        assert make_family(config).accepts_shorter_samples() is accepts


def test_routing_noise_is_switched_off() -> None:
    noisy = library_config("phimoe") | {"router_jitter_noise": 0.1}
    assert "router_jitter_noise = 0.1" in next(Decoder.of(noisy).differences)
    found = require_cuttable(Decoder.of(noisy), masked=False)
    assert found.loss == found.gradient == 0


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
        ([0, 1, 0, 1], 4, 0, r"\(A and B\); they are alike with pipeline.stages = 2, model.ends_layers = 0"),
        ([1, 0, 0, 0], 2, 0, r"\(BA and AA\); they are alike with pipeline.stages = 3, model.ends_layers = 1"),
        ([0, 1, 2, 3], 2, 0, "no cut has equal ones"),
    ],
)
def test_unlike_stages_are_refused_with_the_next_cut(kinds: list[int], stages: int, ends: int, expected: str) -> None:
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
    assert choose_layers(kinds, 6, 4) == [0, 1, 3, 5]
    assert choose_layers({}, 6, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_layers_in_the_ends_stage_compute_the_same(kind: str) -> None:
    decoder = small(kind)
    config = section(decoder, ends_layers=2)
    torch.manual_seed(3)
    stages, named = stages_of(decoder, config, 2)
    tokens = torch.randint(2, 100, (2, 9))
    assert torch.equal(logits(stages, tokens), decoder.assemble(named)(input_ids=tokens).logits)


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


def test_another_thread_builds_modules_with_memory_meanwhile() -> None:
    """Torch's hook on parameters is global to the process."""
    config = small("qwen3").config
    stop, built = Event(), list[torch.device]()

    def build() -> None:
        while not stop.is_set():
            built.append(torch.nn.Linear(2, 2).weight.device)

    thread = Thread(target=build)
    thread.start()
    try:
        for _ in range(5):
            skeleton(config, "sdpa", PLACE)
    finally:
        stop.set()
        thread.join()
    assert len(built) > 10 and {device.type for device in built} == {"cpu"}


def test_implementations_of_attention_for_gpus_are_refused() -> None:
    """The check before a run cannot call them on the CPU."""
    config = section(small("qwen3"))
    other = config.model_copy(update={"options": {**config.options, "attention": "flex_attention"}})
    with pytest.raises(UserError, match=r"^model.options.attention = 'flex_attention': .* 'sdpa' or 'eager'$"):
        make_family(other)


def test_values_beside_the_parameters_are_refused(tmp_path: Path) -> None:
    """A router's biases are not trained by gradients, and stages have only parameters."""
    decoder = small("deepseek_v3")
    whole = decoder.assemble({name: torch.zeros(shape) for name, shape in decoder.shapes(section(decoder)).items()})
    whole.save_pretrained(tmp_path)
    open_decoder(tmp_path)
    whole.model.layers[1].mlp.gate.e_score_correction_bias.fill_(0.5)
    whole.save_pretrained(tmp_path)
    load_weights.cache_clear()
    with pytest.raises(UserError, match="e_score_correction_bias is a buffer, not a parameter"):
        open_decoder(tmp_path)


END = 1
"""separator of documents"""
MASKED = ["afmoe", "gpt_oss", "falcon", "opt", "mpt", "biogpt", "xglm"]
"""architectures that do not find documents by positions that start again"""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [*MASKED, "llama", "gemma2", "gpt2"])
def test_documents_of_one_sample_do_not_see_each_other(kind: str, attention: str) -> None:
    """An earlier document changes no bit of a later one, which equals itself alone but for the order of sums."""
    decoder = replace(small(kind), attention=attention)
    config = section(decoder, block_layers=(1, 2, 1))
    stages, _ = stages_of(decoder, config, 3)
    torch.manual_seed(1)
    one = torch.randint(2, 100, (2, 24))
    one[:, 12] = one[0, 5] = END
    other = one.clone()
    other[:, :12] = torch.randint(2, 100, (2, 12))
    with torch.no_grad():
        first, second = (logits(stages, each, document_mask(each, END))[:, 12:] for each in (one, other))
        alone = logits(stages, one[:, 12:])
        open_logits = logits(stages, one)[:, 12:]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(first, open_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gpt_oss", "falcon"])
def test_masked_documents_in_stages_equal_the_whole_model(kind: str) -> None:
    """Bit-identical for every cut, also with layers in the ends stage."""
    from transformers.masking_utils import create_masks_for_generate

    decoder = small(kind)
    named: dict[str, torch.nn.Parameter] = {}
    tokens = torch.randint(2, 100, (2, 24))
    tokens[:, 12] = END
    mask, found = document_mask(tokens, END), []
    for ends, stages in ((0, 1), (0, 4), (2, 2)):
        config = section(decoder, ends_layers=ends)
        built, named = stages_of(decoder, config, stages)
        with torch.no_grad():
            found.append(logits(built, tokens, mask))
    whole, ids = decoder.assemble(named), torch.arange(24).remainder(12).expand(2, -1)
    masks = create_masks_for_generate(whole.config, torch.zeros(2, 24, 1), None, None, ids)
    with torch.no_grad():
        expected = whole(input_ids=tokens, position_ids=ids, attention_mask=masks, use_cache=False).logits
    assert all(torch.equal(one, expected) for one in found)


def test_masked_documents_are_refused_where_they_leak() -> None:
    with pytest.raises(UserError, match=r"^data.document_mask: .*'mamba': documents of one sample see each other"):
        require_cuttable(small("mamba"), masked=True)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def compare_exports(decoder: Decoder, dtype: torch.dtype, largest: int, folder: Path) -> list[Path]:
    """Export random weights here and with the library; compare names and tensors, and return the files."""
    config = section(decoder)
    named = {name: torch.randn(shape) for name, shape in decoder.shapes(config).items()}
    (ours := folder / "ours").mkdir()
    write_decoder(config, named.__getitem__, ours, "fp32" if dtype == torch.float32 else "bf16", largest)
    decoder.assemble(named).to(dtype).save_pretrained(folder / "theirs")
    found, expected = tensors(ours), tensors(folder / "theirs")
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) and one.dtype == expected[name].dtype for name, one in found.items())
    if largest == 1:
        assert json.loads((ours / INDEX).read_text())["weight_map"].keys() == found.keys()
    return [*ours.glob("*.safetensors")]


@pytest.mark.parametrize("largest", [1 << 30, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_export_has_the_names_and_tensors_of_the_library(
    kind: str, dtype: torch.dtype, largest: int, tmp_path: Path
) -> None:
    """One file, or one for each layer and for each tensor outside."""
    decoder = small(kind)
    outside = sum(f"{decoder.facts.path}." not in name for name in decoder.shapes(section(decoder)))
    files = compare_exports(decoder, dtype, largest, tmp_path)
    assert len(files) == (1 if largest > 1 else section(decoder).layers + outside)


@pytest.mark.parametrize("largest", [1 << 30, 1])
def test_an_export_holds_one_layer_at_a_time(largest: int, tmp_path: Path) -> None:
    decoder = small("qwen3")
    config = section(decoder)
    shapes, layers, alive = decoder.shapes(config), list[str](), list[weakref.ref[Tensor]]()

    def one(name: str) -> Tensor:
        layer = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else name
        if not layers or layers[-1] != layer:
            assert not any(ref() is not None for ref in alive), "the tensors of the layer before it are freed"
            layers.append(layer)
        tensor = torch.zeros(shapes[name])
        alive.append(weakref.ref(tensor))
        return tensor

    write_decoder(config, one, tmp_path, "fp32", largest)
    outside = sum(".layers." not in name for name in shapes)
    assert len(layers) == len(set(layers)) == config.layers + outside and len(alive) == len(shapes)
