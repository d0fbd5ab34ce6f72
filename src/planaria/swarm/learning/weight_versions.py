"""Weights of the last rounds: with ``rounds.ahead`` = k, round n is drawn with the weights before round n − k.

Version n is the weights with which round n begins: it has learned from all rounds before n. A window holds k + 1
versions of the trained parameters; with k = 0 it holds no copy.
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


def drawing_round(round_number: int, ahead: int, first: int) -> int:
    """Return the version that draws a round; a peer has none before its ``first`` round."""
    return max(first, round_number - ahead)


def why_stale(round_number: int, version: int, ahead: int) -> str:
    """Return why completions of ``version`` are too old for a round, or an empty string if they are not."""
    if round_number - version <= ahead:
        return ""
    return f"drawn with the weights of round {version}, {round_number - version} rounds old; rounds.ahead = {ahead}"


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def cloned_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trained_parameters(module).items()}


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Weights) -> None:
    """Copy weights into the trained parameters of a module."""
    parameters = trained_parameters(module)
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)


@dataclass(frozen=True)
class WeightVersion:
    """Weights before a round; the tensors are never modified."""

    round: int
    digest: str
    """fingerprint of weights and prompts (:func:`likelihood_digest`); empty if it is not needed"""
    weights: Weights
    """empty if no copy is held"""

    def load(self, policy: Policy) -> None:
        copy_weights(policy.module, self.weights)


class WeightVersions:
    """The window of a policy that is trained in place."""

    def __init__(self, policy: Policy, ahead: int) -> None:
        self._policy, self._ahead = policy, ahead
        self.held: Mapping[int, WeightVersion] = {}
        """version → its weights: the newest are the policy's until it learns"""

    def record(self, round_number: int, digest: str = "") -> None:
        """Record the policy's weights at the start of a round, and drop versions that are too old to draw it."""
        recent = {n: version for n, version in self.held.items() if round_number - self._ahead <= n < round_number}
        self.held = {**recent, round_number: self._snapshot(round_number, digest)}

    def drawing_version(self, round_number: int) -> WeightVersion:
        return self.held[drawing_round(round_number, self._ahead, min(self.held))]

    @property
    def digests(self) -> dict[int, str]:
        return {number: version.digest for number, version in self.held.items()}

    @contextmanager
    def load_version(self, round_number: int) -> Iterator[WeightVersion]:
        """Temporarily load version ``round_number``, or the next one held, into the policy."""
        newest = max(self.held)
        version = self.held[min((n for n in self.held if n >= round_number), default=newest)]
        if version.round == newest:
            yield version
            return
        version.load(self._policy)
        try:
            yield version
        finally:
            self.held[newest].load(self._policy)

    def earlier_weights(self, round_number: int) -> dict[int, Weights]:
        """Return the versions that a peer needs, besides its current weights, to begin a round."""
        return {n: v.weights for n, v in self.held.items() if round_number - self._ahead <= n < round_number}

    def restore(self, saved: Mapping[int, Weights]) -> None:
        """Replace the window by what :meth:`earlier_weights` returned; the policy keeps its weights.

        A window of one version needs no earlier one.
        """
        self.held = {}
        if not self._ahead:
            return
        now = cloned_weights(self._policy.module)
        for number, weights in sorted(saved.items()):
            copy_weights(self._policy.module, weights)
            self.held = {**self.held, number: self._snapshot(number, likelihood_digest(self._policy))}
        copy_weights(self._policy.module, now)

    def _snapshot(self, round_number: int, digest: str = "") -> WeightVersion:
        weights = cloned_weights(self._policy.module) if self._ahead else {}
        return WeightVersion(round_number, digest, weights)
