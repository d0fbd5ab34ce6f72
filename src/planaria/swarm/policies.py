"""Policies at hand: our own LLaMA, and whatever a folder holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planaria.data.tokenizer import Tokenizer
from planaria.errors import UserError
from planaria.model.decode import decode
from planaria.model.stages import Llama
from planaria.swarm.fingerprints import tokenizer_fingerprint
from planaria.swarm.policy import Policy
from planaria.swarm.rollout import Drawn


class LlamaPolicy:
    """Our own LLaMA as a policy (:class:`planaria.swarm.policy.Policy`); all of its parameters are trained.

    Gradients of :meth:`logits` are whole after one backward: nothing is left to fold.
    """

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        """:raises UserError: when the tokenizer has ids that the model has no rows for."""
        if tokenizer.vocab > model.config.vocab:
            raise UserError(
                f"policy: the tokenizer has {tokenizer.vocab} ids, the model rows for {model.config.vocab} only; "
                "give the tokenizer that the model was trained with"
            )
        self.module: Llama = model
        self.vocab, self.context = model.config.vocab, model.config.context
        self.end = tokenizer.end
        self.tokenizer = tokenizer
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any separator."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end tokens, and ids that the tokenizer does not have, leave nothing."""
        return self.tokenizer.decode(ids)

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V]; rows may be padded on the right."""
        return self.module.ends.logits(self.module.hidden(tokens), apart=False)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        max_new: int,
        temperature: float,
        top_k: int,
        generator: torch.Generator,
    ) -> list[list[Drawn]]:
        """``count`` completions of every prompt: at most ``max_new`` draws each, the end's among them.

        Draws and log-probabilities are those of :func:`planaria.model.decode.decode`: a completion does not depend on
        what else is sampled beside it.
        """
        rows = [prompt for prompt in prompts for _ in range(count)]
        drawn = [
            Drawn(row.ids, row.ended, row.logps)
            for row in decode(self.module, rows, max_new, temperature, top_k, generator, self.end)
        ]
        return [drawn[start : start + count] for start in range(0, len(rows), count)]


def faithful(policy: Policy, text: str) -> bool:
    """Whether the policy's tokenizer gives the text back as it was."""
    return policy.decode(policy.encode(text)) == text
