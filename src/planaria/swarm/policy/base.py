"""A policy: a causal language model with its tokenizer; and fingerprints of tokenizers and weights."""

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
from planaria.models.fusing import digest
from planaria.swarm.tasks.base import Problem

ROOM = 2**26
"""numbers of logits at once, unless said: 256 MB"""


@dataclass(frozen=True)
class Drawn:
    """A completion as a policy samples it: token ids, without the prompt's and without the end token.

    ``logps`` are log-probabilities (nats) under the policy that drew it, of every id and then, if it ``ended``, of the
    end token: log softmax(logits / temperature) over the whole vocabulary, whatever top-k was drawn from, so that two
    peers with equal weights agree on them and their ratio is 1.
    """

    ids: tuple[int, ...]
    ended: bool
    """the policy drew the end token; else the length limit cut it off"""
    logps: tuple[float, ...] = ()


class Policy(Protocol):
    """What a peer trains. Texts are read and written with its own tokenizer."""

    vocab: int
    end: int
    """the id of the token that ends a completion; it is no padding and is trained"""
    context: int
    """tokens of prompt and completion together"""
    tokenizer_fingerprint: str
    """16 hex digits; equal where equal ids mean equal text"""

    @property
    def module(self) -> nn.Module:
        """Its parameters that require gradients are the ones that are trained."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any separator."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end tokens leave nothing."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V]; rows may be padded on the right with any id: attention is causal."""

    def clone(self) -> Policy:
        """An equal policy with weights of its own."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        max_new: int,
        temperature: float,
        top_k: int,
        generator: torch.Generator,
    ) -> list[list[Drawn]]:
        """``count`` completions of every prompt, batched and with a key-value cache.

        Temperature 0 takes the likeliest token; otherwise one of the ``top_k`` likeliest (0: all) is drawn with
        probability softmax(logits / temperature) among them. At most ``max_new`` draws each, the end token among them.
        """


def encode_prompt(policy: Policy, text: str) -> list[int]:
    """The ids of a text to be continued, with those that the policy's tokenizer puts before a text, if it says any."""
    encode: Callable[[str], list[int]] = getattr(policy, "encode_prompt", policy.encode)
    return encode(text)


@runtime_checkable
class Split(Protocol):
    """A policy whose logits can be had a part at a time, from the states that they are a product of."""

    splits: bool
    """whether it is one: some models do more to their logits"""

    def states(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → [B, T, D]."""

    def head(self, states: Tensor) -> Tensor:
        """States [..., D] → logits [..., V]: head(states(tokens)) is logits(tokens), but for the rounding of sums."""


@runtime_checkable
class Prompting(Protocol):
    """A policy that is asked problems in its own way, such as by a chat template."""

    def prompt(self, problem: Problem) -> list[int]:
        """The ids that it is given to answer a problem; of other policies, the ids of the problem's prompt."""


@runtime_checkable
class Exportable(Protocol):
    """A policy that can be taken out of its run."""

    def export(self, folder: Path) -> None:
        """Write model and tokenizer as a Hugging Face folder, which appears at once and whole.

        :raises UserError: when it exists and is not empty, or cannot be written.
        """


_WITHOUT = ("version", "truncation", "padding", "post_processor")
"""parts of a tokenizer.json that neither our encoding nor decoding ever asks"""


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that read every text as the same ids, write every id as the same text and end with one id.

    The converse does not hold: the same tokenizer written down by another library may have another fingerprint.
    """
    parts = {key: part for key, part in json.loads(tokenizer.to_json()).items() if key not in _WITHOUT}
    content = json.dumps([tokenizer.end, parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def weights_fingerprint(module: nn.Module) -> str:
    """The first 16 hex digits of :func:`weights_digest`: enough against accidents, not against a forger."""
    return weights_digest(module)[:16]


def weights_digest(module: nn.Module) -> str:
    """Of every parameter, trained or not: :func:`planaria.models.fusing.digest`."""
    return digest(dict(module.named_parameters()))


def held(policy: Policy) -> str:
    """Equal for two peers that find every completion equally likely: the same weights and prompts."""
    parts = [weights_fingerprint(policy.module)]
    if (asking := getattr(policy, "asking", None)) is not None:
        parts.append(asking.fingerprint)
    if before := encode_prompt(policy, ""):
        parts.append(f"begins with {before}")
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
