"""Likelihoods of given completions under a policy, by one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from planaria.swarm.policy.base import MAX_LOGITS, Policy, Split

Floats = npt.NDArray[np.float64]
COPIES = 4
"""copies of the logits that a reading holds in memory"""


@dataclass(frozen=True)
class CompletionStatistics:
    """Statistics of one completion's T tokens under a policy before it trains on them."""

    logps: Floats
    """[T] log-probability in nats under softmax(logits / temperature) over the whole vocabulary"""
    ranks: npt.NDArray[np.int64]
    """[T] number of more likely tokens; 0 for the most likely"""
    entropies: Floats
    """[T] entropy in nats: the mean of −log p"""
    variances: Floats
    """[T] variance of −log p in nats²"""
    supports: Floats = field(default_factory=lambda: np.zeros(0))
    """[T] log-probability of the top-k set that sampling draws from; empty if it draws from all tokens"""

    @property
    def draw_logp(self) -> float:
        """Return the log-probability (nats) that sampling draws the completion, if it is within the support."""
        return float(self.logps.sum() - self.supports.sum())

    @property
    def surprisal(self) -> float:
        """Return z = Σ(−log p − H) / √ΣVar, about standard normal for the policy's own samples."""
        spread = float(np.sqrt(self.variances.sum()))
        excess = float((-self.logps - self.entropies).sum())
        return excess / spread if spread > 1e-9 else (0.0 if excess < 1e-6 else float("inf"))


UNREAD = CompletionStatistics(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
"""reading of a completion that needs no check: the policy's own"""


@dataclass(frozen=True)
class Padded:
    """Prompts and completions as one matrix, padded on the right."""

    tokens: Tensor
    """[N, T] ids of prompt and completion"""
    mask: Tensor
    """[N, T - 1] true where the *next* token belongs to the completion"""


def pad(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu") -> Padded:
    """Pad (prompt, completion) ids of N rows on the right with id 0, which causal attention never reads."""
    width = max(len(prompt) + len(ids) for prompt, ids in pairs)
    tokens = torch.zeros(len(pairs), width, dtype=torch.long)
    mask = torch.zeros(len(pairs), width - 1, dtype=torch.bool)
    for row, (prompt, ids) in enumerate(pairs):
        tokens[row, : len(prompt) + len(ids)] = torch.tensor([*prompt, *ids])
        mask[row, len(prompt) - 1 : len(prompt) + len(ids) - 1] = True
    return Padded(tokens.to(device), mask.to(device))


def rows_per_pass(policy: Policy, width: int, max_rows: int) -> int:
    """Return the number of rows of ``width`` tokens that fit in one pass with all their logits: 1 to ``max_rows``."""
    return min(max_rows, max(1, _max_logits(policy) // (width * policy.vocab)))


def token_logps(policy: Policy, batch: Padded, temperature: float) -> Tensor:
    """Return the log-probability [N, T - 1] of every next token under softmax(logits / temperature); gradients flow.

    If the logits exceed the memory limit, they are computed in parts, and again for the gradient. Prompt positions are
    then 0, and sums are added in another order.
    """
    if (split := _split_policy(policy, batch)) is None:
        return _target_logps(policy.logits(batch.tokens)[:, :-1], batch.tokens[:, 1:], temperature)
    states, targets = split.states(batch.tokens)[:, :-1][batch.mask], batch.tokens[:, 1:][batch.mask]
    head = split.head
    parts = [
        checkpoint(lambda s, t: _target_logps(head(s), t, temperature), some, aims, use_reentrant=False)
        for some, aims in zip(
            *(torch.split(tensor, _positions_per_pass(policy)) for tensor in (states, targets)), strict=True
        )
    ]
    result = torch.zeros(batch.mask.shape, device=states.device)
    return result.masked_scatter(batch.mask, torch.cat(parts))


@torch.no_grad()
def read_completions(
    policy: Policy,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    temperature: float,
    top_k: int = 0,
    rows: int = 256,
) -> list[CompletionStatistics]:
    """Return a reading of every (prompt, completion), at most ``rows`` per pass.

    ``top_k`` is the sampling support (0: all tokens); it changes :attr:`CompletionStatistics.draw_logp` only.
    """
    result: list[CompletionStatistics] = []
    device = next(policy.module.parameters()).device
    rows = rows_per_pass(policy, max((len(prompt) + len(ids) for prompt, ids in pairs), default=1), rows)
    for start in range(0, len(pairs), rows):
        batch = pad(pairs[start : start + rows], device)
        targets = torch.split(batch.tokens[:, 1:][batch.mask], _positions_per_pass(policy))
        parts = [
            _read_positions(logits, aims, temperature, top_k)
            for logits, aims in zip(_logits(policy, batch), targets, strict=True)
        ]
        ends = batch.mask.sum(1).cumsum(0).cpu().numpy()[:-1]
        columns = [np.split(torch.cat(column).cpu().numpy(), ends) for column in zip(*parts, strict=True)]
        for logps, ranks, entropies, variances, supports in zip(*columns, strict=True):
            result.append(CompletionStatistics(logps, ranks, entropies, variances, supports if top_k else np.zeros(0)))
    return result


def _read_positions(logits: Tensor, targets: Tensor, temperature: float, top_k: int) -> tuple[Tensor, ...]:
    """Return the columns of a :class:`CompletionStatistics`, each [M], for M positions with logits [M, V]."""
    scores = (logits.float() / temperature).log_softmax(-1)
    chosen = scores.gather(-1, targets[:, None])
    ranks = (scores > chosen).sum(-1)
    supports = scores.topk(min(top_k or 1, scores.shape[-1])).values.logsumexp(-1)
    weights = scores.exp()
    entropies = -(weights * scores).sum(-1)
    variances = ((weights * scores.square()).sum(-1) - entropies.square()).clamp_min(0)
    return chosen[:, 0].double(), ranks, entropies.double(), variances.double(), supports.double()


def _logits(policy: Policy, batch: Padded) -> Iterator[Tensor]:
    """Yield the logits [M, V] of the completions' tokens in row order, in parts that fit in memory."""
    if (split := _split_policy(policy, batch)) is None:
        yield from torch.split(policy.logits(batch.tokens)[:, :-1][batch.mask], _positions_per_pass(policy))
        return
    for states in torch.split(split.states(batch.tokens)[:, :-1][batch.mask], _positions_per_pass(policy)):
        yield split.head(states)


def _target_logps(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return log softmax(logits / temperature) [..., V] at ``targets`` [...]."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets[..., None])[..., 0] - scaled.logsumexp(-1)


def _split_policy(policy: Policy, batch: Padded) -> Split | None:
    """Return the policy if it must, and can, compute a batch's logits in parts."""
    fits = batch.tokens.numel() * policy.vocab <= _max_logits(policy)
    return policy if not fits and isinstance(policy, Split) and policy.splits else None


def _positions_per_pass(policy: Policy) -> int:
    """Return the number of tokens whose logits fit in one pass; processing takes several copies."""
    return max(1, _max_logits(policy) // (COPIES * policy.vocab))


def _max_logits(policy: Policy) -> int:
    return getattr(policy, "max_logits", MAX_LOGITS)
