"""Policies that are read in a millisecond, and cases made by hand."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from planaria.config.schema import DataConfig
from planaria.data.tokenizer import Tokenizer, load_tokenizer
from planaria.models.llama_stages import Llama
from planaria.swarm.checks.base import Context
from planaria.swarm.config.policy_config import SmallModel
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.policy.base import SampledCompletion
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.policy.reading import CompletionStatistics
from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.sums import Sums

MODEL = SmallModel(dim=16, layers=1, hidden=24, init_std=0.5)
CONTEXT = Context(Sums(), seed=1, support=3, vocab=257)
"""of a check"""


@functools.cache
def byte_tokenizer(vocab: int = 257) -> Tokenizer:
    return load_tokenizer(DataConfig(tokenizer="bytes"), vocab, Path(tempfile.gettempdir()))


def policy(seed: int = 1, **changes: Any) -> LlamaPolicy:
    model = MODEL.model_copy(update=changes)
    return LlamaPolicy(Llama(model, seed=seed), byte_tokenizer(model.vocab))


class Scripted(LlamaPolicy):
    """A policy that draws given texts in turn for every prompt."""

    texts: tuple[str, ...] = ()

    def sample(self, prompts: Any, count: int, *_: Any) -> list[list[SampledCompletion]]:  # type: ignore[override]
        ids = [tuple(self.encode(self.texts[n % len(self.texts)])) for n in range(count)]
        return [[SampledCompletion(i, True, (-1.0,) * (len(i) + 1)) for i in ids] for _ in prompts]


def scripted(*texts: str) -> Scripted:
    found = Scripted(policy()._model, byte_tokenizer())
    found.texts = texts
    return found


def reading(
    logps: list[float], ranks: list[int] | None = None, entropy: float = 1.0, variance: float = 1.0
) -> CompletionStatistics:
    """Of as many tokens as ``logps``; entropy and variance are those of every token."""
    n = len(logps)
    return CompletionStatistics(
        np.array(logps), np.array(ranks or [0] * n, np.int64), np.full(n, entropy), np.full(n, variance)
    )


def case(
    peer: str = "a",
    problem: int = 0,
    index: int = 0,
    text: str = "x",
    reward: float = 1.0,
    read: CompletionStatistics | None = None,
    **sample: Any,
) -> Rollout:
    found = read or reading([-1.0])
    ids = sample.pop("ids", tuple(range(len(found.logps))))
    prompted = sample.pop("prompted", TaskProblem(problem, f"{problem}=", str(problem)))
    given = {"ended": True, "peer": peer, "index": index, "reward": reward, "reading": found} | sample
    return Rollout(prompted, (1,), text, ids, **given)
