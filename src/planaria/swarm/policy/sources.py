"""Sources of a peer's policy: a small LLaMA that is first trained on worked solutions, or a pretrained model.

This warm-up teaches a task's form by supervised learning; its result is cached between runs.
"""

from __future__ import annotations

import hashlib
import random
import string
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from planaria.common import atomic
from planaria.common.cache import cache_folder, hold_lock
from planaria.common.errors import UserError
from planaria.config.bounds import Natural
from planaria.config.registry import Choice
from planaria.config.schema import DataConfig, OptimConfig
from planaria.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from planaria.models.llama_stages import Llama
from planaria.models.optimizers.adamw import adamw
from planaria.runtime.worker.learning_rate import learning_rate
from planaria.swarm.config.policy_config import PolicyConfig, SupervisedWarmupConfig
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from planaria.swarm.policy.reading import pad
from planaria.swarm.tasks.base import Task, TaskProblem


class PolicySource(Choice, ABC):
    """A source of policies; the fields of a subclass are its options."""

    @abstractmethod
    def open(self, config: SwarmConfig, task: Task, on_progress: Callable[[str], None] | None = None) -> Policy:
        """Return a peer's initial policy, deterministically. UserError if it cannot be opened."""


class Small(PolicySource):
    """A small LLaMA (``policy.model``) that is warmed up first."""

    def open(self, config: SwarmConfig, task: Task, on_progress: Callable[[str], None] | None = None) -> Policy:
        return LlamaPolicy(*warmup_model(task, config.warmup, config.policy, on_progress=on_progress))


class Pretrained(PolicySource):
    path: str
    """a run's or a Hugging Face folder, a GGUF file, or hf:NAME (hf:NAME:FILE.gguf)"""
    lora: Natural = 0
    """rank of adapters trained instead of the weights; 0 trains the weights"""

    def open(self, config: SwarmConfig, task: Task, on_progress: Callable[[str], None] | None = None) -> Policy:
        return open_policy(self.path, self.lora, seed=config.seed, chat=config.policy.chat != "never")


VERSION = 2
"""version of the curriculum; part of the cache key"""
SAMPLED = 2000
"""solutions from which a tokenizer learns its pairs"""


def warmup_model(
    task: Task,
    config: SupervisedWarmupConfig,
    policy: PolicyConfig,
    folder: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Llama, Tokenizer]:
    """Return the model after its warm-up, from the cache if possible. UserError as in :func:`teach`."""
    root = folder or cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    model, tokenizer = policy.model, _make_tokenizer(task, policy, root)
    taught = policy.model_dump_json(include={"tokenizer", "model"})  # the warm-up does not depend on the other fields
    key = f"{VERSION} {task.name} {task.identity} {config.model_dump_json()} {taught}"
    style = getattr(task, "style", "")
    file = root / f"warmup-{hashlib.sha256(f'{key} {style}'.encode()).hexdigest()[:24]}.safetensors"
    report = on_progress or (lambda _: None)
    pupil = Llama(model, seed=config.seed)
    with hold_lock(file.with_suffix(".lock"), lambda: report("waiting for another process with the same warm-up")):
        if not file.is_file():
            report(f"warm-up: {config.steps} steps on worked solutions of {task.name}")
            teach(pupil, tokenizer, task, config)
            with atomic.replace_atomically(file) as unfinished:
                save_file({name: tensor.contiguous() for name, tensor in pupil.global_state().items()}, unfinished)
    pupil.load_global_state(load_file(file))
    return pupil, tokenizer


def _make_tokenizer(task: Task, policy: PolicyConfig, root: Path) -> Tokenizer:
    """Return the tokenizer of a task and style. UserError if the vocabulary is too small or solutions are missing."""
    vocab = policy.model.vocab
    if policy.tokenizer == "bytes":
        return load_tokenizer(DataConfig(tokenizer="bytes"), vocab, root)
    rng = random.Random(derive_seed("tokenizer", task.name))
    problems = [task.problem(rng.randrange(task.training)) for _ in range(SAMPLED)]
    return train_bpe([problem.prompt + _solution(task, problem, rng, 0.0) for problem in problems], vocab)


def teach(pupil: Llama, tokenizer: Tokenizer, task: Task, config: SupervisedWarmupConfig) -> float:
    """Train on noisy solutions; return the last loss in nats. UserError if they are missing or exceed the context."""
    rng = random.Random(derive_seed("school", config.seed))
    optim = OptimConfig(lr=config.lr, schedule="cosine", warmup=min(20, config.steps // 10))
    optimizer = adamw(list(pupil.parameters()), optim)
    loss = torch.zeros(())
    for step in range(config.steps):
        pairs = [_draw_example(task, tokenizer, config, rng) for _ in range(config.batch)]
        batch = pad(pairs)
        if (longest := batch.tokens.shape[1]) > (context := pupil.config.context):
            raise UserError(
                f"policy.model.context = {context}: a worked solution of {task.name} takes {longest} tokens with its "
                f"problem; set it to {longest} or more"
            )
        pupil.zero_grad()
        logits = pupil(batch.tokens)[:, :-1]
        targets = batch.tokens[:, 1:][batch.mask]
        loss = F.cross_entropy(logits[batch.mask], targets)
        loss.backward()  # type: ignore[no-untyped-call]
        pupil.ends.fold_gradients()
        torch.nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, config.steps)
        optimizer.step()
    return float(loss.detach())


def _draw_example(
    task: Task, tokenizer: Tokenizer, config: SupervisedWarmupConfig, rng: random.Random
) -> tuple[list[int], list[int]]:
    problem = task.problem(rng.randrange(task.training))
    solution = _solution(task, problem, rng, config.noise)
    if rng.random() < config.stray_letter_probability:
        solution = with_stray_letters(solution, rng)
    return tokenizer.encode_prompt(problem.prompt), [*tokenizer.encode(solution), tokenizer.end]


def _solution(task: Task, problem: TaskProblem, rng: random.Random, noise: float) -> str:
    solution = task.noisy_solution(problem, rng, noise)
    if solution is None:
        raise UserError(f"task {task.name!r} has no worked solutions for a warm-up; set policy.kind = 'pretrained'")
    return solution


def with_stray_letters(solution: str, rng: random.Random) -> str:
    """Return ``solution`` with one to four stray letters before one of its steps."""
    indices = [
        0,
        *(index + 1 for index, letter in enumerate(solution) if letter in ",;\n" and index + 1 < len(solution)),
    ]
    index = rng.choice(indices)
    letters = "".join(rng.choice(string.ascii_lowercase + " ") for _ in range(rng.randint(1, 4)))
    return solution[:index] + letters + solution[index:]
