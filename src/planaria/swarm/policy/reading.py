"""How a policy reads texts that others have written: one forward pass, on which all checks of likelihood rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from planaria.swarm.policy.base import ROOM, Policy, Split

Floats = npt.NDArray[np.float64]
COPIES = 4
"""of logits that reading them takes at once"""


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


def rows_at_once(policy: Policy, width: int, most: int) -> int:
    """How many rows of ``width`` tokens have room in one pass, for the logits of all of them: 1 to ``most``."""
    return min(most, max(1, _room(policy) // (width * policy.vocab)))


def token_logps(policy: Policy, batch: Padded, temperature: float) -> Tensor:
    """[N, T - 1] log-probability of every next token under softmax(logits / temperature); gradients flow.

    Where there is no room for all logits, they are made a part at a time, and once more for the gradient: then what is
    not of the completions is 0, and sums are added in another order.
    """
    if (split := _split(policy, batch)) is None:
        return _chosen(policy.logits(batch.tokens)[:, :-1], batch.tokens[:, 1:], temperature)
    states, targets = split.states(batch.tokens)[:, :-1][batch.mask], batch.tokens[:, 1:][batch.mask]
    head = split.head
    parts = [
        checkpoint(lambda s, t: _chosen(head(s), t, temperature), some, aims, use_reentrant=False)
        for some, aims in zip(*(torch.split(tensor, _places(policy)) for tensor in (states, targets)), strict=True)
    ]
    found = torch.zeros(batch.mask.shape, device=states.device)
    return found.masked_scatter(batch.mask, torch.cat(parts))


@torch.no_grad()
def read(
    policy: Policy,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    temperature: float,
    top_k: int = 0,
    rows: int = 256,
) -> list[Reading]:
    """A reading of every (prompt, completion), at most ``rows`` at a time, fewer where there is no room for them.

    Sampling is taken to draw from the ``top_k`` likeliest tokens (0: all), which changes :attr:`Reading.drawn` alone.
    """
    found: list[Reading] = []
    device = next(policy.module.parameters()).device
    rows = rows_at_once(policy, max((len(prompt) + len(ids) for prompt, ids in pairs), default=1), rows)
    for start in range(0, len(pairs), rows):
        batch = pad(pairs[start : start + rows], device)
        targets = torch.split(batch.tokens[:, 1:][batch.mask], _places(policy))
        parts = [
            _read_places(logits, aims, temperature, top_k)
            for logits, aims in zip(_logits(policy, batch), targets, strict=True)
        ]
        ends = batch.mask.sum(1).cumsum(0).cpu().numpy()[:-1]
        columns = [np.split(torch.cat(column).cpu().numpy(), ends) for column in zip(*parts, strict=True)]
        for logps, ranks, entropies, variances, supports in zip(*columns, strict=True):
            found.append(Reading(logps, ranks, entropies, variances, supports if top_k else np.zeros(0)))
    return found


def _read_places(logits: Tensor, targets: Tensor, temperature: float, top_k: int) -> tuple[Tensor, ...]:
    """Of M places with logits [M, V]: the columns of a :class:`Reading`, each [M]."""
    scores = (logits.float() / temperature).log_softmax(-1)
    chosen = scores.gather(-1, targets[:, None])
    ranks = (scores > chosen).sum(-1)
    supports = scores.topk(min(top_k or 1, scores.shape[-1])).values.logsumexp(-1)
    weights = scores.exp()
    entropies = -(weights * scores).sum(-1)
    variances = ((weights * scores.square()).sum(-1) - entropies.square()).clamp_min(0)
    return chosen[:, 0].double(), ranks, entropies.double(), variances.double(), supports.double()


def _logits(policy: Policy, batch: Padded) -> Iterator[Tensor]:
    """Logits of the completions' tokens [M, V], in the order of rows, so many at a time as their reading has room for.

    They are a part of what the model makes of the whole rows, or made of a part of its states.
    """
    if (split := _split(policy, batch)) is None:
        yield from torch.split(policy.logits(batch.tokens)[:, :-1][batch.mask], _places(policy))
        return
    for states in torch.split(split.states(batch.tokens)[:, :-1][batch.mask], _places(policy)):
        yield split.head(states)


def _chosen(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) [..., V] at ``targets`` [...]."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets[..., None])[..., 0] - scaled.logsumexp(-1)


def _split(policy: Policy, batch: Padded) -> Split | None:
    """The policy, if it must make the logits of a batch a part at a time and can."""
    fits = batch.tokens.numel() * policy.vocab <= _room(policy)
    return policy if not fits and isinstance(policy, Split) and policy.splits else None


def _places(policy: Policy) -> int:
    """Tokens whose logits are worked on at a time: what is made of them takes several times their own room."""
    return max(1, _room(policy) // (COPIES * policy.vocab))


def _room(policy: Policy) -> int:
    return getattr(policy, "room", ROOM)
