"""A policy as a writer: what a model adds to a request, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from planaria.swarm.policy.base import Policy, encode_prompt


@dataclass
class PolicyWriter:
    """Any model that planaria reads, asked in words (:class:`planaria.swarm.checks.prompted_judge.Writer`)."""

    policy: Policy
    tokens: int
    """most that it writes to a request"""
    temperature: float
    top_k: int = 0
    reserved: Sequence[str] = ()

    def write(self, requests: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        """What it writes to each request, drawn by the request's own seed; None for one that leaves no room."""
        return [self._one(request, seed) for request, seed in zip(requests, seeds, strict=True)]

    def _one(self, request: str, seed: int) -> str | None:
        prompt = encode_prompt(self.policy, request)
        room = min(self.tokens, self.policy.context - len(prompt))
        if room < 1:
            return None
        draws = torch.Generator().manual_seed(seed)
        ((drawn,),) = self.policy.sample([prompt], 1, room, self.temperature, self.top_k, draws)
        return self.policy.decode(drawn.ids)
