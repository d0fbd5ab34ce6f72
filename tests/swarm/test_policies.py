"""Policies: one protocol over planaria's Llama and models of ``transformers``, with equal samples and numbers."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.common import digests
from planaria.common.errors import UserError
from planaria.config.schema import DataConfig, ModelConfig
from planaria.data.tokenizer import Tokenizer, load_tokenizer
from planaria.models.llama_stages import Llama
from planaria.models.model_metadata import ModelMetadata, metadata_of_folder
from planaria.models.optimizers.adamw import KEYS
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import write_stage
from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore
from planaria.swarm.policy.base import Policy, SampledCompletion, tokenizer_fingerprint, weights_fingerprint
from planaria.swarm.policy.huggingface import HuggingFacePolicy, open_model
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from planaria.swarm.records.saved_state import load_state
from support.swarm.tiny_swarm import MODEL, byte_tokenizer

CONFIG = ModelConfig(vocab=260, dim=24, layers=2, heads=4, kv_heads=2, hidden=40, context=32, init_std=0.3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(DataConfig(tokenizer="bytes"), CONFIG.vocab, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def own(tokenizer: Tokenizer) -> LlamaPolicy:
    return LlamaPolicy(Llama(CONFIG, seed=1), tokenizer)


@pytest.fixture(scope="module")
def folder(own: LlamaPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of ``own``."""
    made = tmp_path_factory.mktemp("exported") / "model"
    own.export(made)
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path, tokenizer: Tokenizer) -> HuggingFacePolicy:
    pytest.importorskip("transformers")
    return HuggingFacePolicy(open_model(folder), tokenizer)


@pytest.fixture(params=["own", "theirs"])
def policy(request: pytest.FixtureRequest) -> Policy:
    found: Policy = request.getfixturevalue(request.param)
    return found


def likelihoods(policy: Policy, prompt: list[int], drawn: SampledCompletion, temperature: float) -> torch.Tensor:
    """Log-probabilities of a completion, with its end, from the policy's logits of padded rows."""
    ids = [*drawn.ids, *([policy.end] if drawn.ended else [])]
    with torch.no_grad():
        logits = policy.logits(torch.tensor([[*prompt, *ids, 0, 0]]))[0, len(prompt) - 1 : -3]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def check_logps(policy: Policy, found: list[list[SampledCompletion]], temperature: float) -> None:
    """Compare the log-probabilities of samples for PROMPTS with those of the policy's logits."""
    for prompt, group in zip(PROMPTS, found, strict=True):
        for drawn in group:
            expected = likelihoods(policy, policy.encode(prompt), drawn, temperature)
            torch.testing.assert_close(torch.tensor(drawn.logps), expected, rtol=0, atol=1e-4)


PROMPTS = ["a", "one two", "12+30="]


@pytest.mark.slow_after(1)
def test_sampling_returns_the_requested_completions_and_their_log_probabilities(policy: Policy) -> None:
    found = policy.sample([policy.encode(prompt) for prompt in PROMPTS], 4, 12, 0.8, 50, seeded())
    assert [len(group) for group in found] == [4, 4, 4]
    assert all(len({drawn.ids for drawn in group}) > 1 for group in found)
    check_logps(policy, found, 0.8)


def samples(
    policy: Policy, prompts: list[str], temperature: float, top_k: int, seed: int = 4
) -> list[list[SampledCompletion]]:
    return policy.sample([policy.encode(prompt) for prompt in prompts], 3, 10, temperature, top_k, seeded(seed))


def ids(found: list[list[SampledCompletion]]) -> list[list[tuple[int, ...]]]:
    return [[drawn.ids for drawn in group] for group in found]


