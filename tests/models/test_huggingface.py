"""Export and import: lossless, atomic, with errors for invalid folders; logits: ``test_foreign_shapes.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from planaria.common import digests
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.huggingface import export_model, import_model
from planaria.models.llama_stages import Llama

transformers = pytest.importorskip("transformers")

TIED = ModelConfig(vocab=50, dim=24, layers=2, heads=4, hidden=40, context=16, init_std=0.3)
CONFIGS = {
    "tied": TIED,
    "untied": TIED.model_copy(update={"tied": False}),
    "grouped": TIED.model_copy(update={"kv_heads": 2, "rope_theta": 500.0, "norm_eps": 1e-4}),
}
TOKENS = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))


def tokenizer_json(folder: Path, size: int = 3) -> Path:
    vocab = {"a": 0, "b": 1, "<end>": 2} | {f"x{i}": i for i in range(3, size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    file = folder / "made.json"
    tokenizer.save(str(file))
    return file


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_round_trip_keeps_every_bit(kind: str, tmp_path: Path) -> None:
    model = Llama(CONFIGS[kind], seed=1)
    export_model(model, tmp_path / "out")
    before, after = model.global_state(), import_model(tmp_path / "out").global_state()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (kind == "untied")  # noqa: SIM118 (no mapping)


def with_head(folder: Path, head: torch.Tensor, apart: bool, dtype: torch.dtype = torch.float32) -> Llama:
    """Export a model that its config ties, with a head in the same file or another."""
    model = Llama(TIED, seed=1)
    model.load_global_state({name: tensor.to(dtype).float() for name, tensor in model.global_state().items()})
    export_model(model, folder)
    state = {name: tensor.to(dtype).contiguous() for name, tensor in model.global_state().items()}
    extra = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    (folder / "model.safetensors").unlink()
    parts = {"one.safetensors": state, "two.safetensors": extra} if apart else {"model.safetensors": {**state, **extra}}
    for name, part in parts.items():
        save_file(part, folder / name)
    if apart:
        weight_map = {key: name for name, part in parts.items() for key in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    digests.replace_list(folder, ["config.json", *parts, "model.safetensors.index.json"])
    return model


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_repeated_tied_head_is_dropped(tmp_path: Path, apart: bool, dtype: torch.dtype) -> None:
    head = Llama(TIED, seed=1).global_state()["model.embed_tokens.weight"].to(dtype).float()
    model = with_head(tmp_path / "out", head, apart, dtype)
    found = import_model(tmp_path / "out")
    assert found.config.tied and torch.equal(found(TOKENS), model(TOKENS))


@pytest.mark.parametrize("apart", [False, True])
def test_a_head_that_differs_is_kept_although_the_config_ties_it(tmp_path: Path, apart: bool) -> None:
    """Its last row differs in one number; it survives an export."""
    head = Llama(TIED, seed=1).global_state()["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    with_head(tmp_path / "out", head, apart)
    found = import_model(tmp_path / "out")
    export_model(found, tmp_path / "again")
    for model in (found, import_model(tmp_path / "again")):
        assert not model.config.tied and torch.equal(model.global_state()["lm_head.weight"], head)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.allclose(theirs(TOKENS).logits, found(TOKENS), atol=1e-5)


def test_the_tokenizer_is_exported(tmp_path: Path) -> None:
    export_model(Llama(TIED), tmp_path / "out", tokenizer_json(tmp_path), end=2)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("ab")["input_ids"] == [0, 1]
    assert (loaded.eos_token, loaded.eos_token_id, loaded.model_max_length) == ("<end>", 2, 16)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2


def test_an_export_is_atomic_and_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        export_model(Llama(TIED), full)
    with pytest.raises(UserError, match="ids go up to 59, but the model has rows for 50"):
        export_model(Llama(TIED), tmp_path / "out", tokenizer_json(tmp_path, 60))

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("planaria.models.huggingface.save_file", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*out \(no space left; .* MB free there\); make room"):
        export_model(Llama(TIED), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "made.json"]
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    export_model(Llama(TIED), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def write(name: str, text: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_text(text)

    return apply


def index_to(file: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(model_type="qwen2", architectures=["Qwen2ForCausalLM"]), "Qwen2ForCausalLM.* is not supported"),
        (edit(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification.* is not supported"),
        (edit(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling of type 'linear'"),
        (edit(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "rope_scaling of type 'llama3'"),
        (edit(attention_bias=True), "attention_bias = True"),
        (edit(mlp_bias=True), "mlp_bias = True"),
        (edit(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (edit(head_dim=8), "head_dim = 8 must be"),
        (edit(hidden_size=25), "config.json: .*25 does not divide"),
        (edit(hidden_size="wide"), "config.json: hidden_size: .*integer"),
        (edit(intermediate_size=10**6), r"gate_proj.weight has shape \[40, 24\], not \[1000000, 24\]"),
        (edit(num_hidden_layers=3), "model.layers.2.* is missing"),
        (edit(num_hidden_layers=1), "model.layers.1.* is not a parameter"),
        (write("config.json", "{"), "config.json: not JSON"),
        (write("config.json", "[]"), "config.json is not a JSON object"),
        (write("model.safetensors", "rubbish"), "model.safetensors: not a readable safetensors file"),
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (index_to("gone.safetensors"), "gone.safetensors: missing"),
        (index_to("../elsewhere.safetensors"), "weight_map must name a file of this folder"),
    ],
)
def test_an_invalid_folder_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    export_model(Llama(TIED), tmp_path / "out")
    damage(tmp_path / "out")
    digests.replace_list(tmp_path / "out", [file.name for file in (tmp_path / "out").glob("*.[js]*[!6]")])
    with pytest.raises(UserError, match=message) as caught:
        import_model(tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["rubbish", "{}", '{"model": {"type": "BPE"}}'])
def test_an_invalid_tokenizer_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "made.json").write_text(text)
    with pytest.raises(UserError, match=r"made.json: not "):
        export_model(Llama(TIED), tmp_path / "out", tmp_path / "made.json")
