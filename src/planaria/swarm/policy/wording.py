"""A policy's side that reads and writes texts, the same for every kind of model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

from planaria.data.tokenizer import Tokenizer
from planaria.errors import UserError
from planaria.swarm.policy.fingerprints import tokenizer_fingerprint


class Wording:
    """A tokenizer beside a model with rows for ``vocab`` ids."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """:raises UserError: when the tokenizer has ids that the model has no rows for."""
        if tokenizer.vocab > vocab:
            raise UserError(
                f"policy: the tokenizer has {tokenizer.vocab} ids, the model rows for {vocab} only; "
                "give the tokenizer that the model was trained with"
            )
        self.tokenizer, self.vocab, self.end = tokenizer, vocab, tokenizer.end
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any separator."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end tokens, and ids that the tokenizer does not have, leave nothing."""
        return self.tokenizer.decode([i for i in ids if i != self.end])

    def clone(self) -> Self:
        """An equal policy with weights of its own."""
        return copy.deepcopy(self, {id(self.tokenizer): self.tokenizer})
