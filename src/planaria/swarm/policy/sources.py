"""Where the policy of a peer comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from planaria.config.bounds import Natural
from planaria.config.registry import Choice
from planaria.swarm.config import SwarmConfig
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from planaria.swarm.policy.school import graduate
from planaria.swarm.tasks.base import Task


class PolicySource(Choice, ABC):
    """One way to come by a policy; the fields of a subclass are its options."""

    @abstractmethod
    def open(self, config: SwarmConfig, task: Task, told: Callable[[str], None] | None = None) -> Policy:
        """The policy that a peer of this configuration starts with, the same whenever it is asked.

        :raises UserError: when there is none to be had.
        """


class Small(PolicySource):
    """A small LLaMA (``policy.model``) that goes to school first."""

    def open(self, config: SwarmConfig, task: Task, told: Callable[[str], None] | None = None) -> Policy:
        return LlamaPolicy(*graduate(task, config.school, config.policy, on_progress=told))


class Pretrained(PolicySource):
    path: str
    """a run's or a Hugging Face folder, a GGUF file, or hf:NAME (hf:NAME:FILE.gguf)"""
    lora: Natural = 0
    """rank of the adapters that are trained instead of the weights; 0 trains the weights"""

    def open(self, config: SwarmConfig, task: Task, told: Callable[[str], None] | None = None) -> Policy:
        return open_policy(self.path, self.lora, seed=config.seed, chat=config.policy.chat != "never")
