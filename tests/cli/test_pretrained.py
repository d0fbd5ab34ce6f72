"""``train --train.start``: inherit the shape of given weights; refuse invalid weights and recipes in advance."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planaria import cli
from planaria.common import digests
from planaria.common.errors import UserError
from planaria.config.schema import DataConfig, ModelConfig
from planaria.config.shipped import shipped_recipes
from planaria.data.tokenizer import load_tokenizer
from planaria.models.huggingface import export_model
from planaria.models.llama_stages import Llama
from planaria.runtime.api import training
from planaria.runtime.api.configure import configure
from planaria.runtime.checkpoint.loading import load_model
from planaria.runtime.checkpoint.stage_file import require_stage, stage_file
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.preparation.prepare import prepare
from planaria.runtime.preparation.run_folders import config_of
from planaria.runtime.preparation.starting_weights import branch_off
from planaria.runtime.preparation.weight_sources import open_model, open_weights
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from support.command_line import refused

MODEL = ModelConfig(
    vocab=300, dim=32, layers=5, heads=4, kv_heads=2, hidden=48, context=64, rope_theta=5e4, norm_eps=1e-4, tied=False
)
RECIPE = """
name = "child"
engine = "inline"
model = {{ context = 32, ends_layers = 1 }}
pipeline = {{ stages = 4, microbatches = 2, microbatch_size = 1 }}
data = {{ source = "{folder}/text.txt", cache = "{folder}/cache" }}
train = {{ steps = 1, eval_every = 0 }}
recovery = {{ strategy = "checkpoint" }}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its text, and ``theirs``, a model without planaria's digests."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    (folder / "child.toml").write_text(RECIPE.format(folder=folder))
    load_tokenizer(DataConfig(tokenizer="bytes"), 300, folder).save(folder / "tokenizer.json")
    export_model(Llama(MODEL, seed=1), folder / "theirs", folder / "tokenizer.json")
    (folder / "theirs" / digests.FILE).unlink()
    state = load_file(folder / "theirs" / "model.safetensors")
    save_file(state, folder / "theirs" / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(home: Path, start: object, *flags: str) -> int:
    words = ["train", str(home / "child.toml"), "--quiet", "--out", str(home / "runs"), "--train.start", str(start)]
    return cli.run([*words, *flags])


@pytest.mark.slow
def test_the_shape_of_the_weights_is_inherited(home: Path) -> None:
    assert train(home, home / "theirs", "--name", "heir") == 0
    run = home / "runs" / "heir"
    found, model = config_of(run), config_of(run).model
    assert model == MODEL.model_copy(update={"context": 32, "ends_layers": 1, "init_std": model.init_std})
    assert found.data.tokenizer == str(home / "theirs" / "tokenizer.json")
    first = next(saved for saved in CheckpointStore(run / "checkpoints").list() if saved.step == 0)
    before, after = Llama(MODEL, seed=1).global_state(), load_model(first).global_state()
    assert all(torch.equal(before[name], after[name]) for name in before | after)


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ENDS = [256, 7]
BESIDE: dict[str, dict[str, Any]] = {
    "generation_config.json": {"eos_token_id": ENDS, "bos_token_id": 3, "temperature": 0.6, "top_p": 0.95},
    "tokenizer_config.json": {"eos_token": "<|end|>", "model_max_length": 64, "padding_side": "left"},
}


@pytest.fixture(scope="module")
def instruct(home: Path) -> Path:
    """``theirs`` as a chat model: a template, several end tokens, settings for generation."""
    shutil.copytree(home / "theirs", folder := home / "instruct")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, content in BESIDE.items():
        (folder / name).write_text(json.dumps(content))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"eos_token_id": ENDS, "bos_token_id": 3, "pad_token_id": 5})
    )
    return folder


def require_kept(folder: Path) -> None:
    """Check that the exported model keeps the settings of the original."""
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert {name: json.loads((folder / name).read_text()) for name in BESIDE} == BESIDE
    config = json.loads((folder / "config.json").read_text())
    ids = [config[f"{kind}_token_id"] for kind in ("eos", "bos", "pad")]
    assert ids == [ENDS, 3, 5] and config["max_position_embeddings"] == 64
    digests.require(folder, (sums := digests.read(folder)), sums)
    assert "chat_template.jinja" in sums


