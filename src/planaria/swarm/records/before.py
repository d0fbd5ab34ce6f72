"""What a peer was before a round, in memory: it goes back there when a certificate says that others were heard."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from planaria.swarm.checks.defence import Memory
from planaria.swarm.learning.learner import Learner


class Before:
    """Trained weights, moments and the defence's memory; it takes as much room as the optimizer and the weights."""

    def __init__(self, round: int, learners: Mapping[str, Learner], memory: Memory) -> None:
        self.round, self.memory = round, memory
        self._held = {
            name: (
                [parameter.detach().clone() for parameter in learner.parameters],
                copy.deepcopy(learner.optimizer.state_dict()),
            )
            for name, learner in learners.items()
        }

    @torch.no_grad()
    def restore(self, learners: Mapping[str, Learner]) -> None:
        """Make learners what they were."""
        for name, learner in learners.items():
            weights, moments = self._held[name]
            for parameter, held in zip(learner.parameters, weights, strict=True):
                parameter.copy_(held)
            learner.optimizer.load_state_dict(copy.deepcopy(moments))
