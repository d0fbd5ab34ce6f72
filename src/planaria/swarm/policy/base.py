"""Policies (causal language models with tokenizers), and fingerprints of tokenizers and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from planaria.data.tokenizer import Tokenizer
from planaria.models.task_vectors import digest
from planaria.swarm.tasks.base import TaskProblem

MAX_LOGITS = 2**26
"""default maximum number of logits in memory: 256 MB"""


@dataclass(frozen=True)
class SampledCompletion:
    """A sampled completion: token ids without the prompt and without the end token.

    ``logps`` holds the log-probability (nats) of every id and, if ``ended``, of the end token under the sampling
    policy: log softmax(logits / temperature) over the whole vocabulary regardless of top-k, so that peers with equal
    weights have a ratio of 1.
    """

    ids: tuple[int, ...]
    ended: bool
    """whether the policy drew the end token; otherwise the length limit cut it off"""
    logps: tuple[float, ...] = ()


class Policy(Protocol):
    """The model a peer trains, with its tokenizer."""

    vocab: int
    end: int
    """id of the token that ends a completion; it is trained and is not padding"""
    context: int
    """tokens of prompt and completion together"""
    tokenizer_fingerprint: str
    """16 hex digits; equal if equal ids mean equal text"""

    @property
    def module(self) -> nn.Module:
        """Return the model; the parameters that require gradients are trained."""

    def encode(self, text: str) -> list[int]:
        """Return a text's ids without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without end tokens."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V]; rows may be padded on the right with any id: attention is causal."""

    def clone(self) -> Policy:
        """Return a policy with a copy of the weights."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        max_new: int,
        temperature: float,
        top_k: int,
        generator: torch.Generator,
    ) -> list[list[SampledCompletion]]:
        """Sample ``count`` completions of every prompt, batched and with a key-value cache.

        Temperature 0 takes the likeliest token; otherwise one of the ``top_k`` likeliest (0: all) is drawn with
        probability softmax(logits / temperature) among them. At most ``max_new`` tokens each, including the end token.
        """


def encode_prompt(policy: Policy, text: str) -> list[int]:
    """Return a prompt's ids, including those the tokenizer puts before a text."""
    encode: Callable[[str], list[int]] = getattr(policy, "encode_prompt", policy.encode)
    return encode(text)


@runtime_checkable
class Split(Protocol):
    """A policy whose logits can be computed in parts, from its final states."""

    splits: bool
    """false for models that transform their logits further"""

    def states(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → [B, T, D]."""

    def head(self, states: Tensor) -> Tensor:
        """States [..., D] → logits [..., V]: head(states(tokens)) equals logits(tokens) up to rounding."""


@runtime_checkable
class Prompting(Protocol):
    """A policy with its own prompt format, such as a chat template."""

    def prompt(self, problem: TaskProblem) -> list[int]:
        """Return the prompt ids of a problem; other policies encode the problem's prompt."""


@runtime_checkable
class Exportable(Protocol):
    """A policy that can be exported."""

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder atomically. UserError if it is not empty or cannot be written."""


_WITHOUT = ("version", "truncation", "padding", "post_processor")
"""parts of a tokenizer.json that affect neither encoding nor decoding"""


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits; equal for tokenizers with equal encoding, decoding and end token.

    Equivalent tokenizers saved by different libraries may have different fingerprints.
    """
    parts = {key: part for key, part in json.loads(tokenizer.to_json()).items() if key not in _WITHOUT}
    content = json.dumps([tokenizer.end, parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def weights_fingerprint(module: nn.Module) -> str:
    """Return the first 16 hex digits of :func:`weights_digest`; they detect accidents, not forgery."""
    return weights_digest(module)[:16]


def weights_digest(module: nn.Module) -> str:
    """Return :func:`planaria.models.task_vectors.digest` of every parameter, trained or not."""
    return digest(dict(module.named_parameters()))


def likelihood_digest(policy: Policy) -> str:
    """Return 16 hex digits, equal for peers with the same weights and prompts and so the same likelihoods."""
    parts = [weights_fingerprint(policy.module)]
    if (layout := getattr(policy, "layout", None)) is not None:
        parts.append(layout.fingerprint)
    if before := encode_prompt(policy, ""):
        parts.append(f"begins with {before}")
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