def test_samples_depend_on_their_seed_and_not_on_the_global_generator(policy: Policy) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = samples(policy, PROMPTS, 1.0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert samples(policy, PROMPTS, 1.0, 0) == first
    assert ids(samples(policy, PROMPTS, 1.0, 0, seed=5)) != ids(first)


def test_llama_samples_do_not_depend_on_the_batch(own: LlamaPolicy) -> None:
    assert ids(samples(own, PROMPTS[:2], 1.0, 0)) == ids(samples(own, PROMPTS, 1.0, 0))[:2]


@pytest.mark.parametrize("top_k", [1, 3])
def test_top_k_draws_are_among_the_likeliest(policy: Policy, top_k: int) -> None:
    for prompt, group in zip(PROMPTS, samples(policy, PROMPTS, 2.0, top_k), strict=True):
        for drawn in group:
            tokens = policy.encode(prompt)
            with torch.no_grad():
                logits = policy.logits(torch.tensor([[*tokens, *drawn.ids]]))[0, len(tokens) - 1 : -1]
            ranks = (logits > logits.gather(1, torch.tensor(drawn.ids)[:, None]) + 1e-4).sum(1)
            assert (ranks < top_k).all()


def test_a_completion_ends_at_the_end_token_or_its_limit(policy: Policy) -> None:
    found = policy.sample([policy.encode("a")], 300, 20, 1.6, 0, seeded())[0]
    assert {drawn.ended for drawn in found} == {True, False}
    for drawn in found:
        assert policy.end not in drawn.ids and len(drawn.logps) == len(drawn.ids) + drawn.ended
        assert len(drawn.ids) < 20 if drawn.ended else len(drawn.ids) == 20


def test_prompt_and_completion_fit_the_context(policy: Policy) -> None:
    for drawn in policy.sample([[1] * 30], 2, 20, 1.0, 0, seeded())[0]:
        assert len(drawn.ids) <= 2
    for wrong in ([], [1] * 32):
        with pytest.raises(UserError, match=r"prompt"):
            policy.sample([[1], wrong], 2, 20, 1.0, 0, seeded())


def test_padding_on_the_right_changes_nothing(policy: Policy) -> None:
    row = torch.randint(0, 250, (1, 9), generator=seeded())
    padded = torch.cat((row, torch.full((1, 4), 7)), 1)
    torch.testing.assert_close(policy.logits(padded)[:, :9], policy.logits(row), rtol=0, atol=1e-4)


def test_both_implementations_of_a_model_give_equal_policies(own: LlamaPolicy, theirs: HuggingFacePolicy) -> None:
    ours, other = samples(own, PROMPTS, 0.0, 0), samples(theirs, PROMPTS, 0.0, 0)
    assert ids(ours) == ids(other)
    for mine, foreign in zip(chain(*ours), chain(*other), strict=True):
        torch.testing.assert_close(torch.tensor(mine.logps), torch.tensor(foreign.logps), rtol=0, atol=1e-4)
    assert own.tokenizer_fingerprint == theirs.tokenizer_fingerprint
    assert (own.end, own.vocab, own.context) == (theirs.end, theirs.vocab, theirs.context)


def test_generation_settings_of_a_model_are_ignored(folder: Path, tmp_path: Path, own: LlamaPolicy) -> None:
    pytest.importorskip("transformers")
    bent = shutil.copytree(folder, tmp_path / "bent")
    settings = {"repetition_penalty": 5.0, "top_p": 0.01, "do_sample": True, "eos_token_id": [own.end, 5]}
    (bent / "generation_config.json").write_text(json.dumps(settings))
    found = HuggingFacePolicy(open_model(bent), own.tokenizer)
    assert ids(samples(found, PROMPTS, 0.0, 0)) == ids(samples(own, PROMPTS, 0.0, 0))
    assert len(set(ids(samples(found, PROMPTS, 1.0, 0))[0])) > 1


def test_a_tied_head_s_gradient_is_complete_after_one_backward(own: LlamaPolicy) -> None:
    model = Llama(CONFIG, seed=1)
    tokens = torch.tensor([[1, 2, 3, 4]])
    LlamaPolicy(model, own.tokenizer).logits(tokens).square().sum().backward()
    found = model.ends.embed_tokens.weight.grad
    model.ends.fold_gradients()
    other = Llama(CONFIG, seed=1)
    other(tokens).square().sum().backward()
    other.ends.fold_gradients()
    torch.testing.assert_close(found, other.ends.embed_tokens.weight.grad)


def test_encoding_is_lossless_and_end_tokens_decode_to_nothing(policy: Policy) -> None:
    text = "Grüße, 1+1=2\n\t<|end|>"
    assert policy.decode(policy.encode(text)) == text
    ids = policy.encode("two")
    assert policy.end not in policy.encode("<|end|>") and policy.decode([policy.end, *ids, policy.end]) == "two"


def test_a_tokenizer_larger_than_the_model_is_rejected(own: LlamaPolicy) -> None:
    small = Llama(CONFIG.model_copy(update={"vocab": 200}))
    with pytest.raises(UserError, match="257 ids, the model rows for 200"):
        LlamaPolicy(small, own.tokenizer)


def test_fingerprints_distinguish_tokenizers_and_weights(own: LlamaPolicy, tokenizer: Tokenizer) -> None:
    assert own.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    assert len(own.tokenizer_fingerprint) == len(weights_fingerprint(own.module)) == 16
    model = Llama(CONFIG, seed=1)
    assert weights_fingerprint(model) == weights_fingerprint(own.module)
    with torch.no_grad():
        model.ends.norm.weight[3] += 1e-6
    assert weights_fingerprint(model) != weights_fingerprint(own.module)


def test_a_run_s_newest_whole_checkpoint_is_opened(tmp_path: Path, own: LlamaPolicy) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    model = Llama(CONFIG, seed=8)
    for stage, module in enumerate((model.ends, *model.stages)):
        weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
        write_stage(store.unfinished(3), stage, 3, StageState(weights))
    store.seal("step-00000003", CheckpointManifest(step=3, stages=[0, 1], pipeline_stages=1, model=CONFIG), keep=1)
    own.tokenizer.save(tmp_path / "tokenizer.json")
    assert weights_fingerprint(open_policy(str(tmp_path)).module) == weights_fingerprint(model)
    adapted = open_policy(str(tmp_path), lora_rank=2)
    assert torch.equal(
        adapted.logits(torch.tensor([[1, 2]])), LlamaPolicy(model, own.tokenizer).logits(torch.tensor([[1, 2]]))
    )


def test_other_architectures_are_opened_by_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2, n_positions=24, eos_token_id=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    found = open_policy(str(tmp_path))
    assert isinstance(found, HuggingFacePolicy) and (found.context, found.end) == (24, 256)
    check_logps(found, samples(found, PROMPTS, 1.0, 0), 1.0)


def test_the_folder_s_settings_define_the_end_token(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": [10, 256]}')
    digests.replace_list(other, [file.name for file in other.glob("*.[js]*[!6]")])
    found = open_policy(str(other))
    assert found.end == 10 and found.decode([65, 10]) == found.decode([65])


def test_lora_trains_only_adapters_and_is_exported_merged(folder: Path, tmp_path: Path, own: LlamaPolicy) -> None:
    found = open_policy(str(folder), lora_rank=4, seed=3)
    assert isinstance(found, LlamaPolicy) and found.adapted
    trained = {name: p for name, p in found.module.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    tokens = torch.randint(0, 250, (2, 12), generator=seeded())
    torch.testing.assert_close(found.logits(tokens), own.logits(tokens), rtol=0, atol=1e-4)
    before = {name: p.detach().clone() for name, p in found.module.named_parameters()}
    for _ in range(3):
        torch.nn.functional.cross_entropy(
            found.logits(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        torch.optim.AdamW(trained.values(), lr=0.02).step()
    changed = {name for name, p in found.module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trained.keys()
    found.export(tmp_path / "merged")
    merged = open_policy(str(tmp_path / "merged"))
    assert isinstance(merged, LlamaPolicy) and merged.end == found.end and not merged.adapted
    torch.testing.assert_close(merged.logits(tokens), found.logits(tokens), rtol=0, atol=1e-4)
    assert ids(samples(merged, PROMPTS, 1.0, 0)) == ids(samples(found, PROMPTS, 1.0, 0))
    assert {name for name, p in found.module.named_parameters() if p.requires_grad} == trained.keys()
    with pytest.raises(UserError, match="not an empty folder"):
        found.export(tmp_path / "merged")


def test_usage_data_of_a_transformers_model_is_exported(
    theirs: HuggingFacePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, Any] = {"generation": {"eos_token_id": [1, 2]}, "tokenizer": {"eos_token": "x"}}
    usage = ModelMetadata(context=64, ids={}, template="{{ x }}", **files)
    monkeypatch.setattr(theirs, "usage", usage)
    theirs.export(tmp_path / "out")
    assert metadata_of_folder(tmp_path / "out", {}, 64) == usage


def broken(folder: Path, tmp_path: Path, **changes: str | None) -> str:
    """A copy of ``folder`` with some files replaced, or without them."""
    copy = shutil.copytree(folder, tmp_path / "broken")
    for name, content in changes.items():
        (copy / name).unlink(missing_ok=True)
        if content is not None:
            (copy / name).write_text(content)
    digests.replace_list(copy, [file.name for file in copy.glob("*.[js]*[!6]")])
    return str(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.safetensors": None}, "neither model.safetensors nor"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"tokenizer.json": "{}"}, "not a tokenizer.json"),
        ({"generation_config.json": "{"}, "not JSON"),
        ({"generation_config.json": '{"eos_token_id": 999}'}, "no token 999"),
        ({"model.safetensors": "garbage"}, "not a readable safetensors file"),
        ({"config.json": '{"model_type": "unknown"}'}, "transformers cannot read it"),
        ({"config.json": '{"model_type": "gpt2", "vocab_size": 260, "n_embd": 8, "n_head": 2}'}, "missing|cannot read"),
    ],
)
def test_a_damaged_folder_is_reported(
    folder: Path, tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match=message):
        open_policy(broken(folder, tmp_path, **changes))


def test_a_hub_name_is_downloaded_without_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fetch(name: str, allow_patterns: list[str]) -> str:
        assert not [kind for kind in allow_patterns if kind.endswith((".bin", ".py", "*"))]
        if name != "owner/name":
            raise OSError("unknown repository")
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert isinstance(open_policy("hf:owner/name"), LlamaPolicy)
    with pytest.raises(UserError, match="hf:owner/other cannot be downloaded"):
        open_policy("hf:owner/other")


TOKENS = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(rank: int = 3, seed: int = 1) -> LlamaPolicy:
    """A policy whose adapters are not zero."""
    pytest.importorskip("peft")
    model = Llama(MODEL.model_copy(update={"layers": 2, "ends_layers": 1, "kv_heads": 2}), seed=seed)
    policy = LlamaPolicy(model, byte_tokenizer(), rank, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1, generator=generator)
    return policy


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def test_adapters_without_their_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"LoRA needs the package 'peft'; install it with: pip install"):
        LlamaPolicy(Llama(MODEL), byte_tokenizer(), 2)


def test_adapters_are_those_of_the_paper() -> None:
    """W x + alpha / rank · B A x with alpha = 2 rank (arXiv 2106.09685, eq. 3), and A of variance 1 / in."""
    policy = adapted(rank=64)
    state = policy._model.global_state()
    prefix = "model.layers.1.mlp.down_proj"
    down, up = (state[f"{prefix}.lora_{kind}.default.weight"] for kind in "AB")
    assert abs(float(down.var()) * MODEL.hidden - 1) < 0.1
    x = torch.randn(5, MODEL.hidden, generator=seeded())
    expected = x @ (state[f"{prefix}.base_layer.weight"] + 2 * up @ down).T
    torch.testing.assert_close(policy._model.layers[1].mlp.down_proj(x), expected)


@pytest.mark.slow
def test_peft_reads_the_files_and_gets_the_same_numbers(tmp_path: Path) -> None:
    """Compares logits and gradients with transformers' Llama and peft, from exported files."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    policy = adapted()
    LlamaPolicy(Llama(policy._model.config, seed=1), byte_tokenizer()).export(tmp_path / "base")
    policy.save_adapters(tmp_path / "adapters", "base")
    assert json.loads((tmp_path / "adapters/adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    other = peft.PeftModel.from_pretrained(other, tmp_path / "adapters", is_trainable=True).eval()
    torch.testing.assert_close(other(input_ids=TOKENS).logits, policy.logits(TOKENS), rtol=0, atol=1e-5)
    loss_of(policy.logits(TOKENS)).backward()
    loss_of(other(input_ids=TOKENS).logits).backward()
    theirs = {name: p.grad for name, p in other.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in policy.module.named_parameters() if p.requires_grad}
    assert len(theirs) == len(ours)
    norms = [sorted(float(grad.norm()) for grad in grads.values()) for grads in (ours, theirs)]
    torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-4, atol=1e-7)
    with pytest.raises(OSError):
        policy.save_adapters(tmp_path / "adapters", "base")


def test_a_state_with_former_names_of_adapters_is_restored(tmp_path: Path) -> None:
    saved, other = adapted(seed=1), adapted(seed=1)
    former = {".lora_A.default.weight": ".lora_down", ".lora_B.default.weight": ".lora_up"}

    def formerly(name: str) -> str:
        for present, before in former.items():
            name = name.replace(present, before)
        return name

    parameters = {name: p for name, p in saved.module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    loss_of(saved.logits(TOKENS)).backward()
    optimizer.step()
    state = StageState(
        weights={formerly(name): p.detach() for name, p in parameters.items()},
        moments={formerly(name): {key: optimizer.state[p][key] for key in KEYS} for name, p in parameters.items()},
        clocks={formerly(name): 1 for name in parameters},
        generators={"cpu": torch.Generator().get_state()},
        outer={"round": torch.tensor(4)},
    )
    assert all(name.endswith(("lora_up", "lora_down")) for name in state.weights)
    write_stage(tmp_path, 0, 4, state)
    theirs = torch.optim.AdamW([p for p in other.module.parameters() if p.requires_grad], lr=0.1)
    load_state(tmp_path, other.module, theirs, 4)
    assert {float(state["step"]) for state in theirs.state.values()} == {1.0}
    assert torch.equal(saved.logits(TOKENS), other.logits(TOKENS)) and len(theirs.state) == len(parameters)
