"""How a policy reads texts that others have written: one forward pass, on which all checks of likelihood rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.swarm.policy.base import Policy

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """What a policy thinks of each of the T tokens of one completion, all of it before the policy trains on it."""

    logps: Floats
    """[T] log-probability in nats under softmax(logits / temperature), over the whole vocabulary"""
    ranks: npt.NDArray[np.int64]
    """[T] how many tokens were likelier; 0 is the likeliest"""
    entropies: Floats
    """[T] nats: the mean of −log p over what could have stood there"""
    variances: Floats
    """[T] nats²: its variance"""
    supports: Floats = field(default_factory=lambda: np.zeros(0))
    """[T] log-probability of all the tokens together that sampling draws from; empty where it draws from all"""

    @property
    def drawn(self) -> float:
        """Log-probability (nats) with which sampling draws the whole completion, if it lies within the support."""
        return float(self.logps.sum() - self.supports.sum())

    @property
    def surprisal(self) -> float:
        """z of the whole completion: Σ(−log p − H) / √ΣVar, about standard normal for the policy's own samples."""
        spread = float(np.sqrt(self.variances.sum()))
        excess = float((-self.logps - self.entropies).sum())
        return excess / spread if spread > 1e-9 else (0.0 if excess < 1e-6 else float("inf"))


UNREAD = Reading(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
"""of a completion that nobody needs to check: the policy's own, just drawn"""


@dataclass(frozen=True)
class Padded:
    """Prompts and completions as one matrix, padded on the right."""

    tokens: Tensor
    """[N, T] ids of prompt and completion"""
    mask: Tensor
    """[N, T - 1] true where the *next* token belongs to the completion"""


def pad(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu") -> Padded:
    """(prompt, completion) ids of N rows; the padding is id 0, which causal attention never looks back at."""
    width = max(len(prompt) + len(ids) for prompt, ids in pairs)
    tokens = torch.zeros(len(pairs), width, dtype=torch.long)
    mask = torch.zeros(len(pairs), width - 1, dtype=torch.bool)
    for row, (prompt, ids) in enumerate(pairs):
        tokens[row, : len(prompt) + len(ids)] = torch.tensor([*prompt, *ids])
        mask[row, len(prompt) - 1 : len(prompt) + len(ids) - 1] = True
    return Padded(tokens.to(device), mask.to(device))


def token_logps(policy: Policy, batch: Padded, temperature: float) -> Tensor:
    """[N, T - 1] log-probability of every next token under softmax(logits / temperature); gradients flow."""
    logits = policy.logits(batch.tokens)[:, :-1].float() / temperature
    return logits.gather(-1, batch.tokens[:, 1:, None])[..., 0] - logits.logsumexp(-1)


@torch.no_grad()
def read(
    policy: Policy,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    temperature: float,
    top_k: int = 0,
    rows: int = 256,
) -> list[Reading]:
    """A reading of every (prompt, completion), ``rows`` at a time.

    Sampling is taken to draw from the ``top_k`` likeliest tokens (0: all), which changes :attr:`Reading.drawn` alone.
    """
    found = []
    device = next(policy.module.parameters()).device
    for start in range(0, len(pairs), rows):
        part = pairs[start : start + rows]
        batch = pad(part, device)
        scores = (policy.logits(batch.tokens)[:, :-1].float() / temperature).log_softmax(-1)
        chosen = scores.gather(-1, batch.tokens[:, 1:, None])
        ranks = (scores > chosen).sum(-1)
        supports = scores.topk(min(top_k or 1, scores.shape[-1])).values.logsumexp(-1)
        weights = scores.exp()
        entropies = -(weights * scores).sum(-1)
        variances = ((weights * scores.square()).sum(-1) - entropies.square()).clamp_min(0)
        for row, mask in enumerate(batch.mask):
            parts = (chosen[..., 0], entropies, variances, supports)
            logps, entropy, variance, support = (part_of[row][mask].double().cpu().numpy() for part_of in parts)
            place = ranks[row][mask].cpu().numpy()
            found.append(Reading(logps, place, entropy, variance, support if top_k else np.zeros(0)))
    return found
