"""A policy's side that reads and writes texts, the same for every kind of model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import nn

from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.models.usage import Usage
from planaria.swarm.policy.asking import Asking
from planaria.swarm.policy.base import ROOM
from planaria.swarm.policy.chat import Template
from planaria.swarm.policy.fingerprints import tokenizer_fingerprint
from planaria.swarm.tasks.base import Problem


class Wording:
    """A tokenizer beside a model with rows for ``vocab`` ids."""

    room: int = ROOM
    """numbers of logits at once"""
    bf16: bool = False
    """whether passes compute in bf16"""
    template: Template | None = None
    """the chat template that came with the model"""
    usage: Usage | None = None
    """what else came with the model; an export keeps it"""
    asking: Asking | None = None
    """how problems are put to it; None: as they stand"""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """:raises UserError: when the tokenizer has ids that the model has no rows for."""
        if tokenizer.vocab > vocab:
            raise UserError(
                f"policy: the tokenizer has {tokenizer.vocab} ids, the model rows for {vocab} only; "
                "give the tokenizer that the model was trained with"
            )
        self.tokenizer, self.vocab, self.end = tokenizer, vocab, tokenizer.end
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    def prompt(self, problem: Problem) -> list[int]:
        """The ids that it is given to answer a problem.

        :raises UserError: when its chat template fails.
        """
        return self.encode_prompt(problem.prompt) if self.asking is None else self.asking.ids(problem, self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text to be continued, with those that the tokenizer's template puts before a text."""
        return self.tokenizer.encode_prompt(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any separator."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end tokens, and ids that the tokenizer does not have, leave nothing."""
        return self.tokenizer.decode([i for i in ids if i != self.end])

    def passing(self, module: nn.Module) -> AbstractContextManager[object]:
        """What a pass through ``module`` runs in: its precision."""
        device = next(module.parameters()).device.type
        return torch.autocast(device, torch.bfloat16) if self.bf16 else nullcontext()

    def clone(self) -> Self:
        """An equal policy with weights of its own."""
        return copy.deepcopy(self, {id(self.tokenizer): self.tokenizer})
