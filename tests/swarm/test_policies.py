"""Policies: one protocol over our LLaMA and other people's models, with the same samples and the same numbers."""

from __future__ import annotations

import pytest
import torch

from planaria.config import DataConfig, ModelConfig
from planaria.data.tokenizer import Tokenizer, load_tokenizer
from planaria.errors import UserError
from planaria.model.stages import Llama
from planaria.swarm.fingerprints import tokenizer_fingerprint, weights_fingerprint
from planaria.swarm.policies import LlamaPolicy, faithful
from planaria.swarm.policy import Policy
from planaria.swarm.rollout import Drawn

CONFIG = ModelConfig(vocab=260, dim=24, layers=2, heads=4, kv_heads=2, hidden=40, context=32, init_std=0.3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(DataConfig(tokenizer="bytes"), CONFIG.vocab, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def own(tokenizer: Tokenizer) -> LlamaPolicy:
    return LlamaPolicy(Llama(CONFIG, seed=1), tokenizer)


def likelihoods(policy: Policy, prompt: list[int], drawn: Drawn, temperature: float) -> torch.Tensor:
    """Log-probabilities of a completion, with its end, from the policy's logits of padded rows."""
    ids = [*drawn.ids, *([policy.end] if drawn.ended else [])]
    with torch.no_grad():
        logits = policy.logits(torch.tensor([[*prompt, *ids, 0, 0]]))[0, len(prompt) - 1 : -3]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


PROMPTS = ["a", "one two", "12+30="]


def test_it_samples_so_many_of_every_prompt_and_tells_their_likelihoods(own: LlamaPolicy) -> None:
    prompts = [own.encode(prompt) for prompt in PROMPTS]
    found = own.sample(prompts, 4, 12, 0.8, 50, seeded())
    assert [len(group) for group in found] == [4, 4, 4]
    for prompt, group in zip(prompts, found, strict=True):
        assert len({drawn.ids for drawn in group}) > 1
        for drawn in group:
            logps = torch.tensor(drawn.logps)
            torch.testing.assert_close(logps, likelihoods(own, prompt, drawn, 0.8), rtol=0, atol=1e-4)


def test_a_sample_is_its_seed_and_its_place(own: LlamaPolicy) -> None:
    prompts = [own.encode(prompt) for prompt in PROMPTS]
    state = torch.get_rng_state()
    first = own.sample(prompts, 3, 10, 1.0, 0, seeded(4))
    assert torch.equal(torch.get_rng_state(), state)
    ids = [[drawn.ids for drawn in group] for group in first]
    assert [[d.ids for d in group] for group in own.sample(prompts[:2], 3, 10, 1.0, 0, seeded(4))] == ids[:2]
    assert [[d.ids for d in group] for group in own.sample(prompts, 3, 10, 1.0, 0, seeded(5))] != ids


def test_a_tied_heads_gradient_is_whole_after_one_backward(own: LlamaPolicy) -> None:
    model = Llama(CONFIG, seed=1)
    tokens = torch.tensor([[1, 2, 3, 4]])
    LlamaPolicy(model, own.tokenizer).logits(tokens).square().sum().backward()
    found = model.ends.embed_tokens.weight.grad
    model.ends.fold_gradients()
    other = Llama(CONFIG, seed=1)
    other(tokens).square().sum().backward()
    other.ends.fold_gradients()
    torch.testing.assert_close(found, other.ends.embed_tokens.weight.grad)


def test_texts_come_back_as_they_were_and_ends_leave_nothing(own: LlamaPolicy) -> None:
    assert faithful(own, "Grüße, 1+1=2\n\t<|end|>")
    ids = own.encode("two")
    assert own.end not in own.encode("<|end|>") and own.decode([own.end, *ids, own.end]) == "two"


def test_a_tokenizer_too_large_for_the_model_is_named(own: LlamaPolicy) -> None:
    small = Llama(CONFIG.model_copy(update={"vocab": 200}))
    with pytest.raises(UserError, match="257 ids, the model rows for 200"):
        LlamaPolicy(small, own.tokenizer)


def test_fingerprints_tell_tokenizers_and_weights_apart(own: LlamaPolicy, tokenizer: Tokenizer) -> None:
    assert own.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    assert len(own.tokenizer_fingerprint) == len(weights_fingerprint(own.module)) == 16
    model = Llama(CONFIG, seed=1)
    assert weights_fingerprint(model) == weights_fingerprint(own.module)
    with torch.no_grad():
        model.ends.norm.weight[3] += 1e-6
    assert weights_fingerprint(model) != weights_fingerprint(own.module)
