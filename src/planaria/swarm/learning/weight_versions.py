"""Weights of the last rounds: with ``rounds.ahead`` = k, round n is drawn with the weights before round n − k.

A version is named after the first round that begins with it: version n has learned from all rounds before n. A window
holds k + 1 versions of the trained parameters; with k = 0 it holds no copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planaria.swarm.policy.base import Policy, likelihood_digest

Weights = Mapping[str, Tensor]
"""trained parameters by name"""


def drawing_round(number: int, ahead: int, first: int) -> int:
    """Return the version that draws round ``number``; a peer has none before its ``first`` round."""
    return max(first, number - ahead)


def why_stale(number: int, version: int, ahead: int) -> str:
    """Return why completions of ``version`` are too old for round ``number``; empty if they are not."""
    if number - version <= ahead:
        return ""
    return f"drawn with the weights of round {version}, {number - version} rounds old; rounds.ahead = {ahead}"


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True)
class WeightVersion:
    """Weights before a round; the tensors are never modified."""

    round: int
    digest: str
    """fingerprint of weights and prompts (:func:`likelihood_digest`); empty if it is not needed"""
    weights: Weights
    """empty if no copy is held"""

    def load(self, policy: Policy) -> None:
        """Copy the weights into a policy."""
        _load(policy, self.weights)


class WeightVersions:
    """The window of a policy that is trained in place."""

    def __init__(self, policy: Policy, ahead: int) -> None:
        self._policy, self._ahead = policy, ahead
        self.held: Mapping[int, WeightVersion] = {}
        """version → its weights: the newest are the policy's until it learns"""

    def record(self, number: int, digest: str = "") -> None:
        """Record the policy's weights at the start of round ``number``, and drop what is too old to draw it."""
        recent = {n: version for n, version in self.held.items() if number - self._ahead <= n < number}
        self.held = {**recent, number: self._current(number, digest)}

    def drawing(self, number: int) -> WeightVersion:
        """Return the version that draws round ``number``."""
        return self.held[drawing_round(number, self._ahead, min(self.held))]

    @property
    def digests(self) -> dict[int, str]:
        """Fingerprint by version."""
        return {number: version.digest for number, version in self.held.items()}

    @contextmanager
    def loaded(self, number: int) -> Iterator[WeightVersion]:
        """Give the policy the weights of version ``number``, or the next one held, before it learns in this round."""
        newest = max(self.held)
        version = self.held[min((n for n in self.held if n >= number), default=newest)]
        if version.round == newest:
            yield version
            return
        version.load(self._policy)
        try:
            yield version
        finally:
            self.held[newest].load(self._policy)

    def before(self, number: int) -> dict[int, Weights]:
        """Return the versions that a peer needs besides its present weights to begin with round ``number``."""
        return {n: v.weights for n, v in self.held.items() if number - self._ahead <= n < number}

    def restore(self, saved: Mapping[int, Weights]) -> None:
        """Replace the window by what :meth:`before` returned."""
        now, self.held = self._current(0), {}
        for number, weights in sorted(saved.items()):
            _load(self._policy, weights)
            self.held = {**self.held, number: self._current(number, likelihood_digest(self._policy))}
        now.load(self._policy)

    def _current(self, number: int, digest: str = "") -> WeightVersion:
        weights = {name: p.detach().clone() for name, p in trained(self._policy.module).items()} if self._ahead else {}
        return WeightVersion(number, digest, weights)


@torch.no_grad()
def _load(policy: Policy, weights: Weights) -> None:
    parameters = trained(policy.module)
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)