@pytest.mark.slow
def test_an_export_keeps_the_models_settings(home: Path, instruct: Path) -> None:
    """Of a fine-tuned model, of a run that starts from that run, and of a policy that opens it."""
    assert train(home, instruct, "--name", "tuned") == 0
    assert train(home, home / "runs" / "tuned", "--name", "again") == 0
    for name in ("tuned", "again"):
        require_kept(home / "runs" / name / "model")
    policy = open_policy(str(home / "runs" / "again" / "model"))
    assert isinstance(policy, LlamaPolicy) and policy.context == 64 and policy.end == ENDS[0]
    policy.clone().export(home / "policy")
    require_kept(home / "policy")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "policy")
    assert "user\nhello" in tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert transformers.GenerationConfig.from_pretrained(home / "policy").eos_token_id == ENDS


@pytest.mark.slow
def test_a_longer_context_is_exported(home: Path, instruct: Path) -> None:
    assert train(home, instruct, "--name", "longer", "--model.context", "128") == 0
    config = json.loads((home / "runs" / "longer" / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == 128


def test_a_custom_tokenizer_class_is_dropped(home: Path, instruct: Path, tmp_path: Path) -> None:
    shutil.copytree(instruct, tmp_path / "own")
    settings = {"tokenizer_class": "TheirTokenizer", "auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]}}
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(settings))
    usage = open_weights(tmp_path / "own").usage
    assert usage is not None and usage.tokenizer == {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("name", [*BESIDE, "chat_template.jinja"])
def test_damaged_files_beside_the_weights_are_refused(instruct: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(instruct, tmp_path / "damaged")
    (tmp_path / "damaged" / name).write_bytes(b"{\xff")
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path / 'damaged' / name))}.*download it again"):
        open_weights(tmp_path / "damaged")


def test_a_recipe_for_pretrained_weights_warns_without_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each shipped recipe for pretrained weights that names none is marked as one."""
    texts = {path: path.read_text() for path in shipped_recipes().values()}
    asking = [path for path, text in texts.items() if "--train.start" in text and "\nstart = " not in text]
    assert {path.stem for path in asking} >= {"smollm2", "smollm2_sft"}
    for path in asking:
        with suppress(UserError):  # dialogues need a chat template, that of the weights
            cli.run(["train", str(path), "--dry-run"])
        assert "# warning: this recipe is for pretrained weights" in capsys.readouterr().out
    assert cli.run(["train", str(home / "child.toml"), "--dry-run", "--model.layers", "5"]) == 0
    assert "pretrained weights" not in capsys.readouterr().out
    flags = ["--train.pretrained", "true", "--train.start", str(home / "theirs")]
    assert cli.run(["train", str(home / "child.toml"), "--dry-run", *flags]) == 0
    assert "warning" not in capsys.readouterr().out
    config = configure(home / "child.toml", settings={"train.pretrained": True, "model.layers": 5})
    notes: list[str] = []
    prepare(config, notes.append, warn=notes.append)
    assert "random ones; use weights with --train.start" in notes[0], "before the text is tokenised"
    assert sum("random ones; use weights with --train.start" in note for note in prepare(config).notes) == 1


def test_a_context_beyond_the_weights_warns(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = home / "bare.toml"
    bare.write_text((home / "child.toml").read_text().replace("context = 32, ", ""))
    words = ["train", str(bare), "--dry-run", "--train.start", str(home / "theirs")]
    assert cli.run(words) == 0
    assert "context = 64\n" in capsys.readouterr().out
    assert cli.run([*words, "--model.context", "128"]) == 0
    assert "# warning: model.context = 128: the weights were trained on 64 positions" in capsys.readouterr().out


def test_a_pickle_beside_safetensors_is_ignored(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "theirs", tmp_path / "both")
    (tmp_path / "both" / "pytorch_model.bin").write_bytes(b"PK")
    assert open_weights(tmp_path / "both").config == open_weights(home / "theirs").config


def test_one_tensor_is_in_memory_at_a_time(home: Path, tmp_path: Path) -> None:
    weights, read = open_weights(home / "theirs"), list[weakref.ref[torch.Tensor]]()
    config = configure(home / "child.toml", settings={"train.start": str(home / "theirs")})

    def watched(name: str) -> torch.Tensor:
        assert not [one for one in read if one() is not None], "the previous tensor is still in memory"
        tensor = weights.read(name)
        read.append(weakref.ref(tensor))
        return tensor

    branch_off(replace(weights, read=watched), tmp_path, config)
    assert len(read) == len(weights.shapes)
    (saved,) = CheckpointStore(tmp_path / "checkpoints").list()
    for stage in range(5):
        require_stage(saved.folder, stage, saved.step, saved.manifest.digests[stage_file(Path(), stage).name])


def test_a_comparison_that_starts_from_weights_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "race.toml").write_text(
        f'train = {{ start = "{home / "theirs"}", eval_every = 10 }}\n[compare]\nseeds = [1]\n[compare.arms.one]\n'
    )
    with pytest.raises(UserError, match=r"race.toml: train.start: arms start with the weights of their seed"):
        cli.run(["compare", str(tmp_path / "race.toml"), "--quiet"])


def test_bf16_weights_become_fp32(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "theirs", tmp_path / "half")
    tensors(lambda state: state.update({name: one.bfloat16() for name, one in state.items()}))(tmp_path / "half")
    model, _ = open_model(tmp_path / "half")
    for name, whole in Llama(MODEL, seed=1).global_state().items():
        assert torch.equal(model.global_state()[name], whole.bfloat16().float())


Damage = Callable[[Path], object]


def edit(**changes: Any) -> Damage:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def apply(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return apply


def numbers(name: str, value: float) -> Damage:
    return tensors(lambda state: state[name].view(-1)[-1:].fill_(value))


def typed(dtype: torch.dtype) -> Damage:
    return tensors(lambda state: state.update({"model.norm.weight": state["model.norm.weight"].to(dtype)}))


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def larger_tokenizer(folder: Path) -> None:
    load_tokenizer(DataConfig(tokenizer="bytes"), 300, folder).save(folder / "tokenizer.json")
    text = json.loads((folder / "tokenizer.json").read_text())
    end = text["added_tokens"][0]
    text["added_tokens"] += [end | {"id": i, "content": f"<{i}>"} for i in range(257, 301)]
    (folder / "tokenizer.json").write_text(json.dumps(text))


# tests/models/test_huggingface.py has more invalid config.json files.
INVALID: dict[str, tuple[Damage, str]] = {
    "a factor": (edit(rope_scaling={"rope_type": "default", "factor": 4.0}), "'default' with factor = 4.0"),
    "both ropes": (
        edit(rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "yarn", "factor": 8.0}),
        "of type 'yarn'",
    ),
    "no table": (edit(rope_scaling="linear"), "rope_scaling = 'linear' is not a table"),
    "part of a head": (edit(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "quantised": (edit(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config = "),
    "sliding": (edit(sliding_window=16), "sliding_window = 16"),
    "norms of q and k": (edit(use_qk_norm=True), "use_qk_norm = True"),
    "softcapping": (edit(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0"),
    "Granite": (edit(residual_multiplier=0.22), "residual_multiplier = 0.22"),
    "MiniCPM": (edit(scale_depth=1.4), "scale_depth = 1.4"),
    "Qwen": (edit(model_type="qwen2", architectures=["Qwen2ForCausalLM"]), "Qwen2ForCausalLM.* is not supported"),
    "Mistral": (edit(model_type="mistral", architectures=["MistralForCausalLM"]), "Mistral.* is not supported"),
    "no name": (edit(model_type="gemma2", architectures=None), "architecture gemma2 is not supported"),
    "NaN": (numbers("model.layers.4.mlp.down_proj.weight", float("nan")), "down_proj.weight has numbers that are not"),
    "infinity": (numbers("lm_head.weight", -float("inf")), "lm_head.weight has numbers that are not finite"),
    "integers": (typed(torch.int8), "model.norm.weight is I8; weights in F32, BF16, F16 are read"),
    "fp8": (typed(torch.float8_e4m3fn), "model.norm.weight is F8_E4M3; weights in"),
    "missing": (tensors(lambda state: state.pop("model.norm.weight")), "model.norm.weight is missing"),
    "unknown": (
        tensors(lambda state: state.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})),
        "q_proj.bias is not a parameter",
    ),
    "another shape": (edit(intermediate_size=64), r"gate_proj.weight has shape \[48, 32\], not \[64, 32\]"),
    "cut off": (cut_off, "not a readable safetensors file"),
    "pickled": (pickled, "pytorch_model.bin: weights of a pickle are not read.*convert them to safetensors"),
    "empty": (lambda folder: [file.unlink() for file in folder.iterdir()], "neither a run nor a model is there"),
    "more tokens than rows": (larger_tokenizer, "has 301 ids, and its model rows for 300"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: not JSON"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_folder_is_refused(
    kind: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, complaint = INVALID[kind]
    shutil.copytree(home / "theirs", tmp_path / "unfit")
    damage(tmp_path / "unfit")
    monkeypatch.setattr(training, "RunExecution", lambda *_: pytest.fail("training began"))
    words = ["train", str(home / "child.toml"), "--quiet", "--out", str(tmp_path / "runs"), "--engine", "fleet"]
    line = refused(capsys, *words, "--model.family", "llama", "--train.start", tmp_path / "unfit")
    assert "unfit" in line and re.search(complaint, line), line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--model.rope_theta", "1e4"],
            "its model has rope_theta = 50000.0, the recipe 10000.0; remove model",
        ),
        (["--model.norm_eps", "1e-6"], "its model has norm_eps = 0.0001, the recipe 1e-06; remove model.norm_eps"),
        (["--model.kv_heads", "4"], "its model has kv_heads = 2, the recipe 4"),
        (["--model.tied", "true"], "its model has tied = False, the recipe True"),
        (["--model.layers", "4"], "its model has layers = 5, the recipe 4"),
        (["--model.ends_layers", "0"], "does not divide into pipeline.stages = 4; set model.ends_layers = 1"),
        (["--data.tokenizer", "bytes", "--model.vocab", "301"], "its model has vocab = 300, the recipe 301"),
    ],
)
def test_a_recipe_that_contradicts_the_weights_is_refused(home: Path, flags: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        train(home, home / "theirs", "--name", "wrong", *flags)
    assert not (home / "runs" / "wrong").exists()


@pytest.mark.slow
def test_weights_without_a_tokenizer_need_one(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "theirs", tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"it has no tokenizer, .* set data.tokenizer to its tokenizer.json"):
        train(home, tmp_path / "mute", "--name", "mute")
    given = ["--data.tokenizer", str(home / "tokenizer.json")]
    assert train(home, tmp_path / "mute", "--name", "mute", *given) == 0


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("m.bin", b"PK\x03\x04 and so on", "a pickle is not read"),
        ("m.pt", b"\x80\x02}q", "a pickle is not read"),
        ("m.safetensors", bytes(40), "not a known file of weights; use a GGUF file, or the folder"),
        ("m.bin", bytes(40), "m.bin: .*greater than 0"),
        ("m.gguf", b"GGUF", "truncated or damaged GGUF file"),
        ("m.gguf", b"", "truncated or damaged GGUF file"),
    ],
)
def test_an_invalid_weights_file_is_refused(
    name: str, content: bytes, complaint: str, home: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        train(home, tmp_path / name)


def test_a_folder_of_gguf_files_is_refused_with_a_suggestion(home: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UserError, match=r"no config.json is there; use the file .*m.gguf"):
        train(home, tmp_path)


def test_a_hub_model_is_pinned_to_the_downloaded_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    requested: list[str] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        requested.append(name)
        assert not any(pattern in ("*", "*.bin", "*.py") for pattern in allow_patterns)
        return str(home / "theirs")

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert train(home, "hf:someone/small", "--dry-run") == 0
    assert f'start = "{home / "theirs"}"' in capsys.readouterr().out
    assert set(requested) == {"someone/small"}


def test_an_unreachable_hub_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fetch(*_: object, **__: object) -> str:
        raise hub.errors.LocalEntryNotFoundError("no connection\nand nothing cached")

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    with pytest.raises(
        UserError, match=r"hf:someone/small cannot be downloaded \(.*\); check the name and the network"
    ) as found:
        train(home, "hf:someone/small")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("flags", "warnings"),
    [
        ([], []),
        (["--recovery.strategy", "echo, checkpoint"], []),
        (["--recovery.strategy", "checkfree"], ["recovery 'checkfree'"]),
        (
            ["--recovery.strategy", "checkfree_plus", "--routing.kind", "swapped"],
            ["recovery 'checkfree_plus'", "routing 'swapped'"],
        ),
        (["--recovery.strategy", "random"], ["recovery 'random'"]),
    ],
)
def test_strategies_that_harm_trained_weights_warn(
    flags: list[str], warnings: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(home, home / "theirs", "--dry-run", *flags) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    for expected, line in zip(warnings, lines, strict=True):
        assert f"# warning: {expected} is unsuitable for pretrained weights" in line
